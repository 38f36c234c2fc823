"""Where training starts: hyper-parameters, latent positions, cluster centres, and samples of rows.

Sums over a sample of rows have weights that make them unbiased.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt

import gpytorch
import torch
from gpytorch import Module, likelihoods
from gpytorch.kernels import AdditiveKernel, Kernel, LinearKernel, ScaleKernel
from gpytorch.means import ConstantMean
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.data import Dataset, MaskedMatrix, Source
from winnowgp.data.noise import measured_repeatedly
from winnowgp.data.row_indices import sampled_rows
from winnowgp.models import MultiOutputGP
from winnowgp.models.base import InducingModel, Model
from winnowgp.models.kernels import copy_module
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.observations import LEAST_NOISE
from winnowgp.training.schedules import draw_seed

_ROWS = 1000
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
    missing = torch.isnan(rows.Y)
    Y, known = torch.where(missing, 0.0, rows.Y), rows.Y[~missing]
    steps = torch.linspace(0, 1, 41, dtype=Y.dtype, device=Y.device)
    levels = torch.cat([8 * steps - 4, known.quantile(steps), known.mean()[None]])
    F = observation_model(likelihood).num_latents(data.P)
    flat = torch.zeros(len(Y), F, dtype=Y.dtype, device=Y.device)
    nats = []
    for level in levels:
        each = observation_model(likelihood).expected_log_prob(Y, flat + level, flat)
        nats.append(rows.weighted(each.masked_fill(missing, 0.0)).sum())
    return levels[int(torch.stack(nats).nan_to_num(-torch.inf).argmax())]


def mean_square(
    likelihood: likelihoods.Likelihood, data: Dataset, level: Tensor | float = 0.0
) -> Tensor:
    """Return the mean of (y − level)²; of each target, if each has a noise of its own."""
    square, noise = data.mean_square(level), noise_of(likelihood)
    return square if noise is not None and len(noise.value) > 1 else square.mean()


def kernel_variances(likelihood: likelihoods.Likelihood, data: Dataset) -> tuple[float, ...]:
    """Return initial kernel variances to try where a likelihood has no noise to vary."""
    if isinstance(
        likelihood, likelihoods.PoissonLikelihood | likelihoods.NegativeBinomialLikelihood
    ):
        # GPyTorch's rate is the latent function itself beyond small counts.
        return (1.0, max(10.0, data.Y.var(correction=0).item()))
    return (1.0, 10.0)


def trainable_lengthscales(kernel: Kernel) -> list[Kernel]:
    """Return the kernels whose lengthscale is trainable."""
    parts = [part for part in kernel.modules() if isinstance(part, Kernel) and part.has_lengthscale]
    return [part for part in parts if part.raw_lengthscale.requires_grad]


def trainable_variances(kernel: Kernel) -> list[ScaleKernel]:
    """Return the kernels whose variance is trainable."""
    parts = [part for part in kernel.modules() if isinstance(part, ScaleKernel)]
    return [part for part in parts if part.raw_outputscale.requires_grad]


def column_spread(kernel: Kernel, data: Dataset) -> Tensor:
    """Return the standard deviation of a lengthscale's columns; their mean if it is shared."""
    spread = data.X.std(0, correction=0)
    if isinstance(kernel.active_dims, Tensor):
        spread = spread[kernel.active_dims]
    spread = torch.where(spread > 0, spread, 1.0)
    return spread if len(spread) == kernel.lengthscale.shape[-1] else spread.mean()


def column_count(kernel: Kernel, data: Dataset) -> int:
    """Return the number of columns that a kernel depends on."""
    return len(kernel.active_dims) if isinstance(kernel.active_dims, Tensor) else data.D


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


def starting_points(model: Model, data: Dataset, count: int | None = None) -> list[Model]:
    """Return the model as given, and variants that together reach most modes met in practice.

    A kernel on D columns has lengthscales of √D or 1 standard deviations of the inputs (two typical
    rows are √(2D) apart, so √D correlates them by e⁻¹), and a tenth with up to three columns, where
    rows are dense enough to distinguish a rapidly varying function from noise. The noise is a tenth
    or a hundredth of the targets' variance; a likelihood without noise has two kernel variances
    instead. A constant mean is where the targets are most probable. Several terms of a kernel keep
    the ratios of their lengthscales: equal terms would stay equal.

    Args:
        count: number of models, if not all are needed.
    """
    bare = model.with_candidates(data.X[:0])
    starts = [bare]
    level = best_level(model.likelihood, data)
    constant = isinstance(model.mean, ConstantMean) and any(
        p.requires_grad for p in model.mean.parameters()
    )
    variance = mean_square(model.likelihood, data, level * constant)
    noisy = noise_of(model.likelihood) is not None
    scales = (0.1, 0.01) if noisy else kernel_variances(model.likelihood, data)
    lengthscales = trainable_lengthscales(model.kernel)
    ratios = relative_lengthscales(lengthscales)
    columns = max([column_count(kernel, data) for kernel in lengthscales] or [data.D])
    factors = ("root", 1.0, 0.1) if columns <= 3 else ("root", 1.0)
    for factor in factors if columns > 1 else factors[1:]:
        for scale in scales:
            if len(starts) == count:
                return starts
            start = copy_module(bare)
            for kernel, ratio in zip(trainable_lengthscales(start.kernel), ratios, strict=True):
                times = sqrt(column_count(kernel, data)) if factor == "root" else factor
                set_within(kernel, "lengthscale", times * ratio * column_spread(kernel, data))
            if isinstance(start.mean, ConstantMean) and constant:
                start.mean.initialize(constant=level)
            if noisy:
                set_noise(start.likelihood, (scale * variance).clamp_min(1e-5))
            else:
                for kernel in trainable_variances(start.kernel):
                    set_within(kernel, "outputscale", data.X.new_tensor(scale))
            starts.append(start)
    return starts


def relative_lengthscales(kernels: Sequence[Kernel]) -> list[Tensor | float]:
    """Return the lengthscales of each kernel, divided by those of the first on as many columns."""
    first: dict[torch.Size, Tensor] = {}
    ratios: list[Tensor | float] = []
    for kernel in kernels:
        own = kernel.lengthscale.detach()
        known = first.setdefault(own.shape, own)
        ratios.append(1.0 if known is own else (own / known).mean())
    return ratios


def transferred(source: Model, target: Model) -> Model:
    """Return a copy of `target` with the hyper-parameters of `source` where they correspond."""
    model = target.with_candidates(source.candidates.detach()[:0])
    pairs = zip(
        trainable_lengthscales(source.kernel), trainable_lengthscales(model.kernel), strict=False
    )
    for one, other in pairs:
        if one.lengthscale.shape == other.lengthscale.shape:
            set_within(other, "lengthscale", one.lengthscale.detach())
    scales = zip(
        trainable_variances(source.kernel), trainable_variances(model.kernel), strict=False
    )
    for one, other in scales:
        set_within(other, "outputscale", one.outputscale.detach())
    model.likelihood.load_state_dict(source.likelihood.state_dict())
    model.mean.load_state_dict(source.mean.state_dict())
    return model


def with_linear_term(model: Model, data: Dataset) -> Model:
    """Return the model with a linear term in addition, of a tenth of the targets' variance."""
    model = copy_module(model)
    linear = LinearKernel(ard_num_dims=data.D).to(data.X)
    variance = 0.1 / (data.D * data.X.var(0, correction=0).clamp_min(1e-12))
    linear.variance = variance[None]
    model.kernel = AdditiveKernel(model.kernel, linear)
    return model


def shorten_lengthscales(kernel: Kernel, data: Dataset) -> bool:
    """Limit lengthscales to 2√D standard deviations; beyond, their gradient vanishes.

    Returns: whether any was longer.
    """
    changed = False
    for part in trainable_lengthscales(kernel):
        spread = column_spread(part, data)
        longest = 2 * sqrt(column_count(part, data)) * spread
        before = part.lengthscale.detach()
        changed |= bool((before > longest).any())
        set_within(part, "lengthscale", torch.minimum(before, longest))
    return changed


def lift_noise(model: InducingModel | MultiOutputGP, rows: Dataset) -> None:
    """Reset noise that has reached its lower constraint, where its gradient vanishes."""
    noise = noise_of(model.likelihood)
    if noise is None:
        return
    square = mean_square(model.likelihood, rows)
    least = (1e-4 * square).clamp_min(10 * LEAST_NOISE)
    if bool((noise.value < least).any()):
        set_noise(model.likelihood, torch.maximum(noise.value, least))


def scaled(
    model: Model, *, variance: float = 1.0, lengthscale: float = 1.0, noise: float = 1.0
) -> Model:
    """Return a copy with trainable kernel variances, lengthscales and noise multiplied."""
    scaled = copy_module(model)
    for kernel in trainable_variances(scaled.kernel):
        set_within(kernel, "outputscale", variance * kernel.outputscale.detach())
    for kernel in trainable_lengthscales(scaled.kernel):
        set_within(kernel, "lengthscale", lengthscale * kernel.lengthscale.detach())
    learnt = noise_of(scaled.likelihood)
    if learnt is not None:
        set_noise(scaled.likelihood, noise * learnt.value)
    return scaled


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


def without_variance(model: Model, data: Dataset) -> Model:
    """Return a copy without candidates and with hardly any kernel variance: a constant."""
    bare = copy_module(model)
    square = mean_square(bare.likelihood, data)
    least = square.min().clamp(LEAST_NOISE, 1.0)  # Below the noise of constant targets, too.
    for kernel in trainable_variances(bare.kernel):
        set_within(kernel, "outputscale", 1e-6 * least)
    for kernel in (part for part in bare.kernel.modules() if isinstance(part, LinearKernel)):
        set_within(kernel, "variance", 0 * kernel.variance + 1e-8 * least)
    set_noise(bare.likelihood, square.clamp_min(10 * LEAST_NOISE))
    return bare.with_candidates(data.X[:0])


def random_start_centres(
    X: Float[Tensor, "N D"], count: int, *, generator: torch.Generator, max_iter: int
) -> Float[Tensor, "count D"]:
    """Return the centres of clusters after some iterations of k-means from random rows.

    It needs no scikit-learn, whose import takes longer. A cluster without rows keeps its centre.
    """
    rows = torch.randperm(len(X), generator=generator, device=generator.device)[:count]
    centres, ones = X[rows.to(X.device)], X.new_ones(len(X))
    for _ in range(max_iter):
        # ‖x − c‖² = ‖x‖² − 2⟨x, c⟩ + ‖c‖²
        nearest = (centres.square().sum(1) - 2 * (X @ centres.mT)).argmin(1)
        sizes = torch.zeros_like(centres[:, 0]).index_add_(0, nearest, ones)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, nearest, X)
        moved = torch.where(sizes > 0, sums / sizes.clamp_min(1), centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres


def cluster_centres(
    X: Float[Tensor, "N D"], count: int, *, generator: torch.Generator, max_iter: int
) -> Float[Tensor, "count D"]:
    """Return the centres of k-means clusters, with a seed from the generator."""
    return kmeans(X, count, seed=draw_seed(generator), max_iter=max_iter)


def kmeans(
    X: Float[Tensor, "N D"],
    count: int,
    *,
    seed: int,
    restarts: int | str = "auto",
    max_iter: int = 300,
) -> Float[Tensor, "count D"]:
    """Return the centres of k-means clusters, the best of some runs from k-means++.

    Args:
        restarts: number of runs; "auto" is one.
    """
    # Importing scikit-learn's clustering takes half a second, which not every fit needs.
    from sklearn.cluster import KMeans

    clusters = KMeans(count, max_iter=max_iter, random_state=seed)
    clusters.set_params(n_init=restarts).fit(X.cpu().numpy())
    return torch.as_tensor(clusters.cluster_centers_).to(X)


# Largest number of rows that are sampled from a source which is not in memory. A wide table is
# limited to `NUMBERS` numbers, but to at least `_FEWEST_ROWS` rows, which the schedule uses.
SAMPLE, NUMBERS, _FEWEST_ROWS = 2**18, 2**25, 4096
# A source with at most this many rows, all of them in the sample, is not read again in each pass.
HELD = SAMPLE
# A sample with fewer rows of the rarest kind of target than this is stratified.
_FEWEST = 100


def representative_rows(
    model: InducingModel, data: Dataset, order: Int[Tensor, " N"], count: int
) -> Dataset:
    """Return `count` rows in random order, with enough rows of rare targets.

    Few of 250 rows have a class of 1 %, or a count above zero at a rate of 0.05, and the evidence
    of so few events prefers a constant. Rare classes and counts above zero fill up to half of the
    rows. Weights restore the shares: a row of kind s has the weight N_s/n_s, relative to the kind
    with the largest. Weights above one would be repeated observations, which always agree; their
    evidence prefers a function that interpolates every row.
    """
    plain = data.part(order[:count])
    if noise_of(model.likelihood) is not None or count >= data.N or data.P != 1:
        return plain
    values = data.Y[order, 0]
    if not bool((values == values.round()).all()):
        return plain
    # Classes, or zero against positive counts.
    kinds = values.unique() if len(values.unique()) <= 10 else values.new_tensor([0.0, 1.0])
    kind = torch.bucketize(values.clamp_max(kinds[-1]), kinds)
    totals = torch.bincount(kind, minlength=len(kinds))
    expected = totals * (count / data.N)
    if bool((expected >= _FEWEST).all()):
        return plain
    rare = expected < _FEWEST
    share = max(count // (2 * int(rare.sum())), 1)
    sizes = torch.where(rare, totals.clamp_max(share), totals)
    left = count - int(sizes[rare].sum())
    common = totals[~rare].sum().clamp_min(1)
    sizes = torch.where(rare, sizes, (totals * left) // common)
    parts, weights = [], []
    for s, size in enumerate(sizes.tolist()):
        if size:
            parts.append(order[kind == s][:size])
            weights.append(values.new_full((len(parts[-1]),), totals[s].item() / len(parts[-1])))
    rows = torch.cat(parts)
    scale = torch.cat(weights)
    chosen = data.part(rows)
    own = 1.0 if chosen.weights is None else chosen.weights
    return replace(chosen, weights=own * scale / scale.max())


def with_unit_weights(model: InducingModel, rows: Dataset) -> Dataset:
    """Return the rows with weights of one on average, where larger ones would imply no noise.

    Several equal observations of a row determine its noise exactly: the evidence has no maximum in
    σ², and parameters close to σ² = 0 make inducing points useless. Different observations at the
    same inputs (`winnowgp.data.noise.pooled`) determine it as well as each counts.
    """
    noisy = noise_of(model.likelihood) is not None
    if rows.weights is None or not noisy or rows.observations <= rows.N:
        return rows
    if measured_repeatedly(rows):
        return rows
    return replace(rows, weights=rows.weights * (rows.N / rows.observations))


def rows_in_memory(data: Source, generator: torch.Generator) -> tuple[Dataset, Tensor]:
    """Return all rows or a random sample, in memory, and a random order of them."""
    device = generator.device
    dataset = data.as_dataset()
    if dataset is not None:
        return dataset, torch.randperm(data.N, generator=generator, device=device)
    most = min(SAMPLE, max(_FEWEST_ROWS, NUMBERS // (data.D + data.P)))
    if most >= data.N:
        sample = data.part(torch.arange(data.N)).to(device)
        return sample, torch.randperm(data.N, generator=generator, device=device)
    rows = sampled_rows(data.N, most, generator)
    sample = data.part(rows.cpu()).to(device)
    return sample, torch.arange(sample.N, device=device)


def is_complete(data: Source, sample: Dataset) -> bool:
    """Return whether the sample contains all rows, and no other process has any."""
    return sample.N == data.N <= HELD and len(data.shards()) == data.process_group.world_size == 1
