"""One self-contained page about a fitted model. Nothing here computes."""

from winnowgp.report.checked_findings import checked_findings
from winnowgp.report.findings import Findings
from winnowgp.report.page import report_page, save_report

__all__ = ["Findings", "checked_findings", "report_page", "save_report"]
