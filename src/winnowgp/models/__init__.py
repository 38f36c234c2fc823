"""Models: what has parameters, candidates and data, and can say what any subset is worth."""

from winnowgp.models.collapsed_objective import CollapsedObjective
from winnowgp.models.deep_gp import DeepEvaluation, DeepGP
from winnowgp.models.deep_layer import DeepLayer
from winnowgp.models.deep_objective import DeepObjective
from winnowgp.models.deep_posterior import DeepPosterior
from winnowgp.models.deep_sites import LayerSites, deep_sites, layer_sites
from winnowgp.models.deep_start import HIDDEN_MEANS, deep_layers
from winnowgp.models.greedy_variance import greedy_variance
from winnowgp.models.inducing_model import InducingModel, Model
from winnowgp.models.kernel_blocks import KernelBlocks, kernel_blocks
from winnowgp.models.observations import (
    Prediction,
    check_targets,
    expected_log_prob,
    latent_functions,
)
from winnowgp.models.posterior import Posterior
from winnowgp.models.sparse_gp import LEAST_NOISE, SparseGP
from winnowgp.models.uncollapsed_objective import UncollapsedObjective
from winnowgp.models.variational_gp import VariationalGP

__all__ = [
    "HIDDEN_MEANS",
    "LEAST_NOISE",
    "CollapsedObjective",
    "DeepEvaluation",
    "DeepGP",
    "DeepLayer",
    "DeepObjective",
    "DeepPosterior",
    "InducingModel",
    "KernelBlocks",
    "LayerSites",
    "Model",
    "Posterior",
    "Prediction",
    "SparseGP",
    "UncollapsedObjective",
    "VariationalGP",
    "check_targets",
    "deep_layers",
    "deep_sites",
    "expected_log_prob",
    "greedy_variance",
    "kernel_blocks",
    "latent_functions",
    "layer_sites",
]
