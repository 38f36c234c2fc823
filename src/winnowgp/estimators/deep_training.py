"""How deep estimators are trained: the model that a fit begins with, and the schedule."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from math import sqrt
from typing import Any

import torch
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, PoissonLikelihood, SoftmaxLikelihood

from winnowgp.data import Dataset, Source
from winnowgp.estimators import validation
from winnowgp.estimators.base import goal_within
from winnowgp.estimators.deep_shallow import has_shallow_start, with_shallow_top
from winnowgp.estimators.kernels import kernel_from
from winnowgp.models import DeepGP, deep_layers
from winnowgp.models.deep_gp import deep_predict_us
from winnowgp.models.deep_layer import HIDDEN_MEANS
from winnowgp.models.likelihoods import has_noise, observation_model
from winnowgp.training import (
    DeepTraining,
    FastSchedule,
    MaxCost,
    MaxPredictTime,
    PaperSchedule,
    Schedule,
)
from winnowgp.training.depth import DepthScore, select_depth
from winnowgp.training.initialization import best_level, noise_of
from winnowgp.training.layer_training import select_start, start_from_shallow

DEPTHS = (1, 2, 3)
"""Numbers of layers that "auto" compares."""

FIRST_CANDIDATES, _MOST_CANDIDATES = 64, 1024
"""Initial and largest number of candidates per layer, if they grow."""
# Rounds in which points are removed, and with a number for `alpha`: it can remove most points, and
# training does not regain what few large steps cost (`benchmarks/deep_jumps.py`).
_ROUNDS, _ALPHA_ROUNDS = 3, 10
# Initial prior variance of what a hidden function adds to the identity, and one that is so small
# that q(u) can start at the prior.
_HIDDEN_VARIANCE, _NARROW_VARIANCE = 0.1, 1e-5


def selected_depth(
    rows: Dataset, data: Source, params: validation.Parameters
) -> tuple[int, tuple[DepthScore, ...]]:
    """Return the number of layers that predicts held-out rows best, and the scores of all."""
    mean = _hidden_means(params)[0]
    starts = [initial_deep_gp(rows, params, layers=L, hidden_mean=mean) for L in DEPTHS]
    training = DeepTraining(samples=params.samples).layer_training(cooling=0.03)
    best, scores = select_depth(
        starts,
        data,
        training=training,
        steps=params.epochs[1] // 2,
        **_settings(params),
    )
    return DEPTHS[best], scores


def best_start(rows: Dataset, data: Source, params: validation.Parameters) -> DeepGP:
    """Return the best of several starts after a short training, untrained."""
    means = _hidden_means(params) if params.layers > 1 else HIDDEN_MEANS[:1]
    layers = params.layers
    starts = [initial_deep_gp(rows, params, layers=layers, hidden_mean=mean) for mean in means]
    if _has_shallow_hyperparameters(params, means):
        starts.append(deepcopy(starts[0]))
        start_from_shallow(starts[-1], rows, seed=params.generator.initial_seed())
        if has_shallow_start(params, data):
            narrow = initial_deep_gp(rows, params, layers=layers, hidden_mean=means[0], narrow=True)
            starts.append(with_shallow_top(narrow, rows, params))
    if len(starts) == 1:
        return starts[0]
    return select_start(
        starts,
        data,
        steps=params.epochs[1] // 5,
        samples=params.samples,
        **_settings(params),
    )


def deep_schedule(model: DeepGP, params: validation.Parameters) -> Schedule:
    """Return the schedule of all layers that the parameters specify."""
    settings: dict[str, Any] = {"samples": params.samples, "batch_size": params.batch_size}
    if params.schedule == "paper":
        layerwise, pre, joint, post = params.epochs
        return PaperSchedule(
            params.alpha, layerwise=layerwise, pre=pre, joint=joint, post=post, **settings
        )
    layerwise, pre, post = params.epochs
    goal = goal_within(params, _limit(model, params))
    training = DeepTraining(
        layerwise=layerwise,
        pre=pre,
        post=post,
        most_repeats=params.repeats,
        predict_samples=params.predict_samples,
        max_candidates=_MOST_CANDIDATES if params.n_candidates is None else None,
        smaller_models=params.smaller_models,
        **settings,
    )
    rounds = _ROUNDS if params.alpha is None else _ALPHA_ROUNDS
    return FastSchedule(goal, rounds=rounds, deep=training)


def _limit(model: DeepGP, params: validation.Parameters) -> MaxCost | MaxPredictTime | None:
    """Return the limit on the inducing points of all layers that the parameters specify."""
    if params.max_cost is not None:
        return MaxCost(params.max_cost)
    if params.max_predict_us is None:
        return None

    @cache
    def predict_us(sizes: tuple[int, ...]) -> float:
        # A resumed fit does not measure again.
        samples = params.predict_samples
        return params.log.once(lambda: deep_predict_us(model, sizes, samples=samples))

    return MaxPredictTime(params.max_predict_us, predict_us)


def _settings(params: validation.Parameters) -> dict[str, Any]:
    """Return the settings of trainings that are compared."""
    return {
        "layerwise": params.epochs[0],
        "batch_size": params.batch_size,
        "generator": params.generator,
        "callbacks": params.callbacks,
        "checkpoint": params.log,
    }


def _hidden_means(params: validation.Parameters) -> tuple[str, ...]:
    return HIDDEN_MEANS if params.hidden_mean == "auto" else (params.hidden_mean,)


def _has_shallow_hyperparameters(params: validation.Parameters, means: Sequence[str]) -> bool:
    """Return whether the first start can have the hyper-parameters of a shallow GP as well."""
    return (
        params.schedule == "fast"
        and means[0] == "identity"
        and isinstance(params.likelihood, GaussianLikelihood)
        and noise_of(params.likelihood) is not None
        and not isinstance(params.kernel[params.layers - 1], Kernel)
    )


def initial_deep_gp(
    data: Dataset,
    params: validation.Parameters,
    *,
    layers: int,
    hidden_mean: str,
    narrow: bool = False,
) -> DeepGP:
    """Return an untrained model whose candidates are random rows.

    Args:
        layers: number of layers.
        hidden_mean: mean function of hidden layers.
        narrow: whether hidden functions have a prior of so small a variance about the identity that
            q(u) starts there, instead of a q(u) that is much narrower than the prior. Its KL
            divergence, six nats for every point and output, outweighs what few rows can gain.
    """
    # On the CPU, so that the same rows are drawn for every device.
    X = data.X.cpu()
    seeded = torch.Generator().manual_seed(params.generator.initial_seed())
    order = torch.randperm(data.N, generator=seeded)
    likelihood = params.likelihood

    def kernel(number: int, inputs: int) -> Kernel:
        hidden = number < layers - 1 and hidden_mean == "identity"
        variance = _NARROW_VARIANCE if narrow else _HIDDEN_VARIANCE
        return initial_kernel(params.kernel[number], inputs, hidden, variance=variance)

    made = deep_layers(
        X,
        X[order[: params.n_candidates or FIRST_CANDIDATES]],
        kernel=kernel,
        widths=(*params.width[: layers - 1], observation_model(likelihood).num_latents(data.P)),
        skip_connections=params.skip_connections,
        hidden_mean=hidden_mean,
        q_scale=1.0 if narrow else 1e-3,
    )
    model = DeepGP(
        made, likelihood=likelihood, targets=data.P, skip_connections=params.skip_connections
    )
    model = model.to(params.device)
    if not has_noise(likelihood) and not isinstance(likelihood, SoftmaxLikelihood):
        _set_level(model, data)
    return model


def initial_kernel(
    kernel: str | Kernel, inputs: int, hidden: bool, *, variance: float = _HIDDEN_VARIANCE
) -> Kernel:
    """Return the initial kernel of a layer.

    The lengthscales of a kernel string start at √D: two standardised rows are typically √(2D)
    apart. Those of equal terms differ, as in `kernel_from`.

    Args:
        kernel: a string, or a kernel that is used as it is.
        inputs: number of inputs.
        hidden: whether the layer adds to the identity.
        variance: factor of its prior variance then.
    """
    initial = kernel_from(kernel, inputs)
    if isinstance(kernel, Kernel):
        return initial
    for component in initial.modules():
        if isinstance(component, ScaleKernel):
            if hidden:
                component.outputscale = variance * component.outputscale.detach()
        elif isinstance(component, Kernel) and component.has_lengthscale:
            lengthscale = component.lengthscale.detach()
            component.initialize(lengthscale=sqrt(lengthscale.shape[-1]) * lengthscale)
    return initial


@torch.no_grad()
def _set_level(model: DeepGP, data: Dataset) -> None:
    """Set mean and variance of the last layer to the level and spread of the targets.

    Adam would need very many steps to reach large counts from zero.
    """
    last, likelihood = model.layers[-1], model.likelihood
    last.level.fill_(best_level(likelihood, data))
    if isinstance(last.kernel, ScaleKernel) and isinstance(likelihood, PoissonLikelihood):
        # Beyond small counts the rate is the function itself.
        last.kernel.outputscale = data.Y.var(correction=0).clamp_min(1.0)
