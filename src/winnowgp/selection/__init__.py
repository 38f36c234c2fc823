"""Choosing: what a model must answer to be selectable, the ways to choose, and what comes out."""

from winnowgp.selection.elimination import DataRoot, Roots
from winnowgp.selection.frontier import (
    WEAKEST_ALPHA,
    Frontier,
    Selection,
    alpha_at,
    alpha_interval,
    concave_hull,
    path_frontier,
    polished,
    search_frontier,
    strongest_alpha,
)
from winnowgp.selection.natural import NaturalSelection, select_naturally
from winnowgp.selection.objective import (
    MarginalGainObjective,
    RelaxedObjective,
    SearchObjective,
    SearchState,
    SubsetObjective,
)
from winnowgp.selection.search import SearchResult, backward_path, climbed, forward_path, swapped
from winnowgp.selection.statistics import SubsetStatistics, SummedStatistics, subset_statistics

__all__ = [
    "WEAKEST_ALPHA",
    "DataRoot",
    "Frontier",
    "MarginalGainObjective",
    "NaturalSelection",
    "RelaxedObjective",
    "Roots",
    "SearchObjective",
    "SearchResult",
    "SearchState",
    "Selection",
    "SubsetObjective",
    "SubsetStatistics",
    "SummedStatistics",
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
    "strongest_alpha",
    "subset_statistics",
    "swapped",
]
