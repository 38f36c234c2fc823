"""Choosing: what a model must answer to be selectable, and what comes out."""

from winnowgp.selection.objective import RelaxedObjective, SubsetObjective
from winnowgp.selection.selection import Selection

__all__ = ["RelaxedObjective", "Selection", "SubsetObjective"]
