"""One self-contained page about a fitted model. Nothing here computes."""

from winnowgp.report.findings import Findings

__all__ = ["Findings"]
