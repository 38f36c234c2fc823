"""The shallow alternative of a deep fit: a deep GP whose hidden layers are the identity.

Sampled training of a deep GP does not always reach the ELBO of a shallow GP of the same rows, for
which the evidence selects kernel, hyper-parameters and many more inducing points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.data import Dataset, Source
from winnowgp.estimators import validation
from winnowgp.estimators.kernels import kernel_from
from winnowgp.models import DeepGP, DeepLayer, Posterior, SparseGP
from winnowgp.models.deep_gp import seeded_elbo
from winnowgp.models.deep_sites import deep_sites
from winnowgp.models.likelihoods import copy_likelihood
from winnowgp.models.priors import add_weak_priors, remove_priors
from winnowgp.selection.frontier import Selection
from winnowgp.training import DeepTraining, FastSchedule, FitResult, Tolerance, fit
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG
from winnowgp.training.depth import (
    FEWEST_ROWS,
    density_gain,
    held_out,
    held_out_scores,
    log_densities,
)
from winnowgp.training.fast_deep import grow_candidates
from winnowgp.training.initialization import noise_of, set_noise, with_unit_weights
from winnowgp.training.lbfgs import Stop
from winnowgp.training.schedules import SizedDeepModel, draw_seed, training_context
from winnowgp.training.scoring import optimise_evidence

FEW_ROWS = 2000
"""Largest number of rows of which a shallow GP is a start, and all processes have all rows. Its
hyper-parameters are optimised again for a part of so few rows."""
# Number of samples that the optimal q(u) of a last layer is computed with.
_SITE_SAMPLES = 2
# Prior variance of hidden functions about the identity.
_VARIANCE = 1e-8
# Share of few and of many rows that are held out.
_SHARE, _SMALLER_SHARE = 0.2, 0.1
# Number of distances between inducing points and rows that are in memory at once.
_DISTANCES = 2**25
# Factor that the learning rate decreases to in the training that is compared.
_COOLING = 0.03
# Least gain of a deep GP, in nats per observation: that of a constant target has no standard error.
_LEAST_GAIN = 1e-3


def has_shallow_alternative(params: validation.Parameters, rows: Source) -> bool:
    """Return whether a deep GP of these parameters can be a shallow one, and may be."""
    defaults = params.schedule == "fast" and params.hidden_mean == "auto"
    limits = (params.alpha, params.max_cost, params.max_predict_us)
    return (
        defaults
        and params.tolerance is not None
        and all(limit is None for limit in limits)
        and can_be_shallow(params, rows)
        and params.shallow_alternative
        and (rows.N <= FEW_ROWS or rows.process_group.world_size == 1)
    )


def has_shallow_start(params: validation.Parameters, rows: Source) -> bool:
    """Return whether a shallow GP of the rows is fitted for a start of a deep one."""
    return params.tolerance is not None and rows.N <= FEW_ROWS and can_be_shallow(params, rows)


def can_be_shallow(params: validation.Parameters, rows: Source) -> bool:
    """Return whether a shallow GP is a deep one with hidden layers at the identity."""
    return (
        isinstance(params.likelihood, GaussianLikelihood)
        and noise_of(params.likelihood) is not None
        and all(width == rows.D for width in params.width[: params.layers - 1])
        and not params.skip_connections
        and isinstance(params.kernel[params.layers - 1], str)
        and rows.P == 1
    )


@final
@dataclass(frozen=True, slots=True)
class ShallowComparison:
    """A deep GP beside a shallow GP of the same rows. Gains are those of the deep one."""

    selected: Literal["deep", "shallow"]
    """Which of them is the result: the deep one if its ELBO is higher, and its log density of
    held-out rows is higher by more than the standard error and 0.001 nats per observation. With
    fewer than 20 rows none are held out, and the shallow one is the result in any case: its ELBO
    can then be below that of the deep one by more than the tolerance, see `elbo_gain`."""
    elbo_gain: float
    """Difference of the ELBOs, in nats per observation."""
    density_gain: float | None
    """Difference of the mean log densities of held-out rows, in nats per observation; None if the
    ELBO decided, or if there are too few rows to hold some out."""
    density_gain_error: float | None
    """Standard error of this difference over held-out rows."""


def with_shallow_alternative(
    result: FitResult[Any], data: Source, params: validation.Parameters
) -> tuple[FitResult[Any], ShallowComparison | None]:
    """Return the result of a deep fit, or that of a shallow GP, and how they were compared.

    If the ELBO of the deep GP is higher, both are trained on a part of the rows, and predict the
    others. ELBOs of different models differ in how tight they are, and a higher one alone says
    little about predictions. The shallow GP is the simpler model, so that the deep one has to
    predict better by more than the standard error.

    If the shallow GP is the result, the deep GPs are further models, with their gap.

    Args:
        result: of the deep fit.
        data: standardised rows.
    """
    rows = data.as_dataset()
    if rows is None:
        # Few rows, which every process then has and fits alike.
        rows = data.part(torch.arange(data.N))
    kernels = params.shallow_kernels or (params.kernel[params.layers - 1],)
    shallow = _fitted_shallow(rows, params, kernels, params.shallow_candidates)
    seed = draw_seed(params.generator)
    model = _as_deep(shallow, rows, result.model, params.layers - 1, params.generator)
    elbo = seeded_elbo(model, rows, params.generator, seed=seed)
    comparison = _compared(result, shallow.model, elbo, rows, params)
    comparison = data.process_group.broadcast_object(comparison)
    if comparison.selected == "deep":
        return result, comparison
    identity = [
        Selection(points.new_ones(1), points.new_ones(1).bool(), points.new_zeros(0), None, None)
        for points in model.candidate_sets[:-1]
    ]
    shallow_result = FitResult(
        model=model,
        posterior=model.posterior(samples=0),
        selections=(*identity, shallow.selection),
        candidates=(
            *(points.detach() for points in model.candidate_sets[:-1]),
            shallow.candidates[0],
        ),
        elbo=elbo,
        elbo_gap=max(shallow.elbo_gap, result.elbo + result.elbo_gap - elbo),
        allocations=(*result.allocations, SizedDeepModel(result.posterior, result.elbo)),
    )
    return shallow_result, comparison


def _compared(
    result: FitResult[Any],
    shallow: SparseGP,
    elbo: float,
    rows: Dataset,
    params: validation.Parameters,
) -> ShallowComparison:
    """Return the comparison of a deep fit with a shallow GP, whose ELBO is `elbo`."""
    generator = params.generator
    elbo_gain = (result.elbo - elbo) / rows.observations
    if elbo_gain <= 0 or rows.N < FEWEST_ROWS:
        return ShallowComparison("shallow", elbo_gain, None, None)
    few = rows.N <= FEW_ROWS
    test, train = held_out(rows, share=_SHARE if few else _SMALLER_SHARE, generator=generator)
    start = _start_of(params.start, result, train, generator)
    training = DeepTraining(samples=params.samples).layer_training(cooling=_COOLING)
    with training_context(params.log, generator=generator, callbacks=params.callbacks) as context:
        _, nats = held_out_scores(
            start,
            train,
            test,
            training=training,
            layerwise=params.epochs[0],
            steps=params.epochs[1] if few else (1 + params.repeats) * params.epochs[1],
            batch_size=params.batch_size,
            phase="comparison",
            context=context,
        )
    shallow = shallow.with_candidates(points_of_part(train, test, shallow.candidates.detach()))
    # Many rows without a tenth of them have nearly the same hyper-parameters.
    alternative = (_refitted(shallow, train) if few else shallow).posterior(train)
    gain, error = density_gain(nats, log_densities(alternative, test), weights=test.weights)
    selected = "deep" if gain > max(error, _LEAST_GAIN) else "shallow"
    return ShallowComparison(selected, elbo_gain, gain, error)


def points_of_part(
    train: Dataset, test: Dataset, points: Float[Tensor, "M D"]
) -> Float[Tensor, "L D"]:
    """Return inducing points of all rows as those of a part: none is at a row of the others.

    A point that is closest to one of these moves to the closest row of the part, unless another
    point is there. New rows are at no inducing point; at one, the residual variance k(x, x) −
    q(x, x) is zero, and predictions are too confident (`benchmarks/deep.py points`).
    """
    if len(points) == 0:
        return points
    distance, closest = _closest(points, train.X)
    moved = _closest(points, test.X)[0] < distance
    return torch.where(moved[:, None], train.X[closest], points).unique(dim=0)


def _closest(
    points: Float[Tensor, "M D"], rows: Float[Tensor, "N D"]
) -> tuple[Float[Tensor, " M"], Int[Tensor, " M"]]:
    """Return the distance to the closest row, and its number."""
    # Products would round distances of zero.
    exactly = "donot_use_mm_for_euclid_dist"
    chunks = points.split(max(1, _DISTANCES // len(rows)))
    pairs = [torch.cdist(chunk, rows, compute_mode=exactly).min(1) for chunk in chunks]
    distances, numbers = zip(*pairs, strict=True)
    return torch.cat(distances), torch.cat(numbers)


def _refitted(shallow: SparseGP, train: Dataset) -> SparseGP:
    """Return a shallow GP with the hyper-parameters of a part of its rows.

    They are optimised from those of all rows: anew, kernels and optima that are nearly equal would
    be compared, and those of fewer rows may predict much worse (by 0.35 nats per observation on
    one split of energy).
    """
    if shallow.K == 0:
        return shallow
    # Priors are kept: the evidence of few rows alone can take noise for a function.
    model = shallow.with_candidates(train.X[:0])
    rows = with_unit_weights(model, train)
    stop = Stop(gain=1e-3 * rows.observations, window=10, iterations=60)
    optimise_evidence(model, rows, stop, NO_CHECKPOINT_LOG)
    return model.with_candidates(shallow.candidates.detach())


def _start_of(
    start: DeepGP, result: FitResult[Any], train: Dataset, generator: torch.Generator
) -> DeepGP:
    """Return the start of a deep fit for a part of its rows, with as many candidates."""
    if bool(start.layers[-1].q_mean.any()):
        # That of a shallow GP knows the targets of all rows.
        start = _with_best_q(start, train, generator)
    most = min(max(len(points) for points in result.candidates), train.N)
    while max(start.sizes) < most:
        larger = grow_candidates(start, train, most, generator)
        if larger.sizes == start.sizes:
            break
        start = larger
    return start


def is_identity(model: DeepGP) -> bool:
    """Return whether the hidden layers of a model are those of a shallow alternative."""
    hidden = [layer.kernel for layer in model.layers[:-1]]
    return all(
        isinstance(kernel, ScaleKernel) and kernel.outputscale.item() <= 2 * _VARIANCE
        for kernel in hidden
    )


def with_shallow_top(model: DeepGP, rows: Dataset, params: validation.Parameters) -> DeepGP:
    """Return an initial deep GP whose last layer is a shallow GP of the same kernel.

    Where a constant is the best shallow GP, the model is returned as it is.

    Args:
        model: an initial model whose hidden layers are close to the identity.
        rows: standardised rows.
    """
    kernels = (params.kernel[params.layers - 1],)
    shallow = _fitted_shallow(rows, params, kernels, params.n_candidates).model
    if shallow.K == 0:
        return model
    top = DeepLayer(shallow.kernel, shallow.candidates.detach(), outputs=1)
    start = model.with_layers([*model.layers[:-1], top])
    remove_priors(start)
    _set_noise_of(start, shallow)
    return _with_best_q(start, rows, _reseeded(params.generator))


def _reseeded(generator: torch.Generator) -> torch.Generator:
    """Return another generator with the seed of the fit."""
    return torch.Generator(generator.device).manual_seed(generator.initial_seed())


def _fitted_shallow(
    rows: Dataset, params: validation.Parameters, kernels: Sequence[str], most: int | None
) -> FitResult[SparseGP]:
    """Return the fit of a shallow GP with the best of some kernels, and so many candidates."""
    first, *others = (kernel_from(kernel, rows.D) for kernel in kernels)
    model = SparseGP(first, rows.X[:0], noise=0.1)
    # As in `SparseGPRegressor`: the evidence of few rows alone can take noise for a function.
    for module in (model.kernel, model.likelihood, *others):
        add_weak_priors(module)
    schedule = FastSchedule(
        Tolerance(params.tolerance),
        n_candidates=most,
        kernels=tuple(others),
        linear_term=bool(others),
    )
    return fit(
        model,
        rows,
        schedule=schedule,
        callbacks=params.callbacks,
        checkpoint=params.log,
        # So that a shallow estimator of the same `random_state` gives the same.
        generator=_reseeded(params.generator),
    )


def _as_deep(
    shallow: FitResult[SparseGP],
    rows: Dataset,
    like: DeepGP,
    hidden: int,
    generator: torch.Generator,
) -> DeepGP:
    """Return a shallow GP, or a constant, as a deep one with the optimal q(u)."""
    D, last = rows.D, shallow.model.candidates.detach() if shallow.model.K else rows.X[:1]
    kernel = ScaleKernel(RBFKernel(ard_num_dims=D))
    kernel.outputscale = _VARIANCE
    eye = torch.eye(D, dtype=last.dtype)
    # One point with its prior: hidden functions are the identity, and the KL divergence is zero.
    identity = [
        DeepLayer(kernel, rows.X[:1], outputs=D, slope=eye.to(last.device)) for _ in range(hidden)
    ]
    top = DeepLayer(shallow.model.kernel, last, outputs=1)
    posterior = shallow.posterior
    if shallow.model.K:
        assert isinstance(posterior, Posterior)
        # Layers have triangular factors: F Fᵀ = Rᵀ R with Fᵀ = Q R. The eigenvalues of F Fᵀ range
        # over too many orders of magnitude for its Cholesky factor if there is hardly any noise.
        R = torch.linalg.qr(posterior.q_factor.mT, mode="r").R
        top = top.with_q(
            last, posterior.q_mean, (R.diagonal(dim1=-2, dim2=-1).sign()[..., None] * R).mT
        )
    model = DeepGP([*identity, top], likelihood=copy_likelihood(like.likelihood))
    remove_priors(model)
    _set_noise_of(model, shallow.model)
    return model if shallow.model.K else _with_best_q(model, rows, generator)


def _set_noise_of(model: DeepGP, shallow: SparseGP) -> None:
    noise = noise_of(model.likelihood)
    assert noise is not None
    set_noise(model.likelihood, shallow.noise.detach().expand_as(noise.value))


def _with_best_q(model: DeepGP, rows: Dataset, generator: torch.Generator) -> DeepGP:
    """Return the model with the optimal q(u) of its last layer, given the others."""
    sites = deep_sites(model, rows, eps=model.base_samples(rows.N, _SITE_SAMPLES, generator))
    return model.with_layers([*model.layers[:-1], sites[-1].improved(model.layers[-1])])
