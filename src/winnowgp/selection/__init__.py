"""Choosing: what a model must answer to be selectable, the ways to choose, and what comes out."""

from winnowgp.selection.alpha import alpha_at, alpha_interval, concave_hull
from winnowgp.selection.frontier import Frontier, path_frontier, polished, search_frontier
from winnowgp.selection.natural import NaturalSelection, select_naturally
from winnowgp.selection.objective import FlipObjective, RelaxedObjective, SubsetObjective
from winnowgp.selection.search import Found, backward_path, climbed, forward_path, swapped
from winnowgp.selection.selection import Selection
from winnowgp.selection.statistics import SubsetStatistics, subset_statistics

__all__ = [
    "FlipObjective",
    "Found",
    "Frontier",
    "NaturalSelection",
    "RelaxedObjective",
    "Selection",
    "SubsetObjective",
    "SubsetStatistics",
    "alpha_at",
    "alpha_interval",
    "backward_path",
    "climbed",
    "concave_hull",
    "forward_path",
    "path_frontier",
    "polished",
    "search_frontier",
    "select_naturally",
    "subset_statistics",
    "swapped",
]
