"""Models with parameters and candidate inducing points, and their posteriors."""

from winnowgp.models.deep_gp import DeepGP
from winnowgp.models.deep_layer import DeepLayer, deep_layers
from winnowgp.models.deep_posterior import DeepPosterior
from winnowgp.models.gplvm import LatentVariableGP, SampledLatentGP
from winnowgp.models.greedy import ModelLocations, greedy_variance
from winnowgp.models.kernels import BoxKernel
from winnowgp.models.mixture import MixturePosterior, subset_mixture
from winnowgp.models.multi_output import MultiOutputGP
from winnowgp.models.multi_output_posterior import MultiOutputPosterior
from winnowgp.models.online import OnlineGP
from winnowgp.models.pathwise import PosteriorPaths
from winnowgp.models.posterior import Posterior
from winnowgp.models.sgpr import SparseGP
from winnowgp.models.svgp import VariationalGP

__all__ = [
    "BoxKernel",
    "DeepGP",
    "DeepLayer",
    "DeepPosterior",
    "LatentVariableGP",
    "MixturePosterior",
    "ModelLocations",
    "MultiOutputGP",
    "MultiOutputPosterior",
    "OnlineGP",
    "Posterior",
    "PosteriorPaths",
    "SampledLatentGP",
    "SparseGP",
    "VariationalGP",
    "deep_layers",
    "greedy_variance",
    "subset_mixture",
]
