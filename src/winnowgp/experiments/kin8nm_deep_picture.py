"""Figure 6 from its results: accuracy against prediction time, and points per layer over folds.

python -m winnowgp.experiments.kin8nm_deep_picture RESULTS.jsonl TIMES.jsonl PICTURE.png
"""

import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from matplotlib.figure import Figure

from winnowgp.estimators import kernel_from
from winnowgp.experiments.runs import Row, Runs
from winnowgp.models import DeepGP, deep_layers
from winnowgp.plots import Tradeoff, draw_layer_sizes, draw_tradeoff, saved, styled

ROWS, SAMPLES, REPEATS = 500, 100, 3
NAMES = {"fast": "winnowgp's default", "paper": "the paper's procedure"}


def measure_times(results: Runs, times: Runs) -> None:
    """Time of a prediction, a row for every pair of sizes in the results; one thread, this CPU."""
    torch.set_num_threads(1)
    for row in results:
        sizes, connected = row["sizes"], row["kind"] == "paper"
        if not times.find(sizes=sizes, connected=connected):
            us = _predict_us(sizes, connected=connected)
            times.add({"sizes": sizes, "connected": connected, "predict_us": us})


def _predict_us(sizes: list[int], *, connected: bool) -> float:
    """CPU microseconds for the mean and variance of one row, a mixture of 100 samples."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)

    def kernel(number: int, inputs: int) -> Kernel:
        return kernel_from("rbf", inputs)

    layers = deep_layers(X, X[: max(sizes)], kernel=kernel, widths=(8, 1), connected=connected)
    model = DeepGP(layers, likelihood=GaussianLikelihood(), connected=connected)
    masks = [torch.arange(layer.K) < M for layer, M in zip(model.layers, sizes, strict=True)]
    posterior = model.prune(masks).posterior(samples=SAMPLES)
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        with torch.no_grad():
            posterior.predict(X)
        seconds.append(time.process_time() - start)
    return 1e6 * min(seconds) / ROWS


def kin8nm_picture(results: Runs, times: Runs, path: Path) -> Path:
    """Accuracy against prediction time on the left, points per layer on the right."""
    us = {(tuple(t["sizes"]), t["connected"]): t["predict_us"] for t in times}

    def cost(row: Row) -> float:
        return us[tuple(row["sizes"]), row["kind"] == "paper"]

    grouped: dict[tuple[str, object], list[Row]] = defaultdict(list)
    for row in results:
        chosen = row["kind"] in NAMES
        grouped[row["kind"], row["alpha"] if chosen else tuple(row["sizes"])].append(row)

    def tradeoff(kind: str, name: str) -> Tradeoff:
        groups = [rows for (k, _), rows in sorted(grouped.items(), key=str) if k == kind]
        groups.sort(key=lambda rows: _mean([cost(row) for row in rows]))
        return Tradeoff(
            name,
            [_mean([cost(row) for row in rows]) for rows in groups],
            [_mean([row["log_density"] for row in rows]) for rows in groups],
            [_label(rows) for rows in groups] if kind in NAMES else [],
        )

    with styled():
        figure = Figure(figsize=(10, 4))
        left, right = figure.subplots(1, 2, width_ratios=[1.4, 1])
        ours = [tradeoff(kind, name) for kind, name in NAMES.items()]
        draw_tradeoff(tradeoff("grid", "sizes set by hand"), ours, ax=left)
        left.set(xlabel="µs to predict a row", ylabel="test log density (nats)")
        sizes = {
            f"α = {alpha:g}": [row["sizes"] for row in rows]
            for (kind, alpha), rows in sorted(grouped.items(), key=str)
            if kind == "fast"
        }
        draw_layer_sizes(sizes, ax=right)
        right.set_title("winnowgp's default, five folds")
    return saved(figure, path)


def _label(rows: list[Row]) -> str:
    first, second = (_mean([row["sizes"][i] for row in rows]) for i in range(2))
    return f"{first:.0f}, {second:.0f}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    found, timed = Runs(Path(sys.argv[1])), Runs(Path(sys.argv[2]))
    measure_times(found, timed)
    kin8nm_picture(found, timed, Path(sys.argv[3]))
