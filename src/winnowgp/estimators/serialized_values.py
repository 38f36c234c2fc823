"""Serialisation of the values that fitted estimators hold: scalers, frontiers, streams, labels."""

from math import isnan, nan
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.bounds.evidence import Evidence
from winnowgp.bounds.streaming import Memory
from winnowgp.data import Dataset, Standardiser
from winnowgp.errors import ModelFileError
from winnowgp.estimators.classification import ClassLabels
from winnowgp.estimators.rows import TargetScaler
from winnowgp.estimators.stream_records import BatchRecord, FirstRows, StreamRecord
from winnowgp.io.registry import register
from winnowgp.models import DeepPosterior, MixturePosterior, Posterior
from winnowgp.models.deep_costs import Allocation
from winnowgp.models.heteroscedastic import HeteroscedasticPosterior
from winnowgp.point_processes import Bernoulli, Determinantal
from winnowgp.selection import Frontier, SizeFrontier, SubsetPosterior
from winnowgp.selection.subset_samples import SubsetSamples
from winnowgp.training.schedules import SizedDeepModel, SizedModel


@register("Standardiser", Standardiser)
def _standardiser(shift: Float[Tensor, " C"], scale: Float[Tensor, " C"]) -> Standardiser:
    if not bool((scale > 0).all()):
        raise ModelFileError("a Standardiser has scales that are not positive")
    return Standardiser(shift, scale)


@register("TargetScaler", TargetScaler)
def _target_scaler(columns: Standardiser, single: bool) -> TargetScaler:
    if single and len(columns.shift) != 1:
        raise ModelFileError(f"a TargetScaler of one target has {len(columns.shift)} columns")
    return TargetScaler(columns, single)


@register("Frontier", Frontier)
def _frontier(bounds: Tensor, masks: Bool[Tensor, "J K"], N: int | float) -> Frontier:
    # The bound of a subset may be −∞, so `bounds` is not declared as an array of finite numbers.
    if not bounds.is_floating_point() or bounds.dim() != 1 or bool(bounds.isnan().any()):
        raise ModelFileError("the bounds of a Frontier must be numbers, one per subset")
    if not torch.equal(masks.sum(1), torch.arange(len(bounds))):
        raise ModelFileError("the subsets of a Frontier must have 0, 1, 2, … points")
    return Frontier(bounds, masks, N)


def _size_frontier_state(frontier: SizeFrontier) -> dict[str, Any]:
    densities = enumerate(frontier.log_densities.tolist())
    return {
        "elbos": frontier.elbos,
        "length": len(frontier.elbos),
        # Few are known.
        "log_densities": [(M, nats) for M, nats in densities if not isnan(nats)],
        "N": frontier.N,
        "evidence": frontier.evidence,
        "exact_log_density": frontier.exact_log_density,
        "earlier_gap": frontier.earlier_gap,
    }


@register("SizeFrontier", SizeFrontier, state=_size_frontier_state)
def _size_frontier(
    elbos: Tensor,
    length: int | None,
    log_densities: list[tuple[int, float]],
    N: int | float,
    evidence: float | None,
    exact_log_density: float | None,
    earlier_gap: float,
) -> SizeFrontier:
    # An ELBO may be −∞, so `elbos` is not declared as an array of finite numbers.
    if not elbos.is_floating_point() or elbos.dim() != 1 or bool(elbos.isnan().any()):
        raise ModelFileError("the ELBOs of a SizeFrontier must be numbers, one per size")
    # Files of earlier versions do not have the length.
    if length is not None and len(elbos) != length:
        raise ModelFileError(f"a SizeFrontier must have {length} ELBOs; it has {len(elbos)}")
    if not len(elbos) or not N > 0:
        raise ModelFileError("a SizeFrontier must have at least one size and one observation")
    densities = torch.full_like(elbos, nan, dtype=torch.float64)
    for M, nats in log_densities:
        if not 0 <= M < len(elbos):
            raise ModelFileError("a SizeFrontier must have log densities of its own sizes only")
        densities[M] = nats
    return SizeFrontier(elbos.double(), densities, N, evidence, exact_log_density, earlier_gap)


@register("Evidence", Evidence)
def _evidence(lower: float, upper: float, method: str) -> Evidence:
    if not lower <= upper:
        raise ModelFileError("an Evidence has a lower bound above its upper bound")
    return Evidence(lower, upper, method)


@register("SizedModel", SizedModel)
def _sized_model(
    posterior: Posterior | HeteroscedasticPosterior | MixturePosterior,
    elbo: float,
    log_density: float,
) -> SizedModel:
    return SizedModel(posterior, elbo, log_density)


@register("SizedDeepModel", SizedDeepModel)
def _sized_deep_model(posterior: DeepPosterior, elbo: float) -> SizedDeepModel:
    return SizedDeepModel(posterior, elbo)


@register("Allocation", Allocation)
def _allocation(
    sizes: tuple[int, ...],
    predict_us: float,
    elbo: float,
    elbo_gap: float,
    log_density: float | None,
) -> Allocation:
    return Allocation(sizes, predict_us, elbo, elbo_gap, log_density)


@register("SubsetPosterior", SubsetPosterior)
def _subset_posterior(q: Bernoulli | Determinantal | SubsetSamples) -> SubsetPosterior:
    return SubsetPosterior(q)


@register("Bernoulli", Bernoulli)
def _bernoulli(logits: Float[Tensor, " K"]) -> Bernoulli:
    return Bernoulli(logits)


@register("Determinantal", Determinantal)
def _determinantal(logits: Float[Tensor, " K"], features: Float[Tensor, "K R"]) -> Determinantal:
    return Determinantal(logits, features)


@register("SubsetSamples", SubsetSamples)
def _subset_samples(
    masks: Bool[Tensor, "C T K"],
    bounds: Float[Tensor, "C T"],
    conditional_inclusion: Float[Tensor, "C K"],
    log_weights: Float[Tensor, " W"],
) -> SubsetSamples:
    if len(log_weights) != masks.shape[2] + 1 or not masks.numel():
        raise ModelFileError("SubsetSamples must have subsets, and one log weight for each size")
    return SubsetSamples(masks, bounds, conditional_inclusion, log_weights)


@register("BatchRecord", BatchRecord)
def _batch_record(
    rows: float,
    points: int,
    added: int,
    dropped: int,
    moved: int,
    elbo: float,
    gap: float,
    log_density: float,
    seconds: float,
) -> BatchRecord:
    return BatchRecord(rows, points, added, dropped, moved, elbo, gap, log_density, seconds)


@register("StreamRecord", StreamRecord)
def _stream_record(
    seen: float,
    remembered: float,
    count: int,
    given_up: float,
    batches: tuple[BatchRecord, ...],
    points: tuple[int, ...],
    memory_points: tuple[int, ...],
    arrived: int,
    memories: tuple[Memory, ...],
    first: FirstRows | None,
    waiting: float,
    steps: Float[Tensor, "m 2 n"] | None,
    noise_share: Float[Tensor, "*outputs"] | None,
) -> StreamRecord:
    known = isnan(remembered) or 0 < remembered <= seen * (1 + 1e-9)
    if not (known and seen > 0 and count >= 1 and given_up >= 0 and waiting >= 0):
        raise ModelFileError("a StreamRecord must have batches with rows")
    for numbers in (points, memory_points):
        if len(set(numbers)) < len(numbers) or not all(0 <= n < arrived for n in numbers):
            raise ModelFileError("a StreamRecord must have different numbers of its points")
    if not set(points) <= set(memory_points):
        raise ModelFileError("the memory of a StreamRecord must have all inducing points")
    if any(len(memory_points) != memory.M for memory in memories):
        raise ModelFileError("a StreamRecord must have a number for each point of its memory")
    if steps is not None and not (steps.dim() == 3 and steps.shape[1] == 2):
        raise ModelFileError("a StreamRecord must have a gradient change for each step")
    if noise_share is not None and not bool(((noise_share > 0) & (noise_share <= 1)).all()):
        raise ModelFileError("a StreamRecord must have a share of the noise between 0 and 1")
    return StreamRecord(
        seen,
        remembered,
        count,
        given_up,
        batches,
        points,
        memory_points,
        arrived,
        memories,
        first,
        waiting,
        steps,
        noise_share,
    )


def _first_rows_state(first: FirstRows) -> dict[str, Any]:
    rows = first.rows
    return {
        "X": rows.X,
        "Y": rows.Y,
        "weights": rows.weights,
        "noise": rows.noise,
        "waiting": float(first.waiting),
    }


@register("FirstRows", FirstRows, state=_first_rows_state)
def _first_rows(
    X: Float[Tensor, "N D"],
    Y: Float[Tensor, "N P"],
    weights: Float[Tensor, " N"] | None,
    noise: Float[Tensor, "N P"] | None,
    waiting: float,
) -> FirstRows:
    if not waiting >= 0:
        raise ModelFileError("FirstRows cannot wait for a negative number of rows")
    return FirstRows(Dataset.of(X, Y, weights=weights, noise=noise), waiting)


@register("Memory", Memory)
def _memory(
    Z: Float[Tensor, "M D"],
    A: Float[Tensor, "G M R"],
    y: Float[Tensor, "R P"],
    residual: Float[Tensor, "*outputs"],
    N: int | float,
    fixed: Memory | None,
    counts: Float[Tensor, " P"] | None,
    lost: Float[Tensor, "*outputs"] | None,
) -> Memory:
    if fixed is not None and (fixed.Z.shape != Z.shape or fixed.y.shape[1] != y.shape[1]):
        raise ModelFileError("both parts of a Memory must have the same points and outputs")
    if len(A) not in (1, y.shape[1]) or not N > 0:
        raise ModelFileError("a Memory must have rows, and combinations of each output")
    if residual.shape not in ((), (y.shape[1],)):
        raise ModelFileError("a Memory must have one residual, or one of each output")
    if lost is not None and lost.shape != residual.shape:
        raise ModelFileError("a Memory must have lost variances like its residual")
    return Memory(Z, A, y, residual, N, fixed, counts, lost)


def _class_labels_state(labels: ClassLabels) -> dict[str, Any]:
    return {"dtype": labels.classes.dtype.str, "values": labels.classes.tolist()}


@register("ClassLabels", ClassLabels, state=_class_labels_state)
def _class_labels(dtype: str, values: list[Any]) -> ClassLabels:
    numpy_dtype = np.dtype(dtype)
    longest = max((len(value) for value in values if isinstance(value, str)), default=1)
    # Wider strings than any label would only fill memory.
    too_wide = numpy_dtype.kind == "U" and numpy_dtype.itemsize > 4 * max(longest, 1)
    if numpy_dtype.kind not in "biufUO" or too_wide:
        raise ModelFileError(f"class labels cannot have the type {numpy_dtype}")
    classes = np.empty(len(values), dtype=numpy_dtype)
    classes[:] = values
    # Probabilities are looked up in the order of the classes.
    if len(classes) < 2 or not np.array_equal(np.unique(classes), classes):
        raise ModelFileError("class labels must be two or more, sorted and distinct")
    return ClassLabels(classes)


def _random_state_state(random_state: np.random.RandomState) -> dict[str, Any]:
    _, key, position, has_gauss, gauss = random_state.get_state(legacy=True)
    key = np.asarray(key).astype(np.int64)
    return {"key": key, "position": position, "has_gauss": has_gauss, "gauss": gauss}


@register("RandomState", np.random.RandomState, state=_random_state_state)
def _random_state(
    key: np.ndarray, position: int, has_gauss: int, gauss: float
) -> np.random.RandomState:
    random_state = np.random.RandomState()
    random_state.set_state(("MT19937", key.astype(np.uint32), position, has_gauss, gauss))
    return random_state
