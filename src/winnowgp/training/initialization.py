"""Initial hyper-parameters and latent positions."""

from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf, sqrt

import gpytorch
import torch
from gpytorch import Module
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import (
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import ConstantMean
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset, MaskedMatrix
from winnowgp.errors import TrainingError
from winnowgp.models.base import InducingModel, Model
from winnowgp.models.likelihoods import observation_model
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG, CheckpointLog
from winnowgp.training.lbfgs import Stop, climb

# Where mean, noise and variance of a latent function may start, for any likelihood.


_ROWS = 1000


@dataclass(frozen=True, slots=True)
class NoiseParameter:
    """The noise variance that a likelihood learns, and the module that keeps it."""

    holder: Module
    value: Tensor
    """σ², detached."""


def noise_of(likelihood: Likelihood) -> NoiseParameter | None:
    """The likelihood's noise variance, if it has one that is to be learnt."""
    if not isinstance(likelihood, GaussianLikelihood | StudentTLikelihood | LaplaceLikelihood):
        return None
    holder = likelihood.noise_covar if isinstance(likelihood, GaussianLikelihood) else likelihood
    learnt = likelihood.raw_noise.requires_grad
    return NoiseParameter(holder, likelihood.noise.detach()) if learnt else None


@torch.no_grad()
def best_level(likelihood: Likelihood, data: Dataset) -> Tensor:
    """The constant latent function under which the targets are most probable, on a grid."""
    rows = data.part(slice(_ROWS))
    Y = rows.Y
    steps = torch.linspace(0, 1, 41, dtype=Y.dtype, device=Y.device)
    levels = torch.cat([8 * steps - 4, Y.quantile(steps), Y.mean()[None]])
    F = observation_model(likelihood).num_latents(data.P)
    flat = torch.zeros(len(Y), F, dtype=Y.dtype, device=Y.device)
    nats = [
        rows.weighted(observation_model(likelihood).expected_log_prob(Y, flat + level, flat)).sum()
        for level in levels
    ]
    return levels[int(torch.stack(nats).nan_to_num(-torch.inf).argmax())]


def kernel_variances(likelihood: Likelihood, data: Dataset) -> tuple[float, ...]:
    """Prior variances of the latent function worth a start, where there is no noise to vary."""
    if isinstance(likelihood, PoissonLikelihood | NegativeBinomialLikelihood):
        # Beyond small counts GPyTorch's rate is the latent function itself.
        return (1.0, max(10.0, data.Y.var(correction=0).item()))
    return (1.0, 10.0)


# Where a fit starts: hyper-parameters from the exact evidence of a few rows, the best of several.
#
# A subset of rows does not bias the lengthscales, where too few inducing points held in place do:
# they make the bound prefer a smoother function with more noise.


STAGES = (250, 500, 1000)


def warmed_up(
    model: Model,
    data: Dataset,
    *,
    order: Tensor,
    stages: tuple[int, ...] = STAGES,
    checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG,
) -> Model:
    """A copy of the model with no candidates and warm hyper-parameters.

    Every start is climbed on the first few rows of `order`; the two best distinct ones go on to
    more rows with the lengthscales of idle columns brought back into range, the best one also as it
    is; and so on. The best on the last rows is returned.
    """
    fitted = starting_points(model, data)
    best = fitted[0]
    for stage, count in enumerate(stages):
        if stage and stages[stage - 1] >= data.N:
            break
        rows = _counted_once(model, data.part(order[:count]))
        climbed = [(_climb(start, rows, checkpoint_log), start) for start in fitted]
        ranked = sorted(climbed, key=lambda r: -r[0])
        top = ranked[0][0]
        others = [start for value, start in ranked[1:] if value < top - 2e-3 * rows.observations]
        best = ranked[0][1]
        revived = [deepcopy(start) for start in [best, *others][:2]]
        for start in revived:
            _shorten(start.kernel, data)
        # The best as it is, too: bringing back a column that more rows do not want either can end
        # in a worse mode.
        fitted = [deepcopy(best), *revived]
    return best


def starting_points(model: Model, data: Dataset) -> list[Model]:
    """The model as given, and variants that reach every likelihood mode seen so far.

    Lengthscales of √D or 1 standard deviations of the inputs (two typical rows are √(2D) apart, so
    √D correlates them by e⁻¹), and of a tenth with up to three inputs, where rows are dense enough
    to tell a quick function from noise; noise of a tenth or a hundredth of the targets' variance,
    or two variances of the kernel where a likelihood has no noise; a constant mean where the
    targets are most probable.
    """
    bare = model.with_candidates(data.X[:0])
    starts = [bare]
    level = best_level(model.likelihood, data)
    constant = isinstance(model.mean, ConstantMean) and any(
        p.requires_grad for p in model.mean.parameters()
    )
    square = (data.Y - level * constant).square()
    if data.weights is not None:
        square = data.weighted(square) * (data.N / data.observations)
    variance = square.mean().item()
    noisy = noise_of(model.likelihood) is not None
    scales = (0.1, 0.01) if noisy else kernel_variances(model.likelihood, data)
    quick = [0.1] if data.D <= 3 else []
    for factor in sorted({sqrt(data.D), 1.0, *quick}, reverse=True):
        for scale in scales:
            start = deepcopy(bare)
            for kernel in trainable_lengthscales(start.kernel):
                set_within(kernel, "lengthscale", factor * _spread(kernel, data))
            if isinstance(start.mean, ConstantMean) and constant:
                start.mean.initialize(constant=level)
            if noisy:
                set_noise(start.likelihood, data.X.new_tensor(max(scale * variance, 1e-5)))
            else:
                for kernel in trainable_variances(start.kernel):
                    set_within(kernel, "outputscale", data.X.new_tensor(scale))
            starts.append(start)
    return starts


def _counted_once(model: InducingModel, rows: Dataset) -> Dataset:
    """Rows whose weights are one on average, where more would speak for no noise at all.

    Several equal observations of a row determine its noise exactly: the evidence with a learnt σ²
    has no maximum, and whatever starts near that has no use for inducing points.
    """
    noisy = noise_of(model.likelihood) is not None
    if rows.weights is None or not noisy or rows.observations <= rows.N:
        return rows
    return replace(rows, weights=rows.weights * (rows.N / rows.observations))


def _climb(model: InducingModel, rows: Dataset, checkpoint_log: CheckpointLog) -> float:
    """Maximise the exact evidence of the rows; −∞ where it cannot be computed at all."""
    stop = Stop(gain=1e-3 * rows.observations, window=10, iterations=60)
    try:
        objective = model.dense_bound(rows)
        return climb(
            model, rows.X, objective=objective, stop=stop, checkpoint_log=checkpoint_log
        ).value
    except TrainingError:
        return -inf


def trainable_lengthscales(kernel: Kernel) -> list[Kernel]:
    """Kernels whose lengthscale is to be learnt."""
    parts = [part for part in kernel.modules() if isinstance(part, Kernel) and part.has_lengthscale]
    return [part for part in parts if part.raw_lengthscale.requires_grad]


def trainable_variances(kernel: Kernel) -> list[ScaleKernel]:
    """Kernels whose variance is to be learnt."""
    parts = [part for part in kernel.modules() if isinstance(part, ScaleKernel)]
    return [part for part in parts if part.raw_outputscale.requires_grad]


def _spread(kernel: Kernel, data: Dataset) -> Tensor:
    """Standard deviation of the columns a lengthscale belongs to; their mean if it is shared."""
    spread = data.X.std(0, correction=0)
    if isinstance(kernel.active_dims, Tensor):
        spread = spread[kernel.active_dims]
    spread = torch.where(spread > 0, spread, 1.0)
    return spread if len(spread) == kernel.lengthscale.shape[-1] else spread.mean()


def _shorten(kernel: Kernel, data: Dataset) -> None:
    """No lengthscale above 2√D spreads: a column that few rows switch off could not come back."""
    for part in trainable_lengthscales(kernel):
        longest = 2 * sqrt(data.D) * _spread(part, data)
        set_within(part, "lengthscale", torch.minimum(part.lengthscale.detach(), longest))


def set_noise(likelihood: Likelihood, value: Tensor) -> None:
    """Set the noise variance of a likelihood that has one to be learnt."""
    noise = noise_of(likelihood)
    if noise is not None:
        set_within(noise.holder, "noise", value)


def set_within(module: gpytorch.Module, name: str, value: Tensor) -> None:
    """Set a parameter of a GPyTorch module, brought inside the limits that its user gave it."""
    limits = module.constraint_for_parameter_name(f"raw_{name}")
    if limits is not None:
        low, high = float(limits.lower_bound), float(limits.upper_bound)
        margin = 1e-3 * (high - low) if high < inf else 1e-9
        value = value.clamp(low + margin, high - margin)
    module.initialize(**{name: value})


# Where rows may start: their principal components.


_PASSES = 30


def principal_latents(
    table: MaskedMatrix, Q: int, *, generator: torch.Generator
) -> Float[Tensor, "N Q"]:
    """The first Q principal components of a centred table, each of unit variance.

    Missing entries are filled in by the components themselves, in a few passes. Directions that the
    table does not have are drawn from a narrow normal. Signs make each column of loadings add up to
    something positive, so that equal tables start equally.
    """
    Y, rank = table.filled(), min(Q, *table.Y.shape)
    U, S, Vh = torch.linalg.svd(Y, full_matrices=False)
    for _ in range(0 if table.complete else _PASSES):
        low_rank = (U[:, :rank] * S[:rank]) @ Vh[:rank]
        U, S, Vh = torch.linalg.svd(torch.where(table.observed, Y, low_rank), full_matrices=False)
    X = 0.1 * torch.randn(table.N, Q, generator=generator, dtype=Y.dtype, device=generator.device)
    X = X.to(Y.device)
    present = int((S[:rank] > 1e-8 * S[0].clamp_min(1e-300)).sum())
    sign = torch.where(Vh[:present].sum(1) < 0, -1.0, 1.0)
    X[:, :present] = table.N**0.5 * U[:, :present] * sign
    return X
