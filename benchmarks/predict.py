"""Prediction time at the same M: winnowgp, GPflow's cached posteriors and GPyTorch's SVGP.

    python benchmarks/predict.py --gpflow benchmarks/peers/.venv-gpflow/bin/python
    python benchmarks/predict.py --report

Mean and variance of 10,000 rows at once and of single rows, eight inputs, RBF and Matérn-3/2
kernels, float64, one thread; the shortest CPU time of many calls. "means" computes no variances,
and "2 callers" is the time per call when two Python threads predict at once. Results are in
benchmarks/results/predict.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel

from measure import Row, new_results, read_results, table
from winnowgp.data import Dataset
from winnowgp.models import SparseGP

POINTS = (32, 128, 512)
KERNELS = ("rbf", "matern32")
ROWS = (10_000, 1)
INPUTS = 8
REPEATS = 20
PEER = Path(__file__).parent / "peers" / "gpflow_predict.py"


class _SVGP(gpytorch.models.ApproximateGP):
    """The model of GPyTorch's examples."""

    def __init__(self, Z: torch.Tensor, name: str) -> None:
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(Z)).double()
        strategy = gpytorch.variational.VariationalStrategy(
            self, Z, distribution, learn_inducing_locations=False
        )
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = kernel(name, Z.shape[1])

    def forward(self, x: Any) -> Any:
        mean: Any = self.mean_module(x)
        return gpytorch.distributions.MultivariateNormal(mean, self.covar_module(x))


def kernel(name: str, D: int) -> Kernel:
    """Return the kernel of all models."""
    base = RBFKernel(ard_num_dims=D) if name == "rbf" else MaternKernel(nu=1.5, ard_num_dims=D)
    scaled = ScaleKernel(base).double()
    scaled.initialize(**{"base_kernel.lengthscale": 2.0})
    return scaled


def _gpytorch(Z: torch.Tensor, name: str) -> Callable[[torch.Tensor], object]:
    model = _SVGP(Z, name)
    model.eval()

    def predict(X: torch.Tensor) -> object:
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            latent = model(X)
            return latent.mean, latent.variance

    return predict


def _winnowgp(
    Z: torch.Tensor, data: Dataset, name: str
) -> dict[str, Callable[[torch.Tensor], object]]:
    posterior = SparseGP(kernel(name, Z.shape[1]), Z, noise=0.1).posterior(data)
    callers = ThreadPoolExecutor(2)

    def mean(X: torch.Tensor) -> object:
        with torch.no_grad():
            return posterior.predict_mean(X)

    def predict(X: torch.Tensor) -> object:
        with torch.no_grad():
            return posterior.predict(X)

    def twice(X: torch.Tensor) -> object:
        return list(callers.map(predict, [X, X]))

    return {"winnowgp": predict, "winnowgp, means": mean, "winnowgp, 2 callers": twice}


def _shortest(call: Callable[[], object], repeats: int) -> Row:
    call()
    wall, cpu = [], []
    for _ in range(repeats):
        starts = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - starts[0])
        cpu.append(time.process_time() - starts[1])
    return {"wall_s": min(wall), "cpu_s": min(cpu)}


def run(gpflow: str | None) -> None:
    """Measure all models one after another."""
    results = new_results("predict/predict")
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(2000, INPUTS, dtype=torch.float64, generator=generator)
    data = Dataset.of(X, torch.sin(X[:, 0]))
    for name, M in ((name, M) for name in KERNELS for M in POINTS):
        peers = _winnowgp(X[:M], data, name) | {"GPyTorch SVGP": _gpytorch(X[:M], name)}
        if name == "rbf":
            peers["numpy file"], peers["ONNX"] = _exported(X, M)
        for peer, predict in peers.items():
            for rows in ROWS:
                new = torch.randn(rows, INPUTS, dtype=torch.float64, generator=generator)
                seconds = _shortest(
                    lambda p=predict, n=new: p(n), REPEATS * (20 if rows == 1 else 1)
                )
                calls = 2 if peer.endswith("callers") else 1
                seconds = {key: value / calls for key, value in seconds.items()}
                results.add({"peer": peer, "kernel": name, "M": M, "rows": rows, **seconds})
        if gpflow is not None:
            options = ["--points", str(M), "--inputs", str(INPUTS), "--repeats", str(REPEATS)]
            options += ["--kernel", name]
            answer = subprocess.run(
                [gpflow, str(PEER), *options, "--rows", ",".join(map(str, ROWS))],
                capture_output=True,
                text=True,
                check=True,
            )
            for line in answer.stdout.splitlines():
                results.add({**json.loads(line), "kernel": name})


def _exported(X: torch.Tensor, M: int) -> tuple[Callable[[torch.Tensor], object], ...]:
    """Return the predictions of an exported numpy file and of onnxruntime with M points."""
    import runpy

    import onnxruntime

    from winnowgp import SparseGPRegressor
    from winnowgp.tabular import export_numpy, export_onnx

    model = SparseGPRegressor(candidates=X[:M].numpy(), alpha=1e-9, schedule="paper")
    model.set_params(epochs=(0, 0, 0))
    model.fit(X.numpy(), torch.sin(X[:, 0]).numpy())
    # Use all candidates, not those that the schedule selects.
    full = SparseGP(model.posterior_.kernel, X[:M], noise=0.1).posterior(
        Dataset.of(X, torch.sin(X[:, 0]))
    )
    model.posterior_ = full
    with tempfile.TemporaryDirectory() as folder:
        predict = runpy.run_path(str(export_numpy(model, Path(folder) / "a.py")))["predict"]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            str(export_onnx(model, Path(folder) / "a.onnx")),
            options,
            providers=["CPUExecutionProvider"],
        )
    return (
        lambda rows: predict(rows.numpy()),
        lambda rows: session.run(None, {"X": rows.numpy()}),
    )


def report() -> None:
    """Print CPU milliseconds for the batch and microseconds for one row."""
    for name in KERNELS:
        print(f"\n{name}")
        _report([row for row in read_results("predict/*") if row["kernel"] == name])


def _report(rows: list[Row]) -> None:
    header = ("peer", *(f"M={M}, {n:,} rows" for n in ROWS for M in POINTS))
    lines = []
    for peer in dict.fromkeys(row["peer"] for row in rows):
        cells = {(r["rows"], r["M"]): r["cpu_s"] for r in rows if r["peer"] == peer}
        shown = [cells.get((n, M), float("nan")) for n in ROWS for M in POINTS]
        batch, single = shown[: len(POINTS)], shown[len(POINTS) :]
        lines.append(
            (peer, *(f"{1e3 * s:.2f} ms" for s in batch), *(f"{1e6 * s:.0f} µs" for s in single))
        )
    print(table(header, lines))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--gpflow", help="Python executable with GPflow; without it GPflow is skipped"
    )
    parser.add_argument("--report", action="store_true", help="print results without measuring")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.report:
        run(arguments.gpflow)
    report()


if __name__ == "__main__":
    main()
