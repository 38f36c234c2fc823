"""Serialisation of models and their posteriors: the fields of each kind and how it is built.

A posterior keeps the factors of its covariance matrices: on another machine they would differ where
a matrix is nearly singular, and loading would take O(M³). A posterior predicts once when it is
built, so that components that do not fit together are found when a file is loaded.
"""

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, SoftmaxLikelihood
from gpytorch.means import Mean
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp import models
from winnowgp.errors import ModelFileError
from winnowgp.io.registry import register, register_class
from winnowgp.models.fidelity_posterior import FidelityPosterior, NonlinearFidelityPosterior
from winnowgp.models.gplvm import Latents
from winnowgp.models.gplvm_posterior import ExpectedPosterior, LatentPosterior, SampledPosterior
from winnowgp.models.heteroscedastic import (
    HeteroscedasticGP,
    HeteroscedasticPosterior,
    LogVarianceLikelihood,
)
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.multi_output_posterior import ProcessMixture
from winnowgp.models.target_likelihoods import TargetLikelihoods

_MAX_SAMPLES = 1_000_000
"""Samples per prediction of a deep GP: far more than a prediction needs."""


@register("Posterior", models.Posterior)
def _posterior(
    kernel: Kernel,
    mean: Mean,
    likelihood: Likelihood,
    Z: Float[Tensor, "M D"],
    q_mean: Float[Tensor, "M P"],
    q_factor: Float[Tensor, "#P M M"],
    L: Float[Tensor, "M M"],
    gain: Float[Tensor, "#P M M"] | None,
    signs: Float[Tensor, "#P M"] | None,
) -> models.Posterior:
    P = q_mean.shape[1]
    if isinstance(likelihood, SoftmaxLikelihood) and likelihood.num_features != P:
        raise ModelFileError(
            f"a Posterior has {P} latent functions and a likelihood of {likelihood.num_features}"
        )
    if gain is not None and not (signs is not None and len(q_factor) == len(gain) == len(signs)):
        raise ModelFileError("the cached factors of a Posterior do not fit its q(u)")
    posterior = models.Posterior(
        kernel,
        Z,
        mean=mean,
        likelihood=likelihood,
        q_mean=q_mean,
        q_factor=q_factor,
        L=L,
        gain=gain,
        signs=signs,
    )
    posterior.predict(Z.new_zeros(1, Z.shape[1]), observed=True)
    return posterior


@register("SparseGP", models.SparseGP, frozen=True)
def _sparse_gp(
    kernel: Kernel,
    mean: Mean,
    likelihood: Likelihood,
    candidates: Float[Tensor, "K D"],
    precision: str,
) -> models.SparseGP:
    model = models.SparseGP(kernel, candidates, mean=mean, precision=precision)
    model.likelihood = likelihood
    return model


@register("VariationalGP", models.VariationalGP, frozen=True)
def _variational_gp(
    kernel: Kernel,
    mean: Mean,
    likelihood: Likelihood,
    candidates: Float[Tensor, "K D"],
    q_mean: Float[Tensor, "K P"],
    q_factor: Float[Tensor, "P K K"],
    targets: int,
) -> models.VariationalGP:
    # The model allocates as many latent functions as its likelihood has.
    P = observation_model(likelihood).num_latents(targets)
    if q_mean.shape[1] != P:
        raise ModelFileError(f"a VariationalGP has {P} latent functions, q(u) {q_mean.shape[1]}")
    model = models.VariationalGP(
        kernel, candidates, likelihood=likelihood, targets=targets, mean=mean
    )
    model.q_mean.data.copy_(q_mean)
    model.q_factor.data.copy_(q_factor)
    return model


register_class(HeteroscedasticGP)
register_class(
    HeteroscedasticPosterior,
    {
        "one function and one log noise of the same columns": lambda own: (
            own.function.Z.shape[1] == own.log_noise.Z.shape[1]
            and own.function.P == own.log_noise.P == 1
            and isinstance(own.log_noise.likelihood, LogVarianceLikelihood)
        )
    },
)
register_class(models.MixturePosterior)


@register(
    "MultiOutputGP",
    models.MultiOutputGP,
    state=lambda model: {
        "kernels": list(model.kernels),
        "candidates": [points.detach() for points in model.candidate_sets],
        "mixing": model.mixing.detach(),
        "learnt": model.mixing_learnt,
        "likelihood": model.likelihood,
    },
    frozen=True,
)
def _multi_output_gp(
    kernels: list[Kernel],
    candidates: list[Float[Tensor, "_ D"]],
    mixing: Float[Tensor, "P Q"],
    learnt: Bool[Tensor, "P Q"],
    likelihood: Likelihood,
) -> models.MultiOutputGP:
    model = models.MultiOutputGP(
        kernels, candidates, mixing=mixing, learnt=learnt, noise=mixing.new_ones(len(mixing))
    )
    model.likelihood = _of_targets(likelihood, len(mixing))
    return model


@register(
    "MultiOutputPosterior",
    models.MultiOutputPosterior,
    state=lambda posterior: {
        "kernels": list(posterior.kernels),
        "Z": list(posterior.inducing_points),
        "mixing": posterior.mixing,
        "likelihood": posterior.likelihood,
        "q_mean": posterior.q_mean,
        "q_factor": posterior.q_factor,
        "L": list(posterior.factors),
    },
)
def _multi_output_posterior(
    kernels: list[Kernel],
    Z: list[Float[Tensor, "_ D"]],
    mixing: Float[Tensor, "P Q"],
    likelihood: Likelihood,
    q_mean: Float[Tensor, " M"],
    q_factor: Float[Tensor, "M M"],
    L: list[Float[Tensor, "_ _"]],
) -> models.MultiOutputPosterior:
    sizes = [len(points) for points in Z]
    same = len(kernels) == len(Z) == mixing.shape[1] and sum(sizes) == len(q_mean)
    if not same or [factor.shape for factor in L] != [(size, size) for size in sizes]:
        raise ModelFileError("the parts of a MultiOutputPosterior do not fit together")
    posterior = models.MultiOutputPosterior(
        kernels,
        Z,
        mixing=mixing,
        likelihood=_of_targets(likelihood, len(mixing)),
        q_mean=q_mean,
        q_factor=q_factor,
        L=L,
    )
    posterior.predict(Z[0].new_zeros(1, Z[0].shape[1]), observed=True)
    return posterior


register_class(
    ProcessMixture,
    {
        "weights that are not negative": lambda own: (
            (own.member_weights >= 0).all() and own.member_weights.sum() > 0
        )
    },
    fields={
        "mode": models.MultiOutputPosterior,
        "members": list[models.MultiOutputPosterior],
        "member_weights": Float[Tensor, " S"],
    },
)
register_class(
    FidelityPosterior,
    {
        "ascending levels": lambda own: (own.levels.diff() > 0).all(),
        "a level for each target": lambda own: (
            len(own.levels) == getattr(own.function, "mode", own.function).P
        ),
    },
)
register_class(
    NonlinearFidelityPosterior,
    {
        "ascending levels": lambda own: (own.levels.diff() > 0).all(),
        "a function for each level": lambda own: len(own.functions) == len(own.levels) > 0,
        "inputs that grow by the fidelities below": lambda own: _are_chained(own.functions),
    },
    fields={
        "functions": list[ProcessMixture],
        "column": int,
        **dict.fromkeys(("levels", "shift", "scale"), Float[Tensor, " F"]),
    },
)


def _are_chained(functions: list[ProcessMixture]) -> bool:
    widths = [each.mode.Z.shape[1] for each in functions]
    # All fidelities below are inputs; only the next one in files of earlier versions.
    return all(w - widths[0] in (1, t) for t, w in enumerate(widths[1:], 1))


def _of_targets(likelihood: Likelihood, P: int) -> Likelihood:
    """Return a likelihood that must have a noise variance or a part for each of P targets."""
    gaussian = isinstance(likelihood, GaussianLikelihood) and likelihood.noise.shape == (P,)
    several = isinstance(likelihood, TargetLikelihoods) and len(likelihood.parts) == P
    if not (gaussian or several):
        raise ModelFileError(f"a model of {P} targets has another likelihood")
    return likelihood


@register("DeepLayer", models.DeepLayer, frozen=True)
def _deep_layer(
    kernel: Kernel,
    candidates: Float[Tensor, "K D"],
    slope: Float[Tensor, "D P"],
    level: Float[Tensor, " P"],
    q_mean: Float[Tensor, "K P"],
    q_factor: Float[Tensor, "P K K"],
) -> models.DeepLayer:
    layer = models.DeepLayer(kernel, candidates, outputs=len(level), slope=slope)
    layer = layer.with_q(candidates, q_mean, q_factor)
    layer.level.data.copy_(level)
    return layer


register_class(
    models.DeepGP,
    fields={
        "layers": list[models.DeepLayer],
        "likelihood": Likelihood,
        "targets": int,
        "skip_connections": bool,
    },
)


@register("DeepPosterior", models.DeepPosterior)
def _deep_posterior(
    layers: list[models.DeepLayer],
    likelihood: Likelihood,
    skip_connections: bool,
    samples: int,
    factors: list[Float[Tensor, "_ _"]],
) -> models.DeepPosterior:
    if samples > _MAX_SAMPLES:
        raise ModelFileError(f"a DeepPosterior draws {samples} samples per prediction")
    if [factor.shape for factor in factors] != [(layer.K, layer.K) for layer in layers]:
        raise ModelFileError("the factors of a DeepPosterior do not fit its layers")
    targets = 1 if isinstance(likelihood, SoftmaxLikelihood) else layers[-1].P
    # Checks that the layers fit together.
    models.DeepGP(layers, likelihood=likelihood, targets=targets, skip_connections=skip_connections)
    posterior = models.DeepPosterior(
        layers,
        likelihood=likelihood,
        skip_connections=skip_connections,
        samples=samples,
        factors=factors,
    )
    with torch.no_grad():
        posterior.predict_matched(layers[0].candidates.new_zeros(1, layers[0].D), observed=True)
    return posterior


@register("Latents", Latents)
def _latents(mean: Float[Tensor, "N Q"], log_variance: Float[Tensor, "N Q"]) -> Latents:
    latents = Latents(mean)
    latents.log_variance.data.copy_(log_variance)  # the variance would be off by rounding
    return latents


@register("LatentVariableGP", models.LatentVariableGP, frozen=True)
def _latent_variable_gp(
    kernel: Kernel,
    likelihood: Likelihood,
    latents: Latents,
    candidates: Float[Tensor, "K Q"],
) -> models.LatentVariableGP:
    _check_latent_dimensions(candidates, latents)
    model = models.LatentVariableGP(kernel, latents, candidates=candidates)
    model.likelihood = likelihood
    return model


@register("SampledLatentGP", models.SampledLatentGP, frozen=True)
def _sampled_latent_gp(function: models.VariationalGP, latents: Latents) -> models.SampledLatentGP:
    _check_latent_dimensions(function.candidates, latents)
    return models.SampledLatentGP(function, latents)


@register("ExpectedPosterior", ExpectedPosterior)
def _expected_posterior(function: models.Posterior) -> LatentPosterior:
    return _checked_prediction(ExpectedPosterior(function))


@register("SampledPosterior", SampledPosterior)
def _sampled_posterior(function: models.Posterior) -> LatentPosterior:
    return _checked_prediction(SampledPosterior(function))


def _check_latent_dimensions(candidates: Tensor, latents: Latents) -> None:
    if candidates.shape[1] != latents.Q:
        raise ModelFileError(
            f"inducing points have {candidates.shape[1]} dimensions, latent positions {latents.Q}"
        )


def _checked_prediction(posterior: LatentPosterior) -> LatentPosterior:
    position = posterior.function.Z.new_zeros(1, posterior.Q)
    posterior.predict(position, position + 1, observed=True)
    return posterior
