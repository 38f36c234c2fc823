"""Serialisation of models and their posteriors: the fields of each kind and how it is built.

A posterior keeps the Cholesky factors of its covariance matrices: on another machine they would
differ where a matrix is nearly singular. A posterior predicts once when it is built, so that
components that do not fit together are found when a file is loaded.
"""

from typing import Any

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood, SoftmaxLikelihood
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import ModelFileError
from winnowgp.io.registry import register
from winnowgp.models import (
    DeepGP,
    DeepLayer,
    DeepPosterior,
    ExpectedPosterior,
    Latents,
    LatentVariableGP,
    Posterior,
    SampledLatentGP,
    SampledPosterior,
    SparseGP,
    VariationalGP,
    latent_functions,
)

_MAX_SAMPLES = 1_000_000
"""Samples per prediction of a deep GP: far more than a prediction needs."""

_COMPONENTS: dict[str, Any] = {"kernel": Kernel, "mean": Mean, "likelihood": Likelihood}
_FROZEN: dict[str, Any] = {"frozen": list[str]}


def _posterior(
    kernel: Kernel, mean: Mean, likelihood: Likelihood, Z: Tensor, q_mean: Tensor, **q: Tensor
) -> Posterior:
    P = q_mean.shape[1]
    if isinstance(likelihood, SoftmaxLikelihood) and likelihood.num_features != P:
        raise ModelFileError(
            f"a Posterior has {P} latent functions and a likelihood of {likelihood.num_features}"
        )
    posterior = Posterior(kernel, Z, mean=mean, likelihood=likelihood, q_mean=q_mean, **q)
    posterior.predict(Z.new_zeros(1, Z.shape[1]), observed=True)
    return posterior


register(
    "Posterior",
    Posterior,
    _COMPONENTS
    | {
        "Z": Float[Tensor, "M D"],
        "q_mean": Float[Tensor, "M P"],
        "q_factor": Float[Tensor, "#P M M"],
        "L": Float[Tensor, "M M"],
    },
    build=_posterior,
)


def _sparse_gp(likelihood: Likelihood, **arguments: Any) -> SparseGP:
    model = SparseGP(**arguments)
    model.likelihood = likelihood
    return model


register(
    "SparseGP",
    SparseGP,
    _COMPONENTS | {"candidates": Float[Tensor, "K D"], "precision": str} | _FROZEN,
    build=_sparse_gp,
)


def _variational_gp(q_mean: Tensor, q_factor: Tensor, **arguments: Any) -> VariationalGP:
    # The model allocates as many latent functions as its likelihood has.
    P = latent_functions(arguments["likelihood"], arguments["targets"])
    if q_mean.shape[1] != P:
        raise ModelFileError(f"a VariationalGP has {P} latent functions, q(u) {q_mean.shape[1]}")
    model = VariationalGP(**arguments)
    model.q_mean.data.copy_(q_mean)
    model.q_factor.data.copy_(q_factor)
    return model


register(
    "VariationalGP",
    VariationalGP,
    _COMPONENTS
    | {
        "candidates": Float[Tensor, "K D"],
        "q_mean": Float[Tensor, "K P"],
        "q_factor": Float[Tensor, "P K K"],
        "targets": int,
    }
    | _FROZEN,
    build=_variational_gp,
)


def _deep_layer(
    kernel: Kernel, candidates: Tensor, slope: Tensor, level: Tensor, **q: Tensor
) -> DeepLayer:
    layer = DeepLayer(kernel, candidates, outputs=len(level), slope=slope).with_q(candidates, **q)
    layer.level.data.copy_(level)
    return layer


register(
    "DeepLayer",
    DeepLayer,
    {
        "kernel": Kernel,
        "candidates": Float[Tensor, "K D"],
        "slope": Float[Tensor, "D P"],
        "level": Float[Tensor, " P"],
        "q_mean": Float[Tensor, "K P"],
        "q_factor": Float[Tensor, "P K K"],
    }
    | _FROZEN,
    build=_deep_layer,
)

_DEEP: dict[str, Any] = {"layers": list[DeepLayer], "likelihood": Likelihood, "connected": bool}
register("DeepGP", DeepGP, _DEEP | {"targets": int})


def _deep_posterior(samples: int, factors: list[Tensor], **arguments: Any) -> DeepPosterior:
    layers = arguments["layers"]
    if samples > _MAX_SAMPLES:
        raise ModelFileError(f"a DeepPosterior draws {samples} samples per prediction")
    if [factor.shape for factor in factors] != [(layer.K, layer.K) for layer in layers]:
        raise ModelFileError("the factors of a DeepPosterior do not fit its layers")
    softmax = isinstance(arguments["likelihood"], SoftmaxLikelihood)
    DeepGP(**arguments, targets=1 if softmax else layers[-1].P)  # checks that the layers fit
    posterior = DeepPosterior(**arguments, samples=samples, factors=factors)
    with torch.no_grad():
        posterior.predict_matched(layers[0].candidates.new_zeros(1, layers[0].D), observed=True)
    return posterior


register(
    "DeepPosterior",
    DeepPosterior,
    _DEEP | {"samples": int, "factors": list[Float[Tensor, "_ _"]]},
    build=_deep_posterior,
)


def _latents(mean: Tensor, log_variance: Tensor) -> Latents:
    latents = Latents(mean)
    latents.log_variance.data.copy_(log_variance)  # the variance would be off by rounding
    return latents


register(
    "Latents",
    Latents,
    {"mean": Float[Tensor, "N Q"], "log_variance": Float[Tensor, "N Q"]},
    build=_latents,
)


def _latent_variable_gp(
    latents: Latents, candidates: Tensor, likelihood: Likelihood, kernel: Kernel
) -> LatentVariableGP:
    _check_latent_dimensions(candidates, latents)
    model = LatentVariableGP(kernel, latents, candidates=candidates)
    model.likelihood = likelihood
    return model


register(
    "LatentVariableGP",
    LatentVariableGP,
    {
        "kernel": Kernel,
        "likelihood": Likelihood,
        "latents": Latents,
        "candidates": Float[Tensor, "K Q"],
    }
    | _FROZEN,
    build=_latent_variable_gp,
)


def _sampled_latent_gp(function: VariationalGP, latents: Latents) -> SampledLatentGP:
    _check_latent_dimensions(function.candidates, latents)
    return SampledLatentGP(function, latents)


register(
    "SampledLatentGP",
    SampledLatentGP,
    {"function": VariationalGP, "latents": Latents} | _FROZEN,
    build=_sampled_latent_gp,
)


def _check_latent_dimensions(candidates: Tensor, latents: Latents) -> None:
    if candidates.shape[1] != latents.Q:
        raise ModelFileError(
            f"inducing points have {candidates.shape[1]} dimensions, latent positions {latents.Q}"
        )


def _register_latent_posterior(
    kind: str, cls: type[ExpectedPosterior] | type[SampledPosterior]
) -> None:
    def build(function: Posterior) -> ExpectedPosterior | SampledPosterior:
        posterior = cls(function)
        position = function.Z.new_zeros(1, posterior.Q)
        posterior.predict(position, position + 1, observed=True)
        return posterior

    register(kind, cls, {"function": Posterior}, build=build)


_register_latent_posterior("ExpectedPosterior", ExpectedPosterior)
_register_latent_posterior("SampledPosterior", SampledPosterior)
