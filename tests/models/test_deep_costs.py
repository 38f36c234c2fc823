"""Prices of layers, and the time of a prediction."""

from itertools import chain

import pytest
import torch

from helpers.deep_problems import deep
from winnowgp.models import DeepPosterior, deep_costs
from winnowgp.models.deep_costs import ROWS, deep_predict_us, prediction_prices


def test_prediction_prices_count_inputs_and_outputs_of_layers() -> None:
    """Two hidden outputs, three, then two targets; ten samples after the first layer."""
    model = deep(widths=(2, 3), K=(4, 3, 3))
    costs = torch.tensor([3.0, 4.0 * 10, 3.0 * 10])
    expected = (3 * costs / costs.sum()).tolist()
    assert prediction_prices(model, samples=10) == pytest.approx(expected)


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
    monkeypatch.setattr(deep_costs, "perf_counter", lambda: next(clock))
    # 0.2 s, in microseconds.
    assert deep_predict_us(model, (7, 5), samples=6) == pytest.approx(2e5 / ROWS)
    assert set(seen) == {((7, 5), 6, ROWS)}
