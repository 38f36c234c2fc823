"""The fits whose numbers `record.py` records."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    GaussianLikelihood,
    Likelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.means import ConstantMean
from gpytorch.models import ApproximateGP
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from measurements import (
    Numbers,
    deep_rbf_gp,
    estimator_numbers,
    fit_numbers,
    mixed_columns,
    predictions,
    rows,
)
from torch import Tensor

import winnowgp
from winnowgp import (
    GPLVM,
    Checkpoint,
    Dataset,
    DeepGPClassifier,
    DeepGPRegressor,
    LatentVariableGP,
    MaskedMatrix,
    SparseGP,
    SparseGPClassifier,
    SparseGPRegressor,
    VariationalGP,
    fit,
)
from winnowgp.data import ArraySource, BatchSource, ParquetSource, hills, shard
from winnowgp.gradients import LeaveOneOut, Relaxed, ScoreFunction
from winnowgp.models import SampledLatentGP
from winnowgp.models.observations import gaussian_noise
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import (
    DeepTraining,
    FastSchedule,
    FixedAlpha,
    MaxCost,
    MaxPoints,
    PaperSchedule,
    Tolerance,
    principal_latents,
)

Problem = Callable[[], Numbers]

N = 80
X = rows(N, 2, seed=0)
NOISE = np.random.default_rng(1).normal(size=N)
Y = np.sin(X[:, 0]) + 0.3 * np.cos(2 * X[:, 1]) + 0.1 * NOISE
COUNTS = np.random.default_rng(2).poisson(np.exp(1 + 0.7 * Y)).astype(float)
LABELS = np.where(Y > 0.3, "up", np.where(X[:, 1] > 3, "low", "side"))
TABLE = np.stack([np.sin(X[:, 0]), np.cos(X[:, 0]), np.tanh(X[:, 0] - 3), X[:, 1] / 3], 1)[:40]
TABLE = TABLE + 0.05 * np.random.default_rng(3).normal(size=TABLE.shape)
HOLED = np.where(np.random.default_rng(4).uniform(size=TABLE.shape) < 0.1, np.nan, TABLE)
COUNT_TABLE = np.random.default_rng(5).poisson(np.exp(1 + 0.5 * TABLE)).astype(float)
PAPER: dict[str, Any] = {"schedule": "paper", "alpha": 0.1, "random_state": 0}
SHALLOW_PAPER = {**PAPER, "epochs": (15, 30, 15), "n_candidates": 15}
DEEP: dict[str, Any] = {"epochs": (10, 30, 20), "n_candidates": 15, "random_state": 0}
DEEP_PAPER = {**PAPER, "epochs": (10, 20, 20, 15), "n_candidates": 12}
LATENT_PAPER = {**PAPER, "epochs": 15, "n_candidates": 10}


def regression(*, y: Any = Y, sample_weight: Any = None, **settings: Any) -> Numbers:
    settings.setdefault("random_state", 0)
    return estimator_numbers(SparseGPRegressor(**settings).fit(X, y, sample_weight))


def classification(*, y: Any = LABELS, **settings: Any) -> Numbers:
    settings.setdefault("random_state", 0)
    return estimator_numbers(SparseGPClassifier(**settings).fit(X, y))


def deep_regression(*, y: Any = Y, **settings: Any) -> Numbers:
    return estimator_numbers(DeepGPRegressor(**settings).fit(X, y))


def deep_classification(*, y: Any = LABELS, **settings: Any) -> Numbers:
    return estimator_numbers(DeepGPClassifier(**settings).fit(X, y))


def embedding(table: Any = TABLE, **settings: Any) -> Numbers:
    settings.setdefault("random_state", 0)
    if settings.get("schedule") != "paper":
        settings.setdefault("max_iter", 30)
    settings.setdefault("n_candidates", 20)
    return estimator_numbers(GPLVM(**settings).fit(table))


def source_regression(make: Callable[[Path], Any]) -> Numbers:
    """A fit of rows that are read some at a time."""
    with TemporaryDirectory() as folder:
        source = make(Path(folder))
        model = SparseGPRegressor(tolerance=0.05, n_candidates=40, random_state=0)
        return estimator_numbers(model.fit(source))


def parquet(folder: Path) -> ParquetSource:
    import pyarrow
    from pyarrow import parquet

    columns = pyarrow.table({"a": X[:, 0], "b": X[:, 1], "y": Y})
    parquet.write_table(columns, folder / "rows.parquet", row_group_size=35)
    return ParquetSource(folder / "rows.parquet", targets="y")


def batches() -> Iterator[tuple[Any, Any]]:
    for start in range(0, N, 50):
        yield X[start : start + 50], Y[start : start + 50]


class Interrupted(Exception):
    """Raised by a callback to stop a fit."""


def resumed(model: Any, *data: Any, steps: int = 25) -> Numbers:
    """The numbers of a fit that was stopped after some steps and then resumed."""
    with TemporaryDirectory() as folder:
        model.set_params(checkpoint=Checkpoint(folder, every=0))
        taken = 0

        def stop(progress: Any) -> None:
            nonlocal taken
            taken += 1
            if taken == steps:
                raise Interrupted

        silent = model.get_params()["callbacks"]
        try:
            model.set_params(callbacks=stop).fit(*data)
        except Interrupted:
            return estimator_numbers(model.set_params(callbacks=silent).fit(*data))
        raise AssertionError("the fit ended before it could be stopped")


def command_line(target: str, *options: str) -> Numbers:
    """`winnow fit` and `winnow predict` of a CSV file with columns of every kind."""
    with TemporaryDirectory() as folder:
        for name, columns in (("train", mixed_columns(80)), ("new", mixed_columns(20, seed=1))):
            with open(f"{folder}/{name}.csv", "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
        drop = ",".join({"y", "up", "visits"} - {target})
        fitting = ["fit", "train.csv", "-t", target, "--drop", drop, "--id", "id"]
        _winnow(folder, *fitting, "--missing", "impute", "-o", "model.winnow", *options)
        _winnow(folder, "predict", "model.winnow", "new.csv", "-o", "predictions.csv")
        with open(f"{folder}/predictions.csv", newline="", encoding="utf-8") as file:
            header, *lines = csv.reader(file)
        model = winnowgp.load(f"{folder}/model.winnow")
    columns = {name: list(values) for name, *values in zip(header, *lines, strict=True)}
    written = {f"csv_{name}": _read(values) for name, values in columns.items()}
    return written | predictions(model) | estimator_numbers(model.estimator, predicted=False)


def _winnow(folder: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "winnowgp", *arguments, "--quiet"],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def _read(values: list[str]) -> Any:
    try:
        return np.array([float(value) for value in values])
    except ValueError:
        return values


def data(y: Any = Y) -> Dataset:
    return Dataset.of(torch.from_numpy(X / 2 - 1.5), torch.from_numpy(np.asarray(y, float)))


def kernel() -> Kernel:
    return ScaleKernel(RBFKernel(ard_num_dims=2))


def sparse_model(schedule: Any, K: int = 0, **settings: Any) -> Numbers:
    model = SparseGP(kernel(), data().X[:K], noise=0.1, **settings)
    return fit_numbers(fit(model, data(), schedule=schedule))


def variational_model(
    schedule: Any, K: int = 0, *, likelihood: Likelihood | None = None, y: Any = Y
) -> Numbers:
    likelihood = GaussianLikelihood() if likelihood is None else likelihood
    model = VariationalGP(kernel(), data(y).X[:K], likelihood=likelihood)
    return fit_numbers(fit(model, data(y), schedule=schedule))


def deep_model(
    schedule: Any, *, skip_connections: bool = False, hidden_mean: str = "zero"
) -> Numbers:
    rows = data()
    model = deep_rbf_gp(
        rows.X, rows.X[:12], hidden_mean=hidden_mean, skip_connections=skip_connections
    )
    return fit_numbers(fit(model, rows, schedule=schedule))


def entries(table: Any = TABLE) -> tuple[MaskedMatrix, Tensor]:
    """A standardised table, and where its rows begin."""
    values = torch.from_numpy((table - np.nanmean(table, 0)) / np.nanstd(table, 0))
    found = MaskedMatrix.of(values)
    return found, principal_latents(found, 2, generator=torch.Generator().manual_seed(0))


def latent_model(schedule: Any, K: int = 0, *, table: Any = TABLE) -> Numbers:
    values, start = entries(table)
    model = LatentVariableGP(kernel(), start, candidates=start[:K], noise=0.1)
    return fit_numbers(fit(model, values, schedule=schedule))


def sampled_model(schedule: Any, K: int, *, counts: bool = False) -> Numbers:
    values, start = entries()
    noise = gaussian_noise(torch.full((4,), 0.1, dtype=torch.float64))
    likelihood = PoissonLikelihood() if counts else noise
    matern = ScaleKernel(MaternKernel(nu=2.5))
    function = VariationalGP(matern, start[:K], likelihood=likelihood, targets=4)
    table = MaskedMatrix.of(torch.from_numpy(COUNT_TABLE)) if counts else values
    return fit_numbers(fit(SampledLatentGP(function, start), table, schedule=schedule))


class UserModel(ApproximateGP):
    """A model as users of GPyTorch write it."""

    def __init__(self, Z: Tensor) -> None:
        q = CholeskyVariationalDistribution(len(Z))
        super().__init__(VariationalStrategy(self, Z, q))
        self.mean_module = ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel())
        self.to(Z)

    def forward(self, x: Tensor) -> MultivariateNormal:
        mean: Any = self.mean_module(x)
        return MultivariateNormal(mean, self.covar_module(x))


def gpytorch_model(likelihood: Likelihood, y: Any, **settings: Any) -> Numbers:
    from winnowgp.integrations.gpytorch import winnow

    result = winnow(
        UserModel(data().X[:40]), likelihood.double(), (data().X, torch.from_numpy(y)), **settings
    )
    prediction = result.model.eval()(data().X[:12])
    return {
        "elbo": result.bound,
        "all_points_elbo": result.reference,
        "original_elbo": result.original,
        "n_inducing": result.n_inducing,
        "inclusion": [each.selection.inclusion for each in result.sets],
        "inducing_points": result.model.variational_strategy.inducing_points,
        "mean": prediction.mean,
        "variance": prediction.variance,
    }


def to_gpytorch() -> Numbers:
    from winnowgp.integrations.gpytorch import to_gpytorch

    model = SparseGPRegressor(max_points=6, random_state=0).fit(X, Y)
    converted, likelihood = to_gpytorch(model)
    found = likelihood.eval()(converted.eval()(torch.from_numpy(X[:12])))
    return {"mean": found.mean, "variance": found.variance}


def botorch_allocation(*, with_targets: bool, **settings: Any) -> Numbers:
    from winnowgp.integrations.botorch import WinnowingAllocator

    chosen = WinnowingAllocator(
        targets=data().Y if with_targets else None, noise=0.02, **settings
    ).allocate_inducing_points(data().X, kernel().double(), 40, torch.Size())
    return {"n_inducing": len(chosen), "inducing_points": chosen}


def botorch_posterior() -> Numbers:
    from winnowgp.integrations.botorch import SparseGPModel

    model = SparseGPModel.of(SparseGPRegressor(max_points=6, random_state=0).fit(X, Y))
    at = torch.from_numpy(X[:12])
    found, updated = model.posterior(at), model.condition_on_observations(at[:2], at[:2, :1] / 6)
    return {
        "mean": found.mean,
        "variance": found.variance,
        "conditioned_mean": updated.posterior(at).mean,
        "conditioned_variance": updated.posterior(at).variance,
    }


def _prior(K: int) -> SquaredCardinality:
    return SquaredCardinality(K, 0.1)


BETA = 1 / (1 + np.exp(-Y))
QUICK: dict[str, Any] = {"tolerance": 0.1, "n_candidates": 20}
PHASES: dict[str, Any] = {"pre": 15, "joint": 30, "post": 15}
LAYERS: dict[str, Any] = {"layerwise": 10, "pre": 20, "post": 15}
PROBLEMS: dict[str, Problem] = {
    # Estimators: goals, schedules, likelihoods, kernels, candidates.
    "SparseGPRegressor fast": regression,
    "SparseGPRegressor fast max_points": lambda: regression(max_points=8),
    "SparseGPRegressor fast alpha": lambda: regression(alpha=0.2),
    "SparseGPRegressor fast outputs": lambda: regression(y=np.stack([Y, NOISE], 1), **QUICK),
    "SparseGPRegressor fast weights": lambda: regression(sample_weight=1 + X[:, 0], **QUICK),
    "SparseGPRegressor fast mixed precision": lambda: regression(precision="mixed", **QUICK),
    "SparseGPRegressor fast kmeans": lambda: regression(candidates="kmeans", **QUICK),
    "SparseGPRegressor fast random": lambda: regression(candidates="random", **QUICK),
    "SparseGPRegressor fast locations": lambda: regression(candidates=X[:30], tolerance=0.05),
    "SparseGPRegressor fast matern52": lambda: regression(kernel="matern52", **QUICK),
    "SparseGPRegressor fast expression": lambda: regression(
        kernel="rbf[0] * matern32 + periodic[1](period=3.0) + linear + constant", **QUICK
    ),
    "SparseGPRegressor fast rq": lambda: regression(kernel="rq + matern12", **QUICK),
    "SparseGPRegressor fast student-t": lambda: regression(likelihood="student-t", **QUICK),
    "SparseGPRegressor fast laplace": lambda: regression(likelihood="laplace", **QUICK),
    "SparseGPRegressor fast poisson": lambda: regression(likelihood="poisson", y=COUNTS, **QUICK),
    "SparseGPRegressor paper beta": lambda: regression(
        likelihood=BetaLikelihood(), y=BETA, **SHALLOW_PAPER
    ),
    "SparseGPRegressor paper": lambda: regression(**SHALLOW_PAPER),
    "SparseGPRegressor paper minibatches": lambda: regression(**SHALLOW_PAPER, batch_size=40),
    "SparseGPRegressor paper student-t": lambda: regression(
        likelihood="student-t", **SHALLOW_PAPER
    ),
    "SparseGPRegressor paper laplace": lambda: regression(likelihood="laplace", **SHALLOW_PAPER),
    "SparseGPRegressor paper poisson": lambda: regression(
        likelihood="poisson", y=COUNTS, **SHALLOW_PAPER
    ),
    "SparseGPClassifier fast two": lambda: classification(y=Y > 0, **QUICK),
    "SparseGPClassifier fast three": lambda: classification(**QUICK),
    "SparseGPClassifier paper two": lambda: classification(y=Y > 0, **SHALLOW_PAPER),
    "SparseGPClassifier paper three": lambda: classification(**SHALLOW_PAPER, batch_size=40),
    "DeepGPRegressor fast": lambda: deep_regression(**DEEP),
    "DeepGPRegressor fast max_cost": lambda: deep_regression(max_cost=60, **DEEP),
    "DeepGPRegressor fast connected": lambda: deep_regression(
        layers=3, width=1, skip_connections=True, hidden_mean="identity", batch_size=40, **DEEP
    ),
    "DeepGPRegressor fast student-t": lambda: deep_regression(likelihood="student-t", **DEEP),
    "DeepGPRegressor fast laplace": lambda: deep_regression(likelihood="laplace", **DEEP),
    "DeepGPRegressor fast poisson": lambda: deep_regression(likelihood="poisson", y=COUNTS, **DEEP),
    "DeepGPRegressor paper": lambda: deep_regression(**DEEP_PAPER),
    "DeepGPClassifier fast two": lambda: deep_classification(y=Y > 0, **DEEP),
    "DeepGPClassifier fast three": lambda: deep_classification(**DEEP),
    "DeepGPClassifier paper": lambda: deep_classification(y=Y > 0, **DEEP_PAPER),
    "GPLVM fast": embedding,
    "GPLVM fast missing": lambda: embedding(HOLED, noise="column"),
    "GPLVM fast linear": lambda: embedding(kernel="linear", max_points=2),
    "GPLVM paper": lambda: embedding(**LATENT_PAPER),
    "GPLVM paper minibatches": lambda: embedding(HOLED, batch_size=20, **LATENT_PAPER),
    "GPLVM paper matern32": lambda: embedding(kernel="matern32", **LATENT_PAPER),
    "GPLVM paper student-t": lambda: embedding(likelihood="student-t", **LATENT_PAPER),
    "GPLVM paper laplace": lambda: embedding(likelihood="laplace", **LATENT_PAPER),
    "GPLVM paper poisson": lambda: embedding(COUNT_TABLE, likelihood="poisson", **LATENT_PAPER),
    # Sources.
    "source Parquet": lambda: source_regression(parquet),
    "source arrays": lambda: source_regression(lambda _: ArraySource(X, Y)),
    "source batches": lambda: source_regression(lambda _: BatchSource(batches)),
    "source shared": lambda: source_regression(
        lambda _: shard(Dataset.of(torch.from_numpy(X), torch.from_numpy(Y)))
    ),
    # Fits that are stopped and resumed.
    "resumed SparseGPRegressor fast": lambda: resumed(
        SparseGPRegressor(random_state=0, **QUICK), X, Y
    ),
    "resumed SparseGPClassifier paper": lambda: resumed(
        SparseGPClassifier(**SHALLOW_PAPER), X, Y > 0, steps=30
    ),
    "resumed DeepGPRegressor fast": lambda: resumed(DeepGPRegressor(**DEEP), X, Y, steps=40),
    "resumed GPLVM fast": lambda: resumed(
        GPLVM(max_iter=30, n_candidates=20, random_state=0), TABLE
    ),
    # The command line.
    "winnow regression": lambda: command_line("y", "--tolerance", "0.05"),
    "winnow classification": lambda: command_line("up", "--tolerance", "0.05"),
    "winnow counts": lambda: command_line("visits", "--task", "counts", "--max-points", "6"),
    "winnow expression": lambda: command_line(
        "y", "--kernel", "rbf[x] + linear[town]", "--max-points", "8"
    ),
    # Models and schedules of the library.
    "SparseGP Fast": lambda: sparse_model(FastSchedule(Tolerance(0.05), n_candidates=40)),
    "SparseGP Fast own candidates": lambda: sparse_model(FastSchedule(FixedAlpha(0.1)), 30),
    "SparseGP Fast default on hills": lambda: fit_numbers(
        fit(SparseGP(ScaleKernel(RBFKernel()), hills().X[::4]), hills())
    ),
    "SparseGP ThreePhases": lambda: sparse_model(PaperSchedule(_prior(15), **PHASES), 15),
    "SparseGP ThreePhases relaxed": lambda: sparse_model(
        PaperSchedule(_prior(15), gradient=Relaxed(), **PHASES), 15
    ),
    "SparseGP ThreePhases leave-one-out": lambda: sparse_model(
        PaperSchedule(
            _prior(15), gradient=ScoreFunction(baseline=LeaveOneOut()), draws=5, **PHASES
        ),
        15,
    ),
    "VariationalGP Fast bernoulli": lambda: variational_model(
        FastSchedule(Tolerance(0.05), n_candidates=30), likelihood=BernoulliLikelihood(), y=Y > 0
    ),
    "VariationalGP Fast softmax": lambda: variational_model(
        FastSchedule(Tolerance(0.05), n_candidates=20),
        likelihood=SoftmaxLikelihood(num_classes=3, mixing_weights=False),
        y=(Y > 0.3) + 1.0 * (X[:, 1] > 3),
    ),
    "VariationalGP ThreePhases negative binomial": lambda: variational_model(
        PaperSchedule(_prior(15), **PHASES), 15, likelihood=NegativeBinomialLikelihood(), y=COUNTS
    ),
    "VariationalGP ThreePhases": lambda: variational_model(
        PaperSchedule(_prior(15), batch_size=40, **PHASES), 15
    ),
    "VariationalGP ThreePhases poisson": lambda: variational_model(
        PaperSchedule(_prior(15), **PHASES), 15, likelihood=PoissonLikelihood(), y=COUNTS
    ),
    "DeepGP DeepFast": lambda: deep_model(
        FastSchedule(Tolerance(0.05), deep=DeepTraining(**LAYERS))
    ),
    "DeepGP DeepFast budget": lambda: deep_model(
        FastSchedule(MaxCost(40), deep=DeepTraining(batch_size=50, samples=2, **LAYERS)),
        skip_connections=True,
    ),
    "DeepGP DeepFast alphas": lambda: deep_model(
        FastSchedule(FixedAlpha((0.1, 0.3)), deep=DeepTraining(**LAYERS)), hidden_mean="identity"
    ),
    "DeepGP DeepThreePhases": lambda: deep_model(PaperSchedule(0.1, joint=20, **LAYERS)),
    "DeepGP DeepThreePhases minibatches": lambda: deep_model(
        PaperSchedule((0.1, 0.2), joint=20, batch_size=50, draws=3, **LAYERS), skip_connections=True
    ),
    "LatentVariableGP FastLatent": lambda: latent_model(
        FastSchedule(Tolerance(0.02), n_candidates=20, iterations=30)
    ),
    "LatentVariableGP FastLatent missing": lambda: latent_model(
        FastSchedule(MaxPoints(6), n_candidates=20, iterations=30), table=HOLED
    ),
    "LatentVariableGP JointLatent": lambda: latent_model(PaperSchedule(_prior(12), joint=20), 12),
    "SampledLatentGP JointLatent": lambda: sampled_model(PaperSchedule(_prior(12), joint=20), 12),
    "SampledLatentGP JointLatent counts": lambda: sampled_model(
        PaperSchedule(_prior(12), joint=40, batch_size=20, draws=3), 12, counts=True
    ),
    # Integrations.
    "GPyTorch winnow gaussian": lambda: gpytorch_model(GaussianLikelihood(), Y),
    "GPyTorch winnow bernoulli": lambda: gpytorch_model(
        BernoulliLikelihood(), (Y > 0).astype(float), max_points=8
    ),
    "GPyTorch to_gpytorch": to_gpytorch,
    "BoTorch allocator targets": lambda: botorch_allocation(with_targets=True),
    "BoTorch allocator prior": lambda: botorch_allocation(with_targets=False, tolerance=0.05),
    "BoTorch FittedGP": botorch_posterior,
}
