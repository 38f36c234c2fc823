"""A self-contained HTML report of a fitted table model."""

from winnowgp.report.summary import Summary, save_report

__all__ = ["Summary", "save_report"]
