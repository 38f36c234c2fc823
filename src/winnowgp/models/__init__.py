"""Models: what has parameters, candidates and data, and can say what any subset is worth."""

from winnowgp.models.base import InducingModel, Model
from winnowgp.models.candidates import chunked_greedy_variance, greedy_variance
from winnowgp.models.deep_gp import DeepEvaluation, DeepGP, DeepObjective
from winnowgp.models.deep_layer import HIDDEN_MEANS, DeepLayer, deep_layers
from winnowgp.models.deep_posterior import DeepPosterior
from winnowgp.models.deep_sites import LayerSites, deep_sites, layer_sites
from winnowgp.models.gplvm import (
    Latent,
    LatentModel,
    LatentObjective,
    Latents,
    LatentVariableGP,
    SampledLatentGP,
    gaussian_noise,
)
from winnowgp.models.gplvm_posterior import (
    ExpectedPosterior,
    ExpectedRowELBO,
    LatentPosterior,
    RowELBO,
    SampledPosterior,
)
from winnowgp.models.kernels import KernelBlocks, expected_kernel, has_psi, kernel_blocks
from winnowgp.models.likelihoods import Prediction, fill_with_observed
from winnowgp.models.posterior import JointPosterior, Posterior, updated_posterior
from winnowgp.models.sgpr import LEAST_NOISE, CollapsedObjective, SparseGP
from winnowgp.models.svgp import UncollapsedObjective, VariationalGP

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
    "ExpectedRowELBO",
    "InducingModel",
    "JointPosterior",
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
    "RowELBO",
    "SampledLatentGP",
    "SampledPosterior",
    "SparseGP",
    "UncollapsedObjective",
    "VariationalGP",
    "chunked_greedy_variance",
    "deep_layers",
    "deep_sites",
    "expected_kernel",
    "fill_with_observed",
    "gaussian_noise",
    "greedy_variance",
    "has_psi",
    "kernel_blocks",
    "layer_sites",
    "updated_posterior",
]
