"""The cost of predictions of a deep GP, by layer and measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import final

import torch

from winnowgp.models.deep_gp import DeepGP
from winnowgp.models.deep_layer import DeepLayer

ROWS = 200
"""Rows that are predicted to measure the time."""
_REPEATS = 7


@final
@dataclass(frozen=True, slots=True)
class Allocation:
    """Numbers of inducing points of the layers of a deep GP, what they cost and what they reach."""

    sizes: tuple[int, ...]
    """Number of inducing points of each layer."""
    predict_us: float
    """Microseconds per row that mean and variance take on the CPU (`deep_predict_us`)."""
    elbo: float
    """ELBO after training, in nats."""
    elbo_gap: float
    """Nats per observation below the best model of the fit."""
    log_density: float | None = None
    """Mean log density of held-out rows, in nats per observation, if it was computed."""


def prediction_prices(model: DeepGP, *, samples: int) -> tuple[float, ...]:
    """Return the cost of M² in every layer when a row is predicted, relative to their mean."""
    costs = _multiplications(model.layers, samples)
    return tuple(cost * len(costs) / sum(costs) for cost in costs)


def prediction_cost(layers: Sequence[DeepLayer], *, samples: int) -> int:
    """Return the number of multiplications of O(M²) when a row is predicted."""
    costs = _multiplications(layers, samples)
    return sum(cost * layer.K**2 for cost, layer in zip(costs, layers, strict=True))


def _multiplications(layers: Sequence[DeepLayer], samples: int) -> list[int]:
    """Return the multiplications per M² of every layer.

    A layer with P outputs takes (1 + P) M² multiplications for each of its inputs: a triangular
    solve, and one product per output. The first layer has one input per row; the others have
    `samples` of them.
    """
    return [(1 + layer.P) * (samples if number else 1) for number, layer in enumerate(layers)]


@torch.no_grad()
def deep_predict_us(model: DeepGP, sizes: Sequence[int], *, samples: int) -> float:
    """Return the microseconds per row that mean and variance of `ROWS` rows take on the CPU.

    The time depends on the numbers of inducing points and not on their locations, so that each
    layer has random ones. It is the shortest of seven: other processes only make it longer.

    Args:
        sizes: number of inducing points of each layer.
        samples: number of samples propagated for each row.
    """
    generator = torch.Generator().manual_seed(0)
    layers, like = [], model.layers[0].candidates
    for layer, M in zip(model.layers, sizes, strict=True):
        points = torch.randn(M, layer.D, generator=generator, dtype=like.dtype).to(like.device)
        eye = torch.eye(M, dtype=like.dtype, device=like.device)
        zeros = points.new_zeros(M, layer.P)
        layers.append(layer.with_q(points, zeros, eye.repeat(layer.P, 1, 1)))
    posterior = model.with_layers(layers).posterior(samples=samples).cpu()
    X = torch.randn(ROWS, model.layers[0].D, generator=generator, dtype=like.dtype)
    seconds = []
    for _ in range(1 + _REPEATS):
        start = perf_counter()
        posterior.predict(X)
        seconds.append(perf_counter() - start)
    # The first prediction allocates memory.
    return 1e6 * min(seconds[1:]) / ROWS
