"""A self-contained HTML report of a fitted table model."""

from winnowgp.report.summary import save_report

__all__ = ["save_report"]
