"""A self-contained HTML report of a fitted table model."""

from winnowgp.report.summary import Summary, report_page, save_report

__all__ = ["Summary", "report_page", "save_report"]
