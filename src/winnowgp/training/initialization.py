"""Initial hyper-parameters and latent positions.

Hyper-parameters are initialised from the exact evidence of a few rows. A subset of rows does not
bias lengthscales, whereas too few inducing points at fixed locations do: they make the ELBO prefer
a smoother function with more noise.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf, sqrt

import gpytorch
import torch
from gpytorch import Module, likelihoods
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.means import ConstantMean
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset, MaskedMatrix
from winnowgp.errors import TrainingError
from winnowgp.models.base import InducingModel, Model
from winnowgp.models.likelihoods import observation_model
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG, CheckpointLog
from winnowgp.training.lbfgs import Stop, maximise_elbo
from winnowgp.training.schedules import draw_seed

_ROWS = 1000
# Numbers of rows of the stages of `initialise_hyperparameters`.
STAGES = (250, 500, 1000)
# Number of passes that fill in missing entries of a table.
_PASSES = 30


@dataclass(frozen=True, slots=True)
class NoiseParameter:
    """The trainable noise variance of a likelihood, and the module that holds it."""

    holder: Module
    value: Tensor
    """σ², detached."""


def noise_of(likelihood: likelihoods.Likelihood) -> NoiseParameter | None:
    """Return the likelihood's noise variance if it has a trainable one."""
    if not isinstance(
        likelihood,
        likelihoods.GaussianLikelihood
        | likelihoods.StudentTLikelihood
        | likelihoods.LaplaceLikelihood,
    ):
        return None
    holder = (
        likelihood.noise_covar
        if isinstance(likelihood, likelihoods.GaussianLikelihood)
        else likelihood
    )
    learnt = likelihood.raw_noise.requires_grad
    return NoiseParameter(holder, likelihood.noise.detach()) if learnt else None


@torch.no_grad()
def best_level(likelihood: likelihoods.Likelihood, data: Dataset) -> Tensor:
    """Return the constant latent function on a grid with the highest likelihood of the targets."""
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


def kernel_variances(likelihood: likelihoods.Likelihood, data: Dataset) -> tuple[float, ...]:
    """Return initial kernel variances to try where a likelihood has no noise to vary."""
    if isinstance(
        likelihood, likelihoods.PoissonLikelihood | likelihoods.NegativeBinomialLikelihood
    ):
        # GPyTorch's rate is the latent function itself beyond small counts.
        return (1.0, max(10.0, data.Y.var(correction=0).item()))
    return (1.0, 10.0)


def initialise_hyperparameters(
    model: Model,
    data: Dataset,
    *,
    order: Tensor,
    stages: tuple[int, ...] = STAGES,
    checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG,
) -> Model:
    """Return a copy of the model without candidates, with hyper-parameters that fit a few rows.

    Every start is optimised on the first rows of `order`. The two best distinct ones continue with
    more rows, the lengthscales of irrelevant columns brought back into range, and the best one also
    unchanged; and so on. The best on the last rows is returned.

    Args:
        order: random order of the rows.
        stages: number of rows of each stage.
        checkpoint_log: log in which the optimisations are recorded.
    """
    starts = starting_points(model, data)
    best = starts[0]
    for stage, count in enumerate(stages):
        if stage and stages[stage - 1] >= data.N:
            break
        rows = _with_unit_weights(model, data.part(order[:count]))
        optimised = [(_optimise(start, rows, checkpoint_log), start) for start in starts]
        ranked = sorted(optimised, key=lambda result: -result[0])
        top = ranked[0][0]
        others = [start for value, start in ranked[1:] if value < top - 2e-3 * rows.observations]
        best = ranked[0][1]
        shortened = [deepcopy(start) for start in [best, *others][:2]]
        for start in shortened:
            _shorten(start.kernel, data)
        # The best start unchanged as well: shortening the lengthscale of a column that is
        # irrelevant with more rows, too, can end in a worse mode.
        starts = [deepcopy(best), *shortened]
    return best


def starting_points(model: Model, data: Dataset) -> list[Model]:
    """Return the model as given, and variants that together reach every mode met in practice.

    Lengthscales are √D or 1 standard deviations of the inputs (two typical rows are √(2D) apart, so
    √D correlates them by e⁻¹), and a tenth with up to three inputs, where rows are dense enough to
    distinguish a rapidly varying function from noise. The noise is a tenth or a hundredth of the
    targets' variance; a likelihood without noise has two kernel variances instead. A constant mean
    is where the targets are most probable.
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
    short = [0.1] if data.D <= 3 else []
    for factor in sorted({sqrt(data.D), 1.0, *short}, reverse=True):
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


def _with_unit_weights(model: InducingModel, rows: Dataset) -> Dataset:
    """Return the rows with weights of one on average, where larger ones would imply no noise.

    Several equal observations of a row determine its noise exactly: the evidence has no maximum in
    σ², and parameters close to σ² = 0 make inducing points useless.
    """
    noisy = noise_of(model.likelihood) is not None
    if rows.weights is None or not noisy or rows.observations <= rows.N:
        return rows
    return replace(rows, weights=rows.weights * (rows.N / rows.observations))


def _optimise(model: InducingModel, rows: Dataset, checkpoint_log: CheckpointLog) -> float:
    """Maximise the exact evidence of the rows and return it; −∞ where it cannot be computed."""
    stop = Stop(gain=1e-3 * rows.observations, window=10, iterations=60)
    try:
        objective = model.dense_bound(rows)
        return maximise_elbo(
            model, rows.X, objective=objective, stop=stop, checkpoint_log=checkpoint_log
        ).value
    except TrainingError:
        return -inf


def trainable_lengthscales(kernel: Kernel) -> list[Kernel]:
    """Return the kernels whose lengthscale is trainable."""
    parts = [part for part in kernel.modules() if isinstance(part, Kernel) and part.has_lengthscale]
    return [part for part in parts if part.raw_lengthscale.requires_grad]


def trainable_variances(kernel: Kernel) -> list[ScaleKernel]:
    """Return the kernels whose variance is trainable."""
    parts = [part for part in kernel.modules() if isinstance(part, ScaleKernel)]
    return [part for part in parts if part.raw_outputscale.requires_grad]


def _spread(kernel: Kernel, data: Dataset) -> Tensor:
    """Return the standard deviation of a lengthscale's columns; their mean if it is shared."""
    spread = data.X.std(0, correction=0)
    if isinstance(kernel.active_dims, Tensor):
        spread = spread[kernel.active_dims]
    spread = torch.where(spread > 0, spread, 1.0)
    return spread if len(spread) == kernel.lengthscale.shape[-1] else spread.mean()


def _shorten(kernel: Kernel, data: Dataset) -> None:
    """Limit lengthscales to 2√D standard deviations; beyond, their gradient vanishes."""
    for part in trainable_lengthscales(kernel):
        longest = 2 * sqrt(data.D) * _spread(part, data)
        set_within(part, "lengthscale", torch.minimum(part.lengthscale.detach(), longest))


def set_noise(likelihood: likelihoods.Likelihood, value: Tensor) -> None:
    """Set the noise variance of a likelihood if it has a trainable one."""
    noise = noise_of(likelihood)
    if noise is not None:
        set_within(noise.holder, "noise", value)


def set_within(module: gpytorch.Module, name: str, value: Tensor) -> None:
    """Set a parameter of a GPyTorch module, clamped to its constraint."""
    limits = module.constraint_for_parameter_name(f"raw_{name}")
    if limits is not None:
        low, high = float(limits.lower_bound), float(limits.upper_bound)
        margin = 1e-3 * (high - low) if high < inf else 1e-9
        value = value.clamp(low + margin, high - margin)
    module.initialize(**{name: value})


def principal_latents(
    table: MaskedMatrix, Q: int, *, generator: torch.Generator
) -> Float[Tensor, "N Q"]:
    """Return the first Q principal components of a centred table, each with unit variance.

    Missing entries are filled in by the components themselves, in a few passes. Components beyond
    the table's rank are drawn from a narrow normal. The sign of a component makes the sum of its
    loadings positive, so that equal tables have equal components.
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


def cluster_centres(
    X: Float[Tensor, "N D"],
    count: int,
    *,
    generator: torch.Generator,
    init: str = "k-means++",
    max_iter: int,
) -> Float[Tensor, "count D"]:
    """Return the centres of k-means clusters."""
    # Importing scikit-learn's clustering takes half a second, which not every fit needs.
    from sklearn.cluster import KMeans

    clusters = KMeans(
        count, init=init, n_init="auto", max_iter=max_iter, random_state=draw_seed(generator)
    ).fit(X.cpu().numpy())
    return torch.as_tensor(clusters.cluster_centers_).to(X)
