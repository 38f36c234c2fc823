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
# Seconds after which a prediction is not repeated.
_LONG = 5.0
# Cost of a multiplication of the products of all outputs, and of an evaluation of the kernel,
# relative to a multiplication of a triangular solve.
_PRODUCT, _EVALUATION = 1 / 16, 10.0


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


def prediction_prices(
    layers: Sequence[DeepLayer], sizes: Sequence[int], *, samples: int
) -> tuple[float, ...]:
    """Return the cost of M² in every layer when a row is predicted, relative to their mean.

    It is the derivative of the layer's part of `prediction_cost` with respect to M², at M points:
    where few points remain, the evaluation of the kernel costs more than the O(M²) products.

    Args:
        sizes: number of inducing points of each layer.
        samples: number of samples propagated for each row.
    """
    costs = [
        inputs * (_quadratic(layer) + _EVALUATION / (2 * M))
        for layer, M, inputs in zip(layers, sizes, _inputs(layers, samples), strict=True)
    ]
    return tuple(cost * len(costs) / sum(costs) for cost in costs)


def prediction_cost(layers: Sequence[DeepLayer], *, samples: int) -> float:
    """Return the cost of the prediction of a row: Σ inputs · (M² (1 + P/16) + 10 M) over layers.

    The unit is a multiplication of a triangular solve, one of which takes each input of a layer to
    its M inducing points. The products of P outputs are one matrix product, which is quicker per
    multiplication than a solve, and an evaluation of the kernel takes as long as ten. The constants
    are fitted to times on a CPU. The first layer has one input per row; the others have `samples`.
    """
    return sum(
        inputs * layer.K * (_quadratic(layer) * layer.K + _EVALUATION)
        for layer, inputs in zip(layers, _inputs(layers, samples), strict=True)
    )


def _quadratic(layer: DeepLayer) -> float:
    return 1 + _PRODUCT * layer.P


def _inputs(layers: Sequence[DeepLayer], samples: int) -> list[int]:
    # Without samples, later layers have one input, the mean.
    return [max(samples, 1) if number else 1 for number in range(len(layers))]


@torch.no_grad()
def deep_predict_us(model: DeepGP, sizes: Sequence[int], *, samples: int) -> float:
    """Return the microseconds per row that mean and variance of `ROWS` rows take on the CPU.

    The time depends on the numbers of inducing points and not on their locations, so that each
    layer has random ones. It is the shortest of seven, or of fewer that take five seconds: other
    processes only make it longer.

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
        if sum(seconds) > _LONG:
            break
    # The first prediction allocates memory.
    return 1e6 * min(seconds[1:] or seconds) / ROWS
