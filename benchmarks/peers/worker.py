"""Fit one method to one split, and write its predictions, seconds and memory.

    python worker.py METHOD split.npz predictions.npz --seed 20

`benchmarks/libraries.py` writes the split (standardised `X`, `y`, `X_test`, `y_test`, and `levels`,
the levels of the quantiles) and scores the predictions; this script runs in the environment of the
method, with one thread. Settings are those that a library's documentation gives for a first fit:

- winnowgp: `SparseGPRegressor()`. Ours and GPyTorch's fits may be on a GPU: their seconds, and
  those of their predictions, are then those of a clock.
- gpflow-sgpr-M: ARD squared-exponential kernel, k-means centres, L-BFGS until it stops or 1,000
  iterations.
- gpytorch-svgp-M: scaled ARD RBF kernel, k-means centres, 4,000 Adam steps with 1,024 rows at rate
  0.01, and at 0.001 for the last fifth.
- gpytorch-exact: the exact GP of the tutorial: 50 Adam steps at rate 0.1; ARD; double precision.
- sklearn-gpr: constant times ARD RBF plus white noise, one start.
- gpboost-vecchia, gpboost-vif: Matérn-3/2 with a range per column; by default 20 neighbours, and
  200 inducing points with 30 neighbours.
- catboost: `RMSEWithUncertainty`, 1,000 trees; catboost-stopped: as many trees as are best on a
  fifth of the rows, then fitted to all.
- ngboost: normal distribution, 500 trees; ngboost-stopped: up to 2,000, stopped early on a tenth of
  the rows.
- xgb-distribution: normal distribution, up to 500 trees, stopped early on a tenth of the rows.
- lightgbm: one model of 100 trees per quantile; fit and prediction of three quantiles are timed.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import NormalDist
from typing import Any

# Thread counts are read when the libraries load, so they have to be set before the imports.
for _variable in (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
):
    os.environ[_variable] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np

Array = np.ndarray
PREDICTED = 10_000
"""Rows of a timed prediction."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model."""

    predict: Callable[[Array], tuple[Array, Array]]
    """Returns mean and standard deviation of normal predictions, or whatever is timed."""
    size: int | None = None
    """Number of inducing points or neighbours."""
    distribution: Callable[[Array, Array, Array], dict[str, Array]] | None = None
    """Returns `mean`, `quantiles` and maybe `log_density` of test rows; None for normal ones."""


def winnowgp(X: Array, y: Array, *, seed: int, size: int | None, device: str = "cpu") -> Fit:
    from winnowgp import SparseGPRegressor

    model = SparseGPRegressor(random_state=seed, device=device).fit(X, y).predicting_on(device)

    def distribution(X: Array, y: Array, levels: Array) -> dict[str, Array]:
        return {
            "mean": model.predict(X),
            "quantiles": model.predict_quantiles(X, levels),
            "log_density": model.log_density(X, y),
        }

    return Fit(lambda X: model.predict(X, return_std=True), model.n_inducing_, distribution)


def gpflow_sgpr(X: Array, y: Array, *, seed: int, size: int | None) -> Fit:
    import gpflow

    model = gpflow.models.SGPR(
        (X, y[:, None]),
        gpflow.kernels.SquaredExponential(lengthscales=np.ones(X.shape[1])),
        inducing_variable=_centres(X, size, seed),
    )
    gpflow.optimizers.Scipy().minimize(
        model.training_loss, model.trainable_variables, options={"maxiter": 1000}
    )
    posterior = model.posterior()

    def predict(X: Array) -> tuple[Array, Array]:
        mean, variance = model.likelihood.predict_mean_and_var(X, *posterior.predict_f(X))
        return mean.numpy()[:, 0], np.sqrt(variance.numpy()[:, 0])

    return Fit(predict, size)


def gpytorch_svgp(X: Array, y: Array, *, seed: int, size: int | None, device: str = "cpu") -> Fit:
    import gpytorch
    import torch
    from gpytorch_svgp import BATCH, RATE, build

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, likelihood = build(torch.from_numpy(_centres(X, size, seed)))
    model, likelihood = model.to(device), likelihood.to(device)
    rows, targets = torch.from_numpy(X).to(device), torch.from_numpy(y).to(device)
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    optimiser = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=RATE)
    slower = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones=[3200])
    for _ in range(4000):
        batch = torch.randperm(len(y), device=device)[:BATCH]
        optimiser.zero_grad()
        loss = -bound(model(rows[batch]), targets[batch])
        loss.backward()
        optimiser.step()
        slower.step()
    return Fit(_torch_predictions(model, likelihood, device), size)


def gpytorch_exact(X: Array, y: Array, *, seed: int, size: int | None, device: str = "cpu") -> Fit:
    import gpytorch
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)

    class ExactGP(gpytorch.models.ExactGP):
        def __init__(self, X: Any, y: Any, likelihood: Any) -> None:
            super().__init__(X, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            kernel = gpytorch.kernels.RBFKernel(ard_num_dims=X.shape[1])
            self.covar_module = gpytorch.kernels.ScaleKernel(kernel)

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    likelihood = gpytorch.likelihoods.GaussianLikelihood().double().to(device)
    rows, targets = torch.from_numpy(X).to(device), torch.from_numpy(y).to(device)
    model = ExactGP(rows, targets, likelihood).double().to(device)
    bound = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
    model.train()
    for _ in range(50):
        optimiser.zero_grad()
        loss = -bound(model(rows), targets)
        loss.backward()
        optimiser.step()
    return Fit(_torch_predictions(model, likelihood, device))


def _torch_predictions(
    model: Any, likelihood: Any, device: str
) -> Callable[[Array], tuple[Array, Array]]:
    import gpytorch
    import torch

    model.eval()
    likelihood.eval()

    def predict(X: Array) -> tuple[Array, Array]:
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            predicted = likelihood(model(torch.from_numpy(X).to(device)))
            return predicted.mean.cpu().numpy(), predicted.variance.sqrt().cpu().numpy()

    return predict


def sklearn_gpr(X: Array, y: Array, *, seed: int, size: int | None) -> Fit:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    kernel = ConstantKernel() * RBF(np.ones(X.shape[1])) + WhiteKernel()
    model = GaussianProcessRegressor(kernel, random_state=seed).fit(X, y)
    return Fit(lambda X: model.predict(X, return_std=True))


def gpboost_vecchia(X: Array, y: Array, *, seed: int, size: int | None) -> Fit:
    return _gpboost(X, y, seed=seed, gp_approx="vecchia", size=20)


def gpboost_vif(X: Array, y: Array, *, seed: int, size: int | None) -> Fit:
    return _gpboost(X, y, seed=seed, gp_approx="full_scale_vecchia", size=200)


def _gpboost(X: Array, y: Array, *, seed: int, gp_approx: str, size: int) -> Fit:
    import gpboost

    model = gpboost.GPModel(
        gp_coords=X,
        cov_function="matern_ard",
        cov_fct_shape=1.5,
        gp_approx=gp_approx,
        likelihood="gaussian",
        num_parallel_threads=1,
        seed=seed,
    )
    model.fit(y=y)

    def predict(X: Array) -> tuple[Array, Array]:
        predicted = model.predict(gp_coords_pred=X, predict_var=True, predict_response=True)
        return predicted["mu"], np.sqrt(predicted["var"])

    return Fit(predict, size)


def catboost(X: Array, y: Array, *, seed: int, size: int | None) -> Fit:
    return _catboost(X, y, random_seed=seed)


def catboost_stopped(X: Array, y: Array, *, seed: int, size: int | None) -> Fit:
    order = np.random.default_rng(seed).permutation(len(y))
    train, held = order[len(y) // 5 :], order[: len(y) // 5]
    trial = _catboost_model(iterations=5000, early_stopping_rounds=100, random_seed=seed)
    trial.fit(X[train], y[train], eval_set=(X[held], y[held]))
    rate = trial.get_all_params()["learning_rate"]
    trees = trial.get_best_iteration() + 1
    return _catboost(X, y, iterations=trees, learning_rate=rate, random_seed=seed)


def _catboost(X: Array, y: Array, **settings: Any) -> Fit:
    model = _catboost_model(**settings).fit(X, y)

    def predict(X: Array) -> tuple[Array, Array]:
        mean, variance = model.predict(X, thread_count=1).T
        return mean, np.sqrt(variance)

    return Fit(predict)


def _catboost_model(**settings: Any) -> Any:
    from catboost import CatBoostRegressor

    fixed = {"thread_count": 1, "verbose": False, "allow_writing_files": False}
    return CatBoostRegressor(loss_function="RMSEWithUncertainty", **fixed, **settings)


def ngboost(X: Array, y: Array, *, seed: int, size: int | None) -> Fit:
    return _ngboost(X, y, random_state=seed)


def ngboost_stopped(X: Array, y: Array, *, seed: int, size: int | None) -> Fit:
    return _ngboost(X, y, random_state=seed, n_estimators=2000, early_stopping_rounds=50)


def _ngboost(X: Array, y: Array, **settings: Any) -> Fit:
    from ngboost import NGBRegressor

    model = NGBRegressor(verbose=False, **settings).fit(X, y)

    def predict(X: Array) -> tuple[Array, Array]:
        parameters = model.pred_dist(X).params
        return parameters["loc"], parameters["scale"]

    return Fit(predict)


def xgb_distribution(X: Array, y: Array, *, seed: int, size: int | None) -> Fit:
    from xgboost_distribution import XGBDistribution

    order = np.random.default_rng(seed).permutation(len(y))
    held, train = order[: len(y) // 10], order[len(y) // 10 :]
    model = XGBDistribution(
        distribution="normal",
        n_estimators=500,
        early_stopping_rounds=10,
        random_state=seed,
        n_jobs=1,
    )
    model.fit(X[train], y[train], eval_set=[(X[held], y[held])], verbose=False)

    def predict(X: Array) -> tuple[Array, Array]:
        predicted = model.predict(X)
        return predicted.loc, predicted.scale

    return Fit(predict)


def lightgbm(X: Array, y: Array, *, seed: int, size: int | None) -> Fit:
    from lightgbm import LGBMRegressor

    def fitted(level: float) -> Any:
        model = LGBMRegressor(
            objective="quantile", alpha=level, random_state=seed, n_jobs=1, verbose=-1
        )
        return model.fit(X, y)

    timed = {level: fitted(level) for level in (0.05, 0.5, 0.95)}

    def predict(X: Array) -> tuple[Array, Array]:
        low, middle, high = (model.predict(X) for model in timed.values())
        return middle, high - low

    def distribution(X: Array, y: Array, levels: Array) -> dict[str, Array]:
        models = {level: timed.get(level) or fitted(level) for level in levels.tolist()}
        # Quantiles of separate models may cross.
        quantiles = np.sort([model.predict(X) for model in models.values()], axis=0)
        return {"mean": timed[0.5].predict(X), "quantiles": quantiles}

    return Fit(predict, distribution=distribution)


def _centres(X: Array, M: int | None, seed: int) -> Array:
    """Return cluster centres; all rows if there are fewer."""
    from sklearn.cluster import KMeans

    assert M is not None
    clusters = min(M, len(X))
    return KMeans(n_clusters=clusters, n_init=1, random_state=seed).fit(X).cluster_centers_


METHODS: dict[str, tuple[Callable[..., Fit], str, str]] = {
    "winnowgp": (winnowgp, "winnowgp", "winnowgp.estimators"),
    "gpflow-sgpr": (gpflow_sgpr, "gpflow", "gpflow"),
    "gpytorch-svgp": (gpytorch_svgp, "gpytorch", "gpytorch"),
    "gpytorch-exact": (gpytorch_exact, "gpytorch", "gpytorch"),
    "sklearn-gpr": (sklearn_gpr, "scikit-learn", "sklearn.gaussian_process"),
    "gpboost-vecchia": (gpboost_vecchia, "gpboost", "gpboost"),
    "gpboost-vif": (gpboost_vif, "gpboost", "gpboost"),
    "catboost": (catboost, "catboost", "catboost"),
    "catboost-stopped": (catboost_stopped, "catboost", "catboost"),
    "ngboost": (ngboost, "ngboost", "ngboost"),
    "ngboost-stopped": (ngboost_stopped, "ngboost", "ngboost"),
    "xgb-distribution": (xgb_distribution, "xgboost-distribution", "xgboost_distribution"),
    "lightgbm": (lightgbm, "lightgbm", "lightgbm"),
}
"""The function that fits, its package, and the module whose import does not count."""


def _normal(mean: Array, sd: Array, y: Array, levels: Array) -> dict[str, Array]:
    scores = np.array([NormalDist().inv_cdf(level) for level in levels])
    error = (y - mean) / sd
    return {
        "mean": mean,
        "quantiles": mean + scores[:, None] * sd,
        "log_density": -0.5 * (np.log(2 * np.pi) + error**2) - np.log(sd),
    }


def _version(package: str) -> str:
    """Return the version of a package, also of one that is not installed but on the path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return import_module(package).__version__


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def _megabytes() -> float | None:
    """Return the largest memory of this process so far, libraries included; None if not known."""
    # Not `resource.getrusage`: its maximum includes the parent's memory at the time of the fork.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    lines = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return round(int(lines[0].split()[1]) / 1024) if lines else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("method")
    parser.add_argument("split", type=Path)
    parser.add_argument("predictions", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    split = dict(np.load(arguments.split))
    X, y, X_test, y_test = (split[name] for name in ("X", "y", "X_test", "y_test"))
    function, package, module = METHODS[arguments.method]
    import_module(module)
    # The source of this process: that of the runner may have changed since it was started.
    ours = import_module("winnowgp.experiments.runs").versions() if package == "winnowgp" else {}
    options = {"device": arguments.device} if package in ("winnowgp", "gpytorch") else {}
    start, wall = time.process_time(), time.perf_counter()
    fit = function(X, y, seed=arguments.seed, size=arguments.size, **options)
    seconds, wall = time.process_time() - start, time.perf_counter() - wall
    many = np.resize(X_test, (PREDICTED, X.shape[1]))
    start, wall_start = time.process_time(), time.perf_counter()
    fit.predict(many)
    predict_seconds, peak = time.process_time() - start, _megabytes()
    if options.get("device") == "cuda":
        predict_seconds = time.perf_counter() - wall_start
    if fit.distribution is None:
        predictions = _normal(*fit.predict(X_test), y_test, split["levels"])
    else:
        predictions = fit.distribution(X_test, y_test, split["levels"])
    row = {
        "size": fit.size,
        "wall_s": round(wall, 3),
        **(
            {"device": _device_name()}
            if options.get("device") == "cuda"
            else {"cpu_s": round(seconds, 3)}
        ),
        "predict_s": round(predict_seconds, 4),
        "memory_mb": peak,
        "version": _version(package),
        **({"source": ours["source"]} if ours else {}),
    }
    np.savez(arguments.predictions, **predictions, row=json.dumps(row))


if __name__ == "__main__":
    main()
