"""Samples of rows that represent the whole table, and weights that make sums over them unbiased."""

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from winnowgp.data import Dataset, Source
from winnowgp.data.repeats import measured_repeatedly
from winnowgp.data.row_indices import sampled_rows
from winnowgp.models.base import InducingModel
from winnowgp.training.initialization import noise_of

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
    same inputs (`winnowgp.data.repeats.pooled`) determine it as well as each counts.
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
