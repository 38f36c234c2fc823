import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch import kernels
from gpytorch.kernels import Kernel
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from torch import Tensor

import winnowgp
from helpers.short_fits import short_fits, shortest_fits
from winnowgp import GPLVM, DeepGPRegressor, SparseGP, SparseGPRegressor
from winnowgp.cli.app import run
from winnowgp.errors import InputError
from winnowgp.estimators.kernels import KERNEL_NAMES, KernelExpression, kernel_from, parse_kernel
from winnowgp.models.kernels import covariance, prior_variance
from winnowgp.tabular import export_numpy

A = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).double()
B = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).double()


def plain(name: str, a: Tensor, b: Tensor) -> Tensor:
    """One pair of rows at hyper-parameters of 1, from the definition."""
    r = float((a - b).norm())
    if name == "periodic":
        return torch.exp(-2 * torch.sin(torch.pi * (a - b)).square().sum())
    found = {
        "rbf": np.exp(-(r**2) / 2),
        "matern12": np.exp(-r),
        "matern32": (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r),
        "matern52": (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r),
        "rq": 1 / (1 + r**2 / 2),
        "linear": float(a @ b),
        "constant": 1.0,
    }
    return torch.tensor(found[name]).double()


def table(name: str, columns: list[int]) -> Tensor:
    rows = [[plain(name, a[columns], b[columns]) for b in B] for a in A]
    return torch.tensor(rows).double()


def evaluated(expression: str | KernelExpression) -> Tensor:
    kernel = kernel_from(expression, 4).double()
    with torch.no_grad():
        diagonal = covariance(kernel, A, A).diagonal()
        torch.testing.assert_close(prior_variance(kernel, A), diagonal, atol=1e-6, rtol=1e-6)
        return covariance(kernel, A, B)


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_names(name: str) -> None:
    every = table(name, [0, 1, 2, 3])
    torch.testing.assert_close(evaluated(name), every, atol=1e-6, rtol=1e-6)
    some = table(name, [1, 3])
    torch.testing.assert_close(evaluated(f"{name}[1, -1]"), some, atol=1e-6, rtol=1e-6)


ALL = [0, 1, 2, 3]
EXPRESSIONS = {
    "rbf + linear": lambda: table("rbf", ALL) + table("linear", ALL),
    "rbf * linear": lambda: table("rbf", ALL) * table("linear", ALL),
    "rbf[0, 1] * matern52[2:] + linear": lambda: (
        table("rbf", [0, 1]) * table("matern52", [2, 3]) + table("linear", ALL)
    ),
    "(rbf[:2] + linear) * periodic[3]": lambda: (
        (table("rbf", [0, 1]) + table("linear", ALL)) * table("periodic", [3])
    ),
    "rq[::2] * rbf[1] * constant": lambda: table("rq", [0, 2]) * table("rbf", [1]),
    "rbf[b, 'c d'] + constant": lambda: table("rbf", [1, 2]) + 1,
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_sums_products_and_columns(text: str) -> None:
    columns = {"a": [0], "b": [1], "c d": [2], "e": [3]}
    expression = parse_kernel(text, 4, columns=columns)
    torch.testing.assert_close(evaluated(expression), EXPRESSIONS[text](), atol=1e-6, rtol=1e-6)
    assert parse_kernel(str(expression), 4) == expression


def scales(kernel: Kernel) -> int:
    return sum("outputscale" in name for name, _ in kernel.named_parameters())


def test_every_term_has_one_variance() -> None:
    counts = {
        "rbf": 1,
        "rbf * periodic": 1,
        "rbf + periodic": 2,
        "linear": 0,
        "rbf + linear": 1,
        "rbf * linear": 0,
        "(rbf + rq) * periodic": 2,
    }
    assert {text: scales(kernel_from(text, 2)) for text in counts} == counts


def test_period_is_in_units_of_its_column() -> None:
    made: Any = kernel_from("periodic[1](period=12)", 3, scale=torch.tensor([1.0, 4.0, 9.0]))
    assert made.base_kernel.period_length.item() == pytest.approx(3.0, rel=1e-6)
    same: Any = kernel_from("periodic(period=12)[1]", 3, scale=torch.tensor([1.0, 4.0, 9.0]))
    assert same.base_kernel.period_length.item() == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be parsed"),
        ("rbf +", r"cannot be parsed at the end of 'rbf \+'"),
        ("rbf + (", r"cannot be parsed at character 7 of 'rbf \+ \('"),
        ("", "cannot be parsed at the end of ''"),
        ("  rbf rbf", "cannot be parsed at character 5 of 'rbf rbf'"),
        ("(rbf +\n  rbff)", "'rbff' at character 10 of"),
        ("(rbf +\n * rbf)", "cannot be parsed at character 9 of"),
        ("rbf\0", r"cannot be parsed\.$"),
        ("rbff", "'rbff' at character 1 of 'rbff': the kernels are rbf, matern12"),
        ("rbf + rbff", "'rbff' at character 7 of"),
        ("rbf - linear", "only \\+ and \\* combine"),
        ("2 * rbf", "a number is not a kernel"),
        ("rbf[4]", "'4' at character 5 of .*: there are 4 columns, 0 to 3"),
        ("rbf[2:2]", "none of the 4 columns"),
        ("rbf[::0]", "step of 0"),
        ("rbf[1.5]", "columns are integers"),
        ("rbf[True]", "columns are integers"),
        ("rbf['age']", "names only if `X` is a data frame"),
        ("rbf[0][1]", "give the columns only once"),
        ("rbf(0)", "columns are in brackets"),
        ("periodic(period=-1)", "take a period"),
        ("periodic(period=1e400)", "take a period"),
        (f"periodic(period=1{400 * '0'})", "take a period"),
        ("periodic(period=2)(period=2)", "give the settings only once"),
        ("rbf(period=2)", "only a periodic kernel"),
        ("periodic(period=2)", "a period is in the units"),
        ("__import__('os')", "columns are in brackets"),
        ("rbf.__class__", "the kernels are"),
        ("rbf if rbf else rbf", "the kernels are"),
        ("(" * 300 + "rbf" + ")" * 300, "cannot be parsed"),
        (3, "`kernel` must be one of"),
    ],
)
def test_invalid_kernel_is_refused_with_its_position(text: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        kernel_from(text, 4)


def months(N: int = 90) -> tuple[pd.DataFrame, np.ndarray]:
    """A season on a trend, and a column of another kind."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"month": np.arange(N, dtype=float), "size": rng.normal(size=N)})
    month, size = frame["month"].to_numpy(), frame["size"].to_numpy()
    y = np.sin(2 * np.pi * month / 12) + 0.02 * month + 0.3 * size
    return frame, y + 0.05 * rng.normal(size=N)


def seasons(**arguments: Any) -> SparseGPRegressor:
    text = "periodic[month](period=12) + linear"
    return SparseGPRegressor(text, n_candidates=30, random_state=0, **arguments)


@pytest.fixture(scope="module")
def fitted() -> SparseGPRegressor:
    X, y = months()
    with shortest_fits():
        return seasons().fit(X[:72], y[:72])


@pytest.mark.filterwarnings("ignore::winnowgp.errors.FitWarning")
@pytest.mark.usefixtures("quickly")
def test_periodic_kernel_extrapolates_a_season_on_a_trend(
    fitted: SparseGPRegressor, tmp_path: Path
) -> None:
    X, y = months()
    ahead = fitted.score(X[72:], y[72:])
    smooth = SparseGPRegressor("rbf", n_candidates=30, random_state=0).fit(X[:72], y[:72])
    assert ahead > 0.95 > smooth.score(X[72:], y[72:])
    assert "periodic[month]" in repr(clone(fitted))
    back = winnowgp.load(fitted.save(tmp_path / "season.winnow"))
    np.testing.assert_allclose(back.predict(X), fitted.predict(X), rtol=1e-8)
    program = runpy.run_path(str(export_numpy(fitted, tmp_path / "season.py")))
    mean = program["predict"](X.to_numpy())["mean"]
    np.testing.assert_allclose(mean, fitted.predict(X), atol=1e-8)


def test_unknown_column_names_are_refused() -> None:
    X, y = months(20)
    with pytest.raises(InputError, match="no column has this name; the first are 'm', 'size'"):
        seasons().fit(X.rename(columns={"month": "m"}), y)
    with pytest.raises(InputError, match="names only if `X` is a data frame"):
        seasons().fit(X.to_numpy(), y)


@pytest.mark.slow
def test_grid_search_over_kernels() -> None:
    X = np.random.default_rng(0).uniform(-2, 2, size=(40, 2))
    model = SparseGPRegressor(
        schedule="paper", alpha=0.01, n_candidates=10, epochs=(60, 5, 20), random_state=0
    )
    grid = {"kernel": ["rbf[1]", "rbf[0] + constant"]}
    search = GridSearchCV(model, grid, cv=2).fit(X, np.sin(X[:, 0]))
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert search.best_params_["kernel"] == "rbf[0] + constant"


@pytest.mark.slow
def test_deep_kernels_select_columns() -> None:
    X, y = months(30)
    model = DeepGPRegressor(
        kernel=("rbf[0] * rbf[1] + linear", "rbf"),
        n_candidates=6,
        epochs=(5, 10, 10),
        hidden_mean="identity",
        random_state=0,
    )
    assert np.isfinite(model.fit(X, y).elbo_)
    with pytest.raises(InputError, match="a period is in the units"):
        model.set_params(kernel="periodic(period=2)").fit(X, y)


def test_command_line_accepts_column_names_in_kernels(tmp_path: Path) -> None:
    X, y = months(40)
    kind = np.where(np.arange(40) % 2, "a", "b")
    X.assign(kind=kind, y=y).to_csv(tmp_path / "t.csv", index=False)
    model, kernel = str(tmp_path / "m.winnow"), "rbf[month] + linear[kind, size]"
    words = ["fit", str(tmp_path / "t.csv"), "-t", "y", "-o", model, "--quiet"]
    with short_fits(sizes=1):
        assert run([*words, "--kernel", kernel]) == 0
    found = winnowgp.load(model)
    assert found.summary["kernel"] == kernel
    assert found.estimator.kernel == "rbf[0] + linear[1, 2, 3]"
    assert found.summary["choice"]["kernel"] == "rbf[month] + linear[size, kind]"
    smaller = found.resized(found.estimator.available_sizes_[0])
    assert smaller.summary["choice"]["kernel"] == "rbf[month] + linear[size, kind]"
    assert run([*words, "--kernel", "rbf[year]"]) == 2


def test_kernel_is_written_with_the_names_of_columns() -> None:
    columns = {"hour": [0], "wind [m/s]": [1], "town": [2, 3]}
    written = parse_kernel("matern52[0] * (rbf[1:] + linear[1, 2])", 4)
    assert (
        written.text(columns)
        == "matern52[hour] * (rbf['wind [m/s]', town] + linear['wind [m/s]', 2])"
    )
    assert parse_kernel(written.text(columns), 4, columns=columns) == written
    periods = "periodic[hour](period=24) + periodic(period=0.5)"
    assert parse_kernel(periods, 4, columns=columns).text(columns) == periods


def test_positions_are_counted_in_characters() -> None:
    """Python's grammar counts bytes, of which an umlaut has two."""
    with pytest.raises(InputError, match="'rbff' at character 12 of"):
        parse_kernel("rbf['ä'] + rbff", 2, columns={"ä": [0]})


TERMS = ["rbf", "matern52", "periodic", "periodic(period=2)", "rq", "(rbf[0] * linear[1])"]


@pytest.mark.parametrize("term", TERMS)
def test_equal_terms_of_a_sum_start_apart(term: str) -> None:
    kernel: Any = kernel_from(f"{term} + {term} + linear", 2, scale=torch.ones(2))
    first, second, _ = (covariance(k, A[:, :2], A[:, :2]) for k in kernel.kernels)
    assert not torch.allclose(first, second, rtol=0.1)
    if "period=" in term:
        periods = [k.base_kernel.period_length for k in list(kernel.kernels)[:2]]
        assert torch.equal(*periods)
    again = covariance(kernel_from(kernel, 2), A[:, :2], B[:, :2])
    assert torch.equal(covariance(kernel, A[:, :2], B[:, :2]), again)


def test_different_terms_of_a_sum_start_at_one() -> None:
    kernel: Any = kernel_from("rbf[0] + rbf[1] + periodic", 2)
    assert [k.base_kernel.lengthscale.unique().tolist() for k in kernel.kernels] == [[1]] * 3


def test_equal_terms_of_a_gpytorch_product_start_apart() -> None:
    given: Any = kernels.PeriodicKernel() * kernels.PeriodicKernel()
    apart: Any = kernel_from(given, 1)
    first, second = apart.kernels
    assert 0 < second.period_length < 0.5 * first.period_length
    # The user's kernel is not changed.
    assert torch.equal(*(k.period_length for k in given.kernels))


@pytest.mark.usefixtures("one_size")
def test_equal_terms_learn_two_scales() -> None:
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0, 6, (60, 1)), axis=0)
    y = 2 * np.sin(0.5 * X[:, 0]) + 0.5 * np.sin(9 * X[:, 0]) + 0.1 * rng.normal(size=60)
    one, two = list[Any](
        SparseGPRegressor(kernel, inducing_points=X[::3], hyper="point").fit(X, y)
        for kernel in ("rbf", "rbf + rbf")
    )
    slow, fast = sorted(k.base_kernel.lengthscale.item() for k in two.kernel_.kernels)[::-1]
    assert slow > 5 * fast
    assert two.evidence_.lower > one.evidence_.lower + 5


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (kernels.MultitaskKernel(kernels.RBFKernel(), num_tasks=2), "MultitaskKernel.*one output"),
        (kernels.LCMKernel([kernels.RBFKernel()], num_tasks=2), "LCMKernel"),
        (
            kernels.IndexKernel(num_tasks=3, active_dims=(1,))
            * kernels.RBFKernel(active_dims=(0,)),
            "IndexKernel.*indicator column",
        ),
        (kernels.RBFKernelGrad(), "RBFKernelGrad.*observed gradients"),
        (kernels.RBFKernel(batch_shape=torch.Size([2])), "RBFKernel with .2.*for each output"),
    ],
)
@pytest.mark.parametrize("kind", [SparseGPRegressor, DeepGPRegressor, GPLVM])
def test_kernel_of_another_kind_of_model_is_refused_by_name(
    kind: Any, kernel: Kernel, message: str
) -> None:
    data = (A.numpy(),) if kind is GPLVM else (A[:, :2].numpy(), A[:, 2].numpy())
    with pytest.raises(InputError, match=message):
        kind(kernel=kernel).fit(*data)


def test_sparse_gp_with_a_kernel_of_several_outputs_is_refused() -> None:
    kernel = kernels.MultitaskKernel(kernels.RBFKernel(), num_tasks=2)
    with pytest.raises(InputError, match=r"MultitaskKernel gives \[2, 2\]"):
        SparseGP(kernel, A)
