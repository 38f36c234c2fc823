"""One self-contained page about a fitted model. Nothing here computes."""

from winnowgp.report.page import report_page, save_report
from winnowgp.report.summary import Findings, checked_findings

__all__ = ["Findings", "checked_findings", "report_page", "save_report"]
