"""Selection of inducing points: objectives, discrete search, frontiers and inclusion probabilities.

- `objective`: the interfaces that a model implements to be selectable, and subset statistics;
- `elimination`: exact marginal gains of subsets and moves between them, independent of N;
- `search`: backward elimination, forward selection and local search;
- `frontier`: the best bound for each number of inducing points, and the α that each implies;
- `natural`: inclusion probabilities fitted by natural gradients;
- `gibbs` and `chains`: samples of the optimal q(Z);
- `annealing`: the evidence of the optimal q(Z), which no q exceeds;
- `continuous`: samples of inducing points at arbitrary locations;
- `determinantal_fit`: a q(Z) with repulsion between similar candidates;
- `subset_samples`: the q(Z) of a fit, of any of these kinds, and diagnostics of its samples.
"""

from winnowgp.selection.annealing import subset_evidence
from winnowgp.selection.continuous import Box, RowDensity, sample_locations
from winnowgp.selection.determinantal_fit import fit_determinantal
from winnowgp.selection.frontier import (
    Frontier,
    SizeFrontier,
    alpha_at,
    alpha_interval,
    concave_hull,
    elimination_frontier,
    search_frontier,
)
from winnowgp.selection.gibbs import sample_subsets
from winnowgp.selection.natural import fit_inclusion
from winnowgp.selection.objective import MarginalGainObjective, SubsetObjective, SubsetStatistics
from winnowgp.selection.search import backward_elimination, forward_selection, local_search
from winnowgp.selection.subset_samples import SubsetPosterior

__all__ = [
    "Box",
    "Frontier",
    "MarginalGainObjective",
    "RowDensity",
    "SizeFrontier",
    "SubsetObjective",
    "SubsetPosterior",
    "SubsetStatistics",
    "alpha_at",
    "alpha_interval",
    "backward_elimination",
    "concave_hull",
    "elimination_frontier",
    "fit_determinantal",
    "fit_inclusion",
    "forward_selection",
    "local_search",
    "sample_locations",
    "sample_subsets",
    "search_frontier",
    "subset_evidence",
]
