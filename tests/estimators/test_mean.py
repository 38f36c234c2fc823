"""`mean=` of the sparse estimators: learnt, saved, exported, or refused."""

from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.means import ConstantMean, LinearMean, Mean

import winnowgp
from helpers.short_fits import shortest_fits
from winnowgp import SparseGPClassifier, SparseGPRegressor, fit_table
from winnowgp.errors import InputError, NotSaveableError
from winnowgp.tabular import export_numpy

RNG = np.random.default_rng(0)
N = 60
X = np.sort(RNG.uniform(0, 6, (N, 2)), axis=0)
y = 40 + 8 * X[:, 0] - 3 * X[:, 1] + np.sin(3 * X[:, 0]) + 0.05 * RNG.normal(size=N)
POINTS = X[::8]
QUICK: dict[str, Any] = {
    "kernel": "rbf",
    "inducing_points": POINTS,
    "random_state": 0,
    "hyper": "point",
}
FAR = np.array([[30.0, 20.0], [60.0, -20.0]])


@pytest.fixture(scope="module")
def linear() -> SparseGPRegressor:
    with shortest_fits():
        return SparseGPRegressor(mean="linear", **QUICK).fit(X, y)


def slope(model: SparseGPRegressor) -> np.ndarray:
    """The slope of the function far from the data, in the user's units."""
    step = np.eye(2)
    return np.array([model.predict(FAR + s)[0] - model.predict(FAR)[0] for s in step])


def test_linear_mean_extrapolates_the_trend(linear: SparseGPRegressor) -> None:
    assert slope(linear) == pytest.approx([8, -3], abs=1.5)
    mean: Any = linear.posterior_.mean
    scale = linear._y_scaler.columns.scale / linear._x_scaler.scale
    np.testing.assert_allclose(mean.weights[:, 0] * scale, slope(linear), rtol=1e-6)
    # A zero mean returns to the mean of the targets.
    with shortest_fits():
        zero = SparseGPRegressor(**QUICK).fit(X, y)
    np.testing.assert_allclose(slope(zero), 0, atol=1e-6)
    assert zero.predict(FAR)[0] == pytest.approx(y.mean())


def test_mean_is_the_generalised_least_squares_fit(linear: SparseGPRegressor) -> None:
    """At the optimum the collapsed bound is stationary in the mean: dense weighted regression."""
    q = linear.posterior_
    x = linear._x_scaler.forward(torch.tensor(X))
    z = linear._y_scaler.columns.forward(torch.tensor(y)[:, None])
    with torch.no_grad():
        Kuf, Kuu = q.kernel(q.Z, x).to_dense(), q.kernel(q.Z).to_dense()
        A = Kuf.mT @ torch.linalg.solve(Kuu, Kuf) + q.likelihood.noise * torch.eye(N).double()
        design = torch.cat([x, torch.ones(N, 1).double()], 1)
        inverse = torch.linalg.solve(A, design)
        expected = torch.linalg.solve(design.mT @ inverse, inverse.mT @ z)[:, 0]
    mean: Any = q.mean
    found = torch.cat([mean.weights[:, 0], mean.bias])
    # The objective stops when it gains 1e-4 nats per observation.
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_mean_is_saved_and_exported(linear: SparseGPRegressor, tmp_path: Path) -> None:
    loaded = winnowgp.load(linear.save(tmp_path / "linear.winnow"))
    assert loaded.mean == "linear"
    np.testing.assert_allclose(loaded.predict(FAR), linear.predict(FAR), rtol=1e-12)
    exported = run_path(str(export_numpy(linear, tmp_path / "linear.py")))["predict"](FAR)
    np.testing.assert_allclose(exported["mean"], linear.predict(FAR), rtol=1e-6)


class Square(Mean):
    """A mean that winnowgp does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x[..., 0].square()


def test_paper_schedule_learns_gpytorch_means(tmp_path: Path) -> None:
    paper = SparseGPRegressor(
        "rbf", mean=Square(), schedule="paper", alpha=0.01, epochs=(20, 1, 1), random_state=0
    )
    mean: Any = paper.fit(X, y).posterior_.mean
    assert abs(mean.scale.item()) > 1e-3
    with pytest.raises(NotSaveableError, match="Square"):
        paper.save(tmp_path / "square.winnow")
    with pytest.raises(NotSaveableError, match="Square"):
        export_numpy(paper, tmp_path / "square.py")
    constant = SparseGPRegressor(
        "rbf", mean="constant", schedule="paper", alpha=0.01, epochs=(20, 1, 1), random_state=0
    )
    level: Any = constant.fit(X, y).posterior_.mean
    assert level.constant.item() != 0


def test_classifier_and_tables_have_means() -> None:
    labels = np.where(y > np.median(y), "up", "low")
    settings: dict[str, Any] = {"schedule": "paper", "alpha": 0.01, "epochs": (20, 1, 1)}
    model = SparseGPClassifier("rbf", mean="linear", candidates=POINTS, random_state=0, **settings)
    mean: Any = model.fit(X, labels).posterior_.mean
    assert mean.weights.abs().max() > 1e-3
    with shortest_fits():
        table = {"a": X[:, 0], "b": X[:, 1], "y": y}
        fitted = fit_table(table, "y", mean="linear", kernel="rbf", max_points=5, test_size=0)
    assert isinstance(fitted.estimator.posterior_.mean, LinearMean)
    assert fitted.summary["settings"]["mean"] == "linear"


def test_auto_mean_is_a_constant_for_other_likelihoods() -> None:
    counts = np.random.default_rng(0).poisson(50, N)
    model = SparseGPRegressor(
        "rbf", likelihood="poisson", schedule="paper", alpha=0.1, epochs=(1, 1, 1)
    )
    assert isinstance(model.fit(X, counts).posterior_.mean, ConstantMean)


@pytest.mark.parametrize(
    ("mean", "targets", "message"),
    [
        ("quadratic", y, "'auto', 'zero', 'constant', 'linear' or a GPyTorch mean"),
        (LinearMean(3), y, "cannot be evaluated on 2 columns"),
        (ConstantMean(batch_shape=torch.Size([2])), y, "one number per row"),
        ("linear", np.column_stack([y, y]), "for a model of 2 functions"),
    ],
)
def test_bad_mean_raises(mean: Any, targets: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SparseGPRegressor(mean=mean).fit(X, targets)
    if targets.ndim > 1:
        with pytest.raises(InputError, match="for a model of 3 functions"):
            SparseGPClassifier(mean=mean).fit(X, np.arange(N) % 3)
