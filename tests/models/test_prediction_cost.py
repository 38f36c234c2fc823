"""Prices of layers, and the time of a prediction."""

from itertools import chain

import pytest
import torch

from helpers.deep_problems import deep
from winnowgp.models import DeepPosterior, deep_gp
from winnowgp.models.deep_gp import deep_predict_us, prediction_cost, prediction_prices


def test_prediction_cost_counts_inputs_and_outputs_of_layers() -> None:
    """Two hidden outputs, three, then two targets; ten samples after the first layer."""
    model = deep(widths=(2, 3), K=(4, 3, 5))
    first = 4**2 * (1 + 2 / 16) + 10 * 4
    second = 10 * (3**2 * (1 + 3 / 16) + 10 * 3)
    last = 10 * (5**2 * (1 + 2 / 16) + 10 * 5)
    assert prediction_cost(model.layers, samples=10) == pytest.approx(first + second + last)


def test_prediction_prices_are_derivatives_of_the_cost_in_squared_sizes() -> None:
    model, sizes = deep(widths=(2, 3), K=(4, 3, 5)), (40, 30, 50)

    def cost(*sizes: int) -> float:
        layers = [
            layer.with_q(
                torch.zeros(M, layer.D, dtype=torch.float64),
                torch.zeros(M, layer.P, dtype=torch.float64),
                torch.eye(M, dtype=torch.float64).repeat(layer.P, 1, 1),
            )
            for layer, M in zip(model.layers, sizes, strict=True)
        ]
        return prediction_cost(layers, samples=10)

    # Central differences are exact: the cost is a quadratic function of every M.
    slopes = []
    for number, M in enumerate(sizes):
        more, less = list(sizes), list(sizes)
        more[number], less[number] = M + 1, M - 1
        slopes.append((cost(*more) - cost(*less)) / ((M + 1) ** 2 - (M - 1) ** 2))
    expected = [3 * slope / sum(slopes) for slope in slopes]
    assert prediction_prices(model.layers, sizes, samples=10) == pytest.approx(expected)


def test_deep_predict_us_is_the_shortest_time_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep(skip_connections=True)
    seen: list[tuple[tuple[int, ...], int, int]] = []
    seconds = [0.1, 0.5, 0.2, 1.0, 0.6, 0.7, 0.8, 0.9]  # The first does not count.
    clock = chain.from_iterable((10 * i, 10 * i + s) for i, s in enumerate(seconds))
    predict = DeepPosterior.predict

    def recorded(posterior: DeepPosterior, X: torch.Tensor):
        seen.append((posterior.M, posterior.samples, len(X)))
        return predict(posterior, X)

    monkeypatch.setattr(DeepPosterior, "predict", recorded)
    monkeypatch.setattr(deep_gp, "perf_counter", lambda: next(clock))
    # 0.2 s, in microseconds.
    assert deep_predict_us(model, (7, 5), samples=6) == pytest.approx(2e5 / 200)
    assert set(seen) == {((7, 5), 6, 200)}
