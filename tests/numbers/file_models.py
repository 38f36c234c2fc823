"""A small model of every kind that can be saved, as the version that wrote `files` made it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    GaussianLikelihood,
    Likelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import LinearMean
from measurements import deep_rbf_gp, mixed_columns, rows
from torch import Tensor

from winnowgp import (
    GPLVM,
    Dataset,
    DataTable,
    DeepGP,
    DeepGPClassifier,
    DeepGPRegressor,
    LatentVariableGP,
    MaskedMatrix,
    SparseGP,
    SparseGPClassifier,
    SparseGPRegressor,
    VariationalGP,
    fit_table,
)
from winnowgp.models import SampledLatentGP
from winnowgp.models.gplvm import Latents
from winnowgp.models.observations import gaussian_noise

N = 40
X = rows(N, 2, seed=0)
Y = np.sin(X[:, 0]) + 0.1 * np.random.default_rng(1).normal(size=N)
TABLE = np.stack([np.sin(X[:, 0]), np.cos(X[:, 0]), X[:, 0], X[:, 1] / 3], 1)
TABLE = TABLE + 0.2 * np.random.default_rng(2).normal(size=TABLE.shape)
COUNTS = np.round(np.exp(1 + Y))
LABELS = np.where(Y > 0.3, "up", np.where(X[:, 1] > 3, "low", "side"))
PAPER: dict[str, Any] = {
    "schedule": "paper",
    "alpha": 0.1,
    "epochs": (5, 10, 5),
    "n_candidates": 8,
    "random_state": 0,
}
DEEP: dict[str, Any] = {"epochs": (5, 9, 6), "n_candidates": 8, "random_state": 0}
DEEP_PAPER: dict[str, Any] = {**PAPER, "epochs": (5, 6, 9, 5)}
FAST: dict[str, Any] = {"tolerance": 0.05, "n_candidates": 16, "random_state": 0}


def inputs() -> Tensor:
    """Standardised inputs `[N 2]`."""
    return torch.from_numpy(X / 2 - 1.5)


def targets(likelihood: Likelihood) -> Dataset:
    """Targets that a likelihood can have observed."""
    y = {
        BernoulliLikelihood: (Y > 0).astype(float),
        PoissonLikelihood: COUNTS,
        NegativeBinomialLikelihood: COUNTS,
        BetaLikelihood: 1 / (1 + np.exp(-Y)),
        SoftmaxLikelihood: (Y > 0.3) + 1.0 * (X[:, 1] > 3),
    }.get(type(likelihood), Y)
    return Dataset.of(inputs(), torch.from_numpy(y))


def posterior(likelihood: Likelihood) -> Any:
    """q(f) of a model with this likelihood."""
    model = VariationalGP(ScaleKernel(RBFKernel()), inputs()[::5], likelihood=likelihood)
    return model.posterior(targets(likelihood))


def sparse() -> SparseGP:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)) + MaternKernel(nu=2.5) * LinearKernel()
    return SparseGP(kernel, inputs()[::5], mean=LinearMean(2), noise=0.1)


def variational() -> VariationalGP:
    kernel = ScaleKernel(PeriodicKernel(active_dims=(0,))) + RBFKernel(active_dims=(1,))
    model = VariationalGP(kernel, inputs()[::5], likelihood=PoissonLikelihood(), targets=2)
    model.q_mean.data.copy_(torch.sin(inputs()[::5]))
    return model


def deep(likelihood: Likelihood, outputs: int = 1) -> DeepGP:
    model = deep_rbf_gp(
        inputs(),
        inputs()[::6],
        likelihood=likelihood,
        outputs=outputs,
        hidden_mean="identity",
        skip_connections=True,
    )
    for layer in model.layers:
        layer.q_mean.data.copy_(torch.sin(layer.candidates[:, : layer.P] + 1)[:, : layer.P])
    return model


def latents() -> Latents:
    return Latents(inputs(), variance=0.1 + 0.05 * inputs().square())


def closed(*, linear: bool = False) -> LatentVariableGP:
    kernel = LinearKernel(ard_num_dims=2) if linear else RBFKernel(ard_num_dims=2)
    noise = torch.tensor([0.1, 0.3], dtype=torch.float64)
    points = inputs()[: 2 if linear else 6]
    return LatentVariableGP(ScaleKernel(kernel), latents(), candidates=points, noise=noise)


def sampled(likelihood: Likelihood) -> SampledLatentGP:
    kernel = ScaleKernel(MaternKernel(nu=1.5))
    function = VariationalGP(kernel, inputs()[::6], likelihood=likelihood, targets=2)
    function.q_mean.data.copy_(torch.sin(inputs()[::6]))
    return SampledLatentGP(function, latents())


def entries() -> MaskedMatrix:
    """A table of counts with a missing entry."""
    table = torch.from_numpy(np.stack([COUNTS, np.round(X[:, 0])], 1))
    table[3, 1] = torch.nan
    return MaskedMatrix.of(table)


def table_model(target: str, task: str, **settings: Any) -> Any:
    names = ["y", "up", "visits"]
    return fit_table(
        DataTable.of(mixed_columns(N)),
        target,
        task=task,
        id_column="id",
        drop=tuple(name for name in names if name != target),
        missing="impute",
        max_points=5,
        **settings,
    )


def _shallow(**settings: Any) -> SparseGPRegressor:
    return SparseGPRegressor(**settings)


MODELS: dict[str, Callable[[], Any]] = {
    "SparseGPRegressor-fast": lambda: _shallow(**FAST).fit(X, Y),
    "SparseGPRegressor-paper": lambda: _shallow(**PAPER).fit(X, Y),
    "SparseGPRegressor-paper-minibatches": lambda: _shallow(**PAPER, batch_size=10).fit(X, Y),
    "SparseGPRegressor-max-points": lambda: _shallow(max_points=4, random_state=0).fit(X, Y),
    "SparseGPRegressor-outputs": lambda: _shallow(**FAST).fit(X, np.stack([Y, 3 - Y], 1)),
    "SparseGPRegressor-expression": lambda: _shallow(
        kernel="rbf[0] * (matern32 + linear[1]) + periodic[0](period=6.0) + constant", **PAPER
    ).fit(X, Y),
    "SparseGPRegressor-kernel": lambda: _shallow(
        kernel=ScaleKernel(MaternKernel(nu=1.5)), candidates=X[:8], tolerance=0.1, random_state=0
    ).fit(X, Y),
    "SparseGPRegressor-student-t": lambda: _shallow(likelihood="student-t", **PAPER).fit(X, Y),
    "SparseGPRegressor-laplace": lambda: _shallow(likelihood="laplace", **PAPER).fit(X, Y),
    "SparseGPRegressor-poisson": lambda: _shallow(likelihood="poisson", **FAST).fit(X, COUNTS),
    "SparseGPRegressor-mixed-precision": lambda: _shallow(precision="mixed", **FAST).fit(X, Y),
    "SparseGPClassifier-fast": lambda: SparseGPClassifier(**FAST).fit(X, Y > 0),
    "SparseGPClassifier-paper": lambda: SparseGPClassifier(**PAPER).fit(X, Y > 0),
    "SparseGPClassifier-classes": lambda: SparseGPClassifier(**PAPER).fit(X, LABELS),
    "SparseGPClassifier-objects": lambda: SparseGPClassifier(**PAPER).fit(X, LABELS.astype(object)),
    "DeepGPRegressor-fast": lambda: DeepGPRegressor(**DEEP).fit(X, Y),
    "DeepGPRegressor-paper": lambda: DeepGPRegressor(**DEEP_PAPER).fit(X, Y),
    "DeepGPRegressor-connected": lambda: DeepGPRegressor(
        3, width=1, skip_connections=True, likelihood="student-t", hidden_mean="zero", **DEEP
    ).fit(X, np.stack([Y, -Y], 1)),
    "DeepGPClassifier-fast": lambda: DeepGPClassifier(**DEEP).fit(X, Y > 0),
    "DeepGPClassifier-paper": lambda: DeepGPClassifier(**DEEP_PAPER).fit(X, LABELS),
    "GPLVM-fast": lambda: GPLVM(max_iter=30, n_candidates=12, random_state=0).fit(TABLE),
    "GPLVM-column-noise": lambda: GPLVM(
        1, noise="column", kernel="linear", max_iter=20, random_state=0
    ).fit(TABLE),
    "GPLVM-paper": lambda: GPLVM(
        schedule="paper", alpha=0.1, epochs=10, n_candidates=8, random_state=0
    ).fit(TABLE),
    "GPLVM-matern": lambda: GPLVM(
        kernel="matern52", schedule="paper", alpha=0.1, epochs=10, n_candidates=8, random_state=0
    ).fit(TABLE),
    "GPLVM-poisson": lambda: GPLVM(
        likelihood="poisson", schedule="paper", alpha=0.1, epochs=5, n_candidates=6, random_state=0
    ).fit(np.stack([COUNTS, np.round(X[:, 0]), COUNTS + 1], 1)),
    "TabularModel-regression": lambda: table_model("y", "auto", kernel="rbf[x] + linear"),
    "TabularModel-classification": lambda: table_model("up", "auto"),
    "TabularModel-counts": lambda: table_model("visits", "counts"),
    "SparseGP": sparse,
    "VariationalGP": variational,
    "DeepGP": lambda: deep(GaussianLikelihood()),
    "DeepGP-softmax": lambda: deep(SoftmaxLikelihood(num_classes=3, mixing_weights=False), 3),
    "LatentVariableGP": closed,
    "LatentVariableGP-linear": lambda: closed(linear=True),
    "SampledLatentGP": lambda: sampled(PoissonLikelihood()),
    "SampledLatentGP-column-noise": lambda: sampled(
        gaussian_noise(torch.tensor([0.2, 0.4], dtype=torch.float64))
    ),
    "Posterior": lambda: sparse().posterior(targets(GaussianLikelihood())),
    "Posterior-bernoulli": lambda: posterior(BernoulliLikelihood()),
    "Posterior-student-t": lambda: posterior(StudentTLikelihood()),
    "Posterior-beta": lambda: posterior(BetaLikelihood()),
    "Posterior-negative-binomial": lambda: posterior(NegativeBinomialLikelihood()),
    "Posterior-softmax": lambda: posterior(SoftmaxLikelihood(num_classes=3, mixing_weights=False)),
    "DeepPosterior": lambda: deep(GaussianLikelihood()).posterior(samples=10),
    "ExpectedPosterior": lambda: closed().posterior(entries()),
    "SampledPosterior": lambda: sampled(PoissonLikelihood()).posterior(entries()),
}
