"""A self-contained HTML report of a fitted table model."""

from winnowgp.report.page import report_page, save_report
from winnowgp.report.summary import Summary

__all__ = ["Summary", "report_page", "save_report"]
