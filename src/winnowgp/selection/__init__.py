"""Choosing: what a model must answer to be selectable, the ways to choose, and what comes out."""

from winnowgp.selection.elimination import DataRoot, Roots
from winnowgp.selection.frontier import (
    MIN_ALPHA,
    Frontier,
    Selection,
    alpha_at,
    alpha_interval,
    concave_hull,
    elimination_frontier,
    largest_alpha,
    multistart_search,
    search_frontier,
)
from winnowgp.selection.natural import InclusionFit, fit_inclusion
from winnowgp.selection.objective import (
    MarginalGainObjective,
    RelaxedObjective,
    SearchObjective,
    SearchState,
    SubsetObjective,
)
from winnowgp.selection.search import (
    SearchResult,
    backward_elimination,
    forward_selection,
    local_search,
    swap_search,
)
from winnowgp.selection.statistics import SubsetStatistics, SummedStatistics, subset_statistics

__all__ = [
    "MIN_ALPHA",
    "DataRoot",
    "Frontier",
    "InclusionFit",
    "MarginalGainObjective",
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
    "backward_elimination",
    "concave_hull",
    "elimination_frontier",
    "fit_inclusion",
    "forward_selection",
    "largest_alpha",
    "local_search",
    "multistart_search",
    "search_frontier",
    "subset_statistics",
    "swap_search",
]
