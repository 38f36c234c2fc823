"""Models: what has parameters, candidates and data, and can say what any subset is worth."""

from winnowgp.models.collapsed_objective import CollapsedObjective
from winnowgp.models.greedy_variance import greedy_variance
from winnowgp.models.kernel_blocks import KernelBlocks, kernel_blocks
from winnowgp.models.observations import Prediction
from winnowgp.models.posterior import Posterior
from winnowgp.models.sparse_gp import LEAST_NOISE, SparseGP

__all__ = [
    "LEAST_NOISE",
    "CollapsedObjective",
    "KernelBlocks",
    "Posterior",
    "Prediction",
    "SparseGP",
    "greedy_variance",
    "kernel_blocks",
]
