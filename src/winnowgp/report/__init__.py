"""A self-contained HTML report of a fitted table model."""

from winnowgp.report.sentences import save_report
from winnowgp.report.summary import Summary

__all__ = ["Summary", "save_report"]
