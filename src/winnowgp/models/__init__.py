"""Models with parameters and candidate inducing points, and their posteriors."""

from winnowgp.models.box_kernel import BoxKernel
from winnowgp.models.deep_gp import DeepGP
from winnowgp.models.deep_layer import DeepLayer, deep_layers
from winnowgp.models.deep_posterior import DeepPosterior
from winnowgp.models.fidelity_posterior import (
    FidelityModel,
    FidelityPosterior,
    NonlinearFidelityPosterior,
)
from winnowgp.models.gplvm import Latents, LatentVariableGP, SampledLatentGP
from winnowgp.models.gplvm_posterior import LatentPosterior
from winnowgp.models.greedy import ModelLocations, greedy_variance
from winnowgp.models.heteroscedastic import (
    HeteroscedasticGP,
    HeteroscedasticPosterior,
    LogVarianceLikelihood,
)
from winnowgp.models.mixture import MixturePosterior, subset_mixture
from winnowgp.models.multi_output import MultiOutputGP
from winnowgp.models.multi_output_posterior import MultiOutputPosterior, ProcessMixture
from winnowgp.models.observations import Prediction
from winnowgp.models.online import OnlineGP
from winnowgp.models.pathwise import PosteriorPaths
from winnowgp.models.posterior import JointPosterior, Posterior
from winnowgp.models.sgpr import SparseGP
from winnowgp.models.svgp import VariationalGP
from winnowgp.models.target_likelihoods import TargetLikelihoods

__all__ = [
    "BoxKernel",
    "DeepGP",
    "DeepLayer",
    "DeepPosterior",
    "FidelityModel",
    "FidelityPosterior",
    "HeteroscedasticGP",
    "HeteroscedasticPosterior",
    "JointPosterior",
    "LatentPosterior",
    "LatentVariableGP",
    "Latents",
    "LogVarianceLikelihood",
    "MixturePosterior",
    "ModelLocations",
    "MultiOutputGP",
    "MultiOutputPosterior",
    "NonlinearFidelityPosterior",
    "OnlineGP",
    "Posterior",
    "PosteriorPaths",
    "Prediction",
    "ProcessMixture",
    "SampledLatentGP",
    "SparseGP",
    "TargetLikelihoods",
    "VariationalGP",
    "deep_layers",
    "greedy_variance",
    "subset_mixture",
]
