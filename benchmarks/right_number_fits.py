"""The fits of `right_number.py`: `run_fit` returns the results of one setting as a row."""

import json
import subprocess
import sys
import tempfile
import warnings
from math import isfinite, log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, PoissonRegressor
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler

from measure import Row, Seconds, timed
from right_number_dense import DenseGP, ExactGP, collapsed_bound, covariance_of, exact_gp
from right_number_problems import (
    SIZES,
    Problem,
    Settings,
    known_covariance,
    known_draw,
    rare_events,
    split_table,
    table_path,
    with_irrelevant_columns,
)
from winnowgp import SparseGPClassifier, SparseGPRegressor
from winnowgp.data import Dataset
from winnowgp.estimators.kernels import AUTO_KERNELS
from winnowgp.models import SparseGP

Estimator = SparseGPRegressor | SparseGPClassifier
Values = NDArray[np.float64]

EXACT_KERNELS = ("rbf", "matern32")
"""Kernels of the exact GP that the tables are compared with."""

PEERS = Path(__file__).parent / "peers"


def run_fit(settings: Settings, *, exact_rows: int) -> Row:
    """Return the results of one fit.

    Args:
        exact_rows: largest number of rows of an exact GP.
    """
    # GPyTorch's first kernel makes PyTorch import SymPy, which is not part of a fit.
    torch.broadcast_shapes((1,), (1,))
    if settings["device"] == "cuda":
        # The first factorisation loads libraries, which is not part of a fit.
        eye = torch.eye(500, dtype=torch.float64, device="cuda")
        torch.linalg.cholesky(eye)
        torch.linalg.eigh(eye)
        torch.cuda.synchronize()
    part = settings["what"]
    row = _fit_table(settings, exact_rows) if part == "tables" else _FITS[part](settings)
    return finite(row)


def finite(value: Any) -> Any:
    """Return a value with None in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if isfinite(value) else None
    return value


def fitted(estimator: Estimator, X: Values, y: Values) -> tuple[Any, Row]:
    """Fit an estimator; return it with its time, its warnings and what it reports."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, seconds = timed(lambda: estimator.fit(X, y))
    messages = sorted({f"{w.category.__name__}: {w.message}" for w in caught})
    return model, {**seconds.row(), "warnings": messages, **_reported(model, len(y))}


def _reported(model: Any, N: int) -> Row:
    lower, upper = model.kl_bounds_
    return {
        "N": N,
        "points": model.n_inducing_,
        "kernel": model.kernel_name_,
        "kernel_evidence": model.kernel_evidence_,
        "elbo": model.elbo_ / N,
        "elbo_gap": model.elbo_gap_,
        "kl_lower": lower / N,
        "kl_upper": upper / N,
        "evidence_method": None if model.evidence_ is None else model.evidence_.method,
        "held_out_gap": model.predictive_gap_,
        "held_out_gap_se": model.predictive_gap_se_,
        "growth_limit": model.growth_limit_,
        "last_doubling_gain": model.last_doubling_gain_,
        "available_sizes": list(model.available_sizes_),
    }


def default_regressor(settings: Settings, **options: Any) -> SparseGPRegressor:
    """Return a regressor with its defaults, or with the tolerance of the setting."""
    if "tolerance" in settings:
        options["tolerance"] = settings["tolerance"]
    return SparseGPRegressor(random_state=settings["seed"], device=settings["device"], **options)


def _test_scores(model: Any, problem: Problem) -> tuple[Values, Row]:
    """Return the standardised log density of each test row, and test scores."""
    own = model.log_density(problem.X_test, problem.y_test)
    error = model.predict(problem.X_test) - problem.y_test
    density = own + log(problem.scale)
    return density, {
        "test": len(problem.y_test),
        "log_density": density.mean(),
        "own_log_density": own.mean(),
        "rmse": float(np.sqrt(np.mean(error**2))),
    }


def _paired(prefix: str, reference: Values, other: Values) -> Row:
    """Return the mean difference of log densities of the same rows, and its standard error."""
    d = reference - other
    return {prefix: d.mean(), f"{prefix}_se": d.std(ddof=1) / np.sqrt(len(d))}


def _exact_row(exact: ExactGP) -> Row:
    N = exact.data.N
    return {
        "exact_kernel": exact.kernel,
        "exact_evidence": exact.evidence / N,
        "exact_noise": exact.model.noise.item(),
        "exact_evidences": {name: nats / N for name, nats in exact.evidences.items()},
        **exact.seconds.row("exact_"),
    }


def _fit_table(settings: Settings, exact_rows: int) -> Row:
    """Fit a table by default, and the exact GP where it is affordable."""
    device, seed = settings["device"], settings["seed"]
    problem = split_table(settings["name"], seed=seed)
    model, row = fitted(default_regressor(settings), problem.X, problem.y)
    density, scores = _test_scores(model, problem)
    row |= scores
    if exact_rows < problem.N:
        return row
    scaled = problem.standardised()
    if device == "cuda":
        torch.cuda.empty_cache()
    exact = exact_gp(scaled, kernels=EXACT_KERNELS, device=device, seed=seed)
    exact_density = exact.log_density(scaled.X_test, scaled.y_test)
    return {
        **row,
        **_exact_row(exact),
        "exact_log_density": exact_density.mean(),
        "exact_own_log_density": exact_density.mean() - log(problem.scale),
        **_paired("fresh_gap", exact_density, density),
    }


def _fit_truth(settings: Settings) -> Row:
    """Compare what a default fit reports with a dense oracle."""
    drawn = "noise" in settings
    if drawn:
        problem = known_draw(settings)
    else:
        problem = split_table(settings["name"], seed=settings["seed"], train=settings["rows"])
    model, row = fitted(default_regressor(settings), problem.X, problem.y)
    density, scores = _test_scores(model, problem)
    scaled, N = problem.standardised(), problem.N
    own, elbo = _oracle(model, scaled)
    exact = exact_gp(
        scaled,
        kernels=AUTO_KERNELS,
        device=settings["device"],
        seed=settings["seed"],
        linear=True,
        priors=True,
    )
    fresh = (scaled.X_test, scaled.y_test)
    row |= {
        **scores,
        "oracle_kl": (own.evidence() - elbo) / N,
        "oracle_elbo": elbo / N,
        "own_evidence": own.evidence() / N,
        **_exact_row(exact),
        "oracle_exact_evidence": exact.dense().evidence() / N,
        **_paired("fresh_gap", exact.dense().log_density(*fresh), density),
        **_paired("own_fresh_gap", own.log_density(*fresh), density),
    }
    if drawn:
        true = DenseGP.of(
            problem.X,
            problem.y,
            covariance=lambda A, B: known_covariance(settings["name"], A, B),
            noise=settings["noise"],
        )
        # The density of standardised targets: log p(z) = log p(y) + N log scale.
        row["true_evidence"] = true.evidence() / N + log(problem.scale)
        nats = true.log_density(problem.X_test, problem.y_test)
        row["true_log_density"] = nats.mean() + log(problem.scale)
    return row


def _oracle(model: Any, scaled: Problem) -> tuple[DenseGP, float]:
    """Return the exact GP at the hyper-parameters of a model, and the model's dense ELBO."""
    posterior = model.posterior_
    covariance, noise = covariance_of(posterior.kernel), posterior.likelihood.noise.item()
    dense = DenseGP.of(scaled.X, scaled.y, covariance=covariance, noise=noise)
    elbo = collapsed_bound(
        scaled.X, scaled.y, posterior.Z.numpy(), covariance=covariance, noise=noise
    )
    return dense, elbo


def _fit_rare(settings: Settings) -> Row:
    """Fit rare events by default, by a generalised linear model, and by a constant."""
    events = rare_events(settings)
    problem, counts = events.problem, settings["name"] == "poisson"
    if len(np.unique(problem.y)) < 2:
        return {"skipped": "all training targets are equal"}
    y, y_test = problem.y, problem.y_test
    if not counts:
        y, y_test = y.astype(int), y_test.astype(int)
    seed, device = settings["seed"], settings["device"]
    estimator: Estimator = SparseGPClassifier(random_state=seed, device=device)
    if counts:
        estimator = SparseGPRegressor(likelihood="poisson", random_state=seed, device=device)
    model, row = fitted(estimator, problem.X, y)
    density = model.log_density(problem.X_test, y_test)
    scaler = StandardScaler().fit(problem.X)
    X, X_test = scaler.transform(problem.X), scaler.transform(problem.X_test)
    if counts:
        # The penalty of scikit-learn's logistic regression, which divides it by the rows.
        linear = PoissonRegressor(alpha=1 / problem.N, max_iter=1000).fit(X, y)
        rate = linear.predict(X_test)
    else:
        rate = LogisticRegression(max_iter=1000).fit(X, y).predict_proba(X_test)[:, 1]
    linear_density = _event_density(y_test, rate, counts=counts)
    constant = _event_density(y_test, np.full(len(y_test), y.mean()), counts=counts)
    return {
        **row,
        "events": float(y.sum()),
        "log_density": density.mean(),
        "linear_log_density": linear_density.mean(),
        "constant_log_density": constant.mean(),
        "true_log_density": events.true_log_density,
        **_paired("gain_over_linear", density, linear_density),
        **_paired("gain_over_constant", density, constant),
    }


def _event_density(y: Values, rate: Values, *, counts: bool) -> Values:
    """Return the log probability of counts with given rates, or of classes 0 and 1."""
    if counts:
        from scipy.stats import poisson

        return poisson.logpmf(y, rate)
    return np.where(y == 1, np.log(rate), np.log1p(-rate))


def _fit_columns(settings: Settings) -> Row:
    """Fit a function beside irrelevant columns."""
    problem = with_irrelevant_columns(settings)
    model, row = fitted(default_regressor(settings), problem.X, problem.y)
    _, scores = _test_scores(model, problem)
    r2 = r2_score(problem.y_test, model.predict(problem.X_test))
    return {**row, **scores, "r2": float(r2)}


def _fit_sizes(settings: Settings) -> Row:
    """Compare resized models with fresh fits of as many points, and with a dense bound."""
    problem = split_table(settings["name"], seed=settings["seed"])
    scaled, N = problem.standardised(), problem.N
    model, row = fitted(default_regressor(settings), problem.X, problem.y)
    row |= _test_scores(model, problem)[1]
    row["sizes"] = []
    for M in [size for size in SIZES if size in model.available_sizes_]:
        small = model.resized(M)
        fresh, of_fresh = fitted(default_regressor(settings, max_points=M), problem.X, problem.y)
        posterior, data = small.posterior_, _dataset(scaled)
        own_density, own_scores = _test_scores(small, problem)
        fresh_density, fresh_scores = _test_scores(fresh, problem)
        own = SparseGP(posterior.kernel, posterior.Z, noise=posterior.likelihood.noise.item())
        row["sizes"].append(
            {
                "M": M,
                "elbo": small.elbo_ / N,
                "log_density": own_scores["log_density"],
                "oracle_elbo": _oracle(small, scaled)[1] / N,
                "bound": own.fixed_bound(data) / N,
                "fresh_points": fresh.n_inducing_,
                "fresh_elbo": of_fresh["elbo"],
                "fresh_log_density": fresh_scores["log_density"],
                **_paired("fresh_gap", fresh_density, own_density),
                "fresh_cpu_s": of_fresh["cpu_s"],
            }
        )
    return row


def _dataset(problem: Problem) -> Dataset:
    return Dataset.of(torch.from_numpy(problem.X), torch.from_numpy(problem.y))


def _fit_synthetic(settings: Settings) -> Row:
    """Fit a draw of the paper's figure 3."""
    # Not imported above: the experiments draw figures.
    from winnowgp.experiments.synthetic import sampled

    seed = 1000 * settings["seed"] + settings["draw"]
    data = sampled(settings["name"], settings["intensity"], rows=settings["rows"], seed=seed)
    return fitted(default_regressor(settings), data.X.numpy(), data.Y[:, 0].numpy())[1]


def gpflow_python() -> str | None:
    """Return an interpreter that can import GPflow: that of `make peers`, or this one."""
    for python in (str(PEERS / ".venv-gpflow" / "bin" / "python"), sys.executable):
        command = [
            python,
            "-c",
            "import importlib.util as u, sys; sys.exit(not u.find_spec('gpflow'))",
        ]
        try:
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return python
        except FileNotFoundError:
            continue
    return None


def _fit_peers(settings: Settings) -> Row:
    """Fit a table by default, and GPflow's SGPR with as many inducing points."""
    problem = split_table(settings["name"], seed=settings["seed"])
    model, row = fitted(default_regressor(settings), problem.X, problem.y)
    row |= _test_scores(model, problem)[1]
    python, path = gpflow_python(), table_path(settings["name"])
    assert python is not None
    assert path is not None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "gpflow.jsonl"
        options = {
            "--data-dir": path.parent,
            "--dataset": settings["name"],
            "--points": model.n_inducing_,
            "--seed": settings["seed"],
            "--maxiter": 300,
            "--out": out,
        }
        words = [str(word) for pair in options.items() for word in pair]
        command = [python, str(PEERS / "gpflow_sgpr.py"), *words]
        subprocess.run(command, check=True, capture_output=True)
        peer = json.loads(out.read_text(encoding="utf-8"))
    seconds = Seconds(peer["seconds"], peer["cpu_seconds"])
    return {
        **row,
        **seconds.row("gpflow_"),
        "gpflow_version": peer["version"],
        "gpflow_iterations": peer.get("n_iterations"),
        "gpflow_elbo": peer["elbo"] / problem.N if "elbo" in peer else None,
        "gpflow_own_log_density": peer.get("log_density"),
        "gpflow_error": peer.get("error"),
    }


_FITS = {
    "truth": _fit_truth,
    "rare": _fit_rare,
    "columns": _fit_columns,
    "sizes": _fit_sizes,
    "synthetic": _fit_synthetic,
    "peers": _fit_peers,
}
