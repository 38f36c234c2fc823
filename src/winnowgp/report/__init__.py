"""One self-contained page about a fitted model. Nothing here computes."""

from winnowgp.report.page import report_page, save_report
from winnowgp.report.summary import Summary

__all__ = ["Summary", "report_page", "save_report"]
