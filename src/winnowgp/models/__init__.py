"""Models: what has parameters, candidates and data, and can say what any subset is worth."""

from winnowgp.models.collapsed_objective import CollapsedObjective
from winnowgp.models.column_noise import gaussian_noise
from winnowgp.models.deep_gp import DeepEvaluation, DeepGP
from winnowgp.models.deep_layer import DeepLayer
from winnowgp.models.deep_objective import DeepObjective
from winnowgp.models.deep_posterior import DeepPosterior
from winnowgp.models.deep_sites import LayerSites, deep_sites, layer_sites
from winnowgp.models.deep_start import HIDDEN_MEANS, deep_layers
from winnowgp.models.expected_kernel import expected_kernel, has_psi
from winnowgp.models.expected_posterior import ExpectedPosterior
from winnowgp.models.greedy_variance import greedy_variance
from winnowgp.models.inducing_model import InducingModel, Model
from winnowgp.models.joint_process import JointProcess
from winnowgp.models.kernel_blocks import KernelBlocks, kernel_blocks
from winnowgp.models.latent_model import Latent, LatentModel
from winnowgp.models.latent_objective import LatentObjective
from winnowgp.models.latent_posterior import LatentPosterior
from winnowgp.models.latent_variable_gp import LatentVariableGP
from winnowgp.models.latents import Latents
from winnowgp.models.observations import (
    Prediction,
    check_targets,
    expected_log_prob,
    latent_functions,
)
from winnowgp.models.posterior import Posterior
from winnowgp.models.row_bound import ExpectedRowBound, RowBound
from winnowgp.models.sampled_latent_gp import SampledLatentGP
from winnowgp.models.sampled_posterior import SampledPosterior
from winnowgp.models.sparse_gp import LEAST_NOISE, SparseGP
from winnowgp.models.stand_in import valid
from winnowgp.models.streamed_variance import streamed_variance
from winnowgp.models.uncollapsed_objective import UncollapsedObjective
from winnowgp.models.updated_posterior import updated_posterior
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
    "ExpectedPosterior",
    "ExpectedRowBound",
    "InducingModel",
    "JointProcess",
    "KernelBlocks",
    "Latent",
    "LatentModel",
    "LatentObjective",
    "LatentPosterior",
    "LatentVariableGP",
    "Latents",
    "LayerSites",
    "Model",
    "Posterior",
    "Prediction",
    "RowBound",
    "SampledLatentGP",
    "SampledPosterior",
    "SparseGP",
    "UncollapsedObjective",
    "VariationalGP",
    "check_targets",
    "deep_layers",
    "deep_sites",
    "expected_kernel",
    "expected_log_prob",
    "gaussian_noise",
    "greedy_variance",
    "has_psi",
    "kernel_blocks",
    "latent_functions",
    "layer_sites",
    "streamed_variance",
    "updated_posterior",
    "valid",
]
