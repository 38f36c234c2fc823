"""Exported predictors agree with `predict`."""

import functools
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from gpytorch import kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from helpers.short_fits import short_fits, short_process_fits, shortest_fits
from winnowgp import (
    AdditiveGPRegressor,
    DataTable,
    MultiFidelityGPRegressor,
    MultiOutputGPRegressor,
    SparseGPClassifier,
    SparseGPRegressor,
    TabularModel,
    fit_table,
)
from winnowgp.errors import InputError, NotSaveableError
from winnowgp.tabular import export_numpy, export_onnx, fit_outputs_table

rng = np.random.default_rng(2)
X = rng.uniform(0, 6, (70, 3)) * [1, 10, 0.1] + [0, 1000, 0]
y = np.sin(X[:, 0]) + 0.1 * X[:, 2] + 0.1 * rng.normal(size=70)
NEW = rng.uniform(-1, 7, (40, 3)) * [1, 10, 0.1] + [0, 1000, 0]
COUNTS = rng.poisson(np.exp(1 + y))
QUICK: dict[str, Any] = {
    "schedule": "paper",
    "alpha": 0.01,
    "epochs": (20, 5, 10),
    "n_candidates": 12,
    "random_state": 0,
}
Outputs = dict[str, NDArray[np.float64]]
# Models that both runtimes are compared with are fitted once.
fitted_once = functools.cache


def by_onnx(model: Any, folder: Path, data: Any) -> Outputs:
    path = export_onnx(model, folder / "model.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = data if isinstance(data, dict) else {"X": data}
    names = [output.name for output in session.get_outputs()]
    values = [np.asarray(value) for value in session.run(None, feed)]
    return dict(zip(names, values, strict=True))


def by_numpy(model: Any, folder: Path, data: Any) -> Outputs:
    path = export_numpy(model, folder / "model.py")
    return runpy.run_path(str(path))["predict"](data)


RUNTIMES: dict[str, Callable[[Any, Path, Any], Outputs]] = {"onnx": by_onnx, "numpy": by_numpy}
K = kernels
KERNELS: dict[str, Any] = {
    "rbf": "rbf",
    "matern12": "matern12",
    "matern32": "matern32",
    "matern52": "matern52",
    "rq": K.ScaleKernel(K.RQKernel(ard_num_dims=3)),
    "periodic": K.ScaleKernel(K.PeriodicKernel(ard_num_dims=3)),
    "sum": K.ScaleKernel(K.RBFKernel(active_dims=(2, 0))) + K.LinearKernel() + K.ConstantKernel(),
    "product": K.RBFKernel() * K.PeriodicKernel(active_dims=(0,))
    + K.LinearKernel(active_dims=(1,)),
}


@fitted_once
def of_kernel(kernel: str) -> SparseGPRegressor:
    return SparseGPRegressor(KERNELS[kernel], **QUICK).fit(X, y)


@fitted_once
def of_likelihood(likelihood: str) -> SparseGPRegressor:
    targets = COUNTS if likelihood == "poisson" else np.stack([y, 3 * y + 7], 1)
    return SparseGPRegressor(likelihood=likelihood, **QUICK).fit(X, targets)


@fitted_once
def of_classes(classes: int) -> SparseGPClassifier:
    labels = np.where(y > 0.5, "up", np.where(y > -0.3, "mid" if classes == 3 else "low", "low"))
    return SparseGPClassifier(**QUICK).fit(X, labels)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_export_agrees_with_predict_for_each_kernel(
    kernel: str, runtime: str, tmp_path: Path
) -> None:
    model = of_kernel(kernel)
    mean, sd = model.predict(NEW, return_std=True)
    outputs = RUNTIMES[runtime](model, tmp_path, NEW)
    np.testing.assert_allclose(outputs["mean"], mean, atol=1e-9 * mean.std())
    np.testing.assert_allclose(outputs["variance"], sd**2, rtol=1e-8)


# One candidate is all of them.
@pytest.mark.filterwarnings("ignore::winnowgp.errors.AllCandidatesWarning")
@pytest.mark.parametrize(("D", "M"), [(1, 6), (2, 1), (1, 1)])
def test_onnx_is_in_double_precision_with_one_input_or_point(
    D: int, M: int, tmp_path: Path
) -> None:
    """Where rows of factors have one number, and onnxruntime would fuse them."""
    model = SparseGPRegressor("periodic", **{**QUICK, "alpha": 1e-9, "n_candidates": M}).fit(
        X[:, :D], y
    )
    assert (model.n_inducing_ == 1) == (M == 1)
    mean, sd = model.predict(NEW[:, :D], return_std=True)
    outputs = by_onnx(model, tmp_path, NEW[:, :D])
    np.testing.assert_allclose(outputs["mean"], mean, atol=1e-9 * float(np.std(y)))
    np.testing.assert_allclose(outputs["variance"], sd**2, rtol=1e-9)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("likelihood", ["gaussian", "student-t", "laplace", "poisson"])
def test_export_agrees_with_predict_for_each_likelihood(
    likelihood: str, runtime: str, tmp_path: Path
) -> None:
    model = of_likelihood(likelihood)
    mean, sd = model.predict(NEW, return_std=True)
    outputs = RUNTIMES[runtime](model, tmp_path, NEW)
    assert outputs["mean"].shape == mean.shape
    np.testing.assert_allclose(outputs["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(outputs["variance"], sd**2, rtol=1e-5)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_export_of_log_target_is_log_normal(runtime: str, tmp_path: Path) -> None:
    model = SparseGPRegressor(log_target=True, **QUICK).fit(X, np.exp(y))
    mean, sd = model.predict(NEW, return_std=True)
    outputs = RUNTIMES[runtime](model, tmp_path, NEW)
    np.testing.assert_allclose(outputs["mean"], mean, rtol=1e-8)
    np.testing.assert_allclose(outputs["variance"], sd**2, rtol=1e-7)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("classes", [2, 3])
def test_export_agrees_with_predict_proba(classes: int, runtime: str, tmp_path: Path) -> None:
    model = of_classes(classes)
    outputs = RUNTIMES[runtime](model, tmp_path, NEW)
    np.testing.assert_allclose(outputs["probabilities"], model.predict_proba(NEW), atol=1e-6)
    assert model.predict_proba(NEW).std(0).max() > 0.05


EVIL = '"""\nraise SystemExit("evil")\n"""'


@pytest.fixture(scope="module")
def tabular() -> tuple[TabularModel, DataTable]:
    N = 50
    x = np.where(np.arange(N) % 9 == 4, np.nan, X[:N, 0])
    town = np.array(["Oslo", EVIL, "São Paulo"], dtype=object)[np.arange(N) % 3]
    day = [f"2024-01-{1 + i % 28:02d}" for i in range(N)]
    table = DataTable.of({EVIL: x, "v0": town, "c0": day, "y": y[:N]})
    with shortest_fits():
        return fit_table(table, "y", missing="impute", tolerance=0.5, test_size=0), table


STRINGS = np.array(["NA", "paved", "null"] * 8, dtype=object)


@pytest.fixture(scope="module")
def na_model() -> TabularModel:
    """A model with a column in which NA and null are categories."""
    table = DataTable.of({"w": STRINGS, "y": 1.0 * (STRINGS == "NA")})
    options: dict[str, Any] = {"kernel": "rbf", "max_points": 3, "task": "regression"}
    with short_fits():
        return fit_table(table, "y", categorical=("w",), test_size=0, **options)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_export_knows_na_as_a_category(
    runtime: str, na_model: TabularModel, tmp_path: Path
) -> None:
    outputs = RUNTIMES[runtime](na_model, tmp_path, {"w": STRINGS[:3]})
    expected = na_model.predict({"w": STRINGS[:3]})["mean"]
    np.testing.assert_allclose(outputs["mean"], expected, atol=1e-6)
    assert expected[0] > 0.9


# Some categories are not in the training rows.
@pytest.mark.filterwarnings("ignore::winnowgp.errors.ExtrapolationWarning")
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_export_includes_preprocessing(
    runtime: str, tabular: tuple[TabularModel, DataTable], tmp_path: Path
) -> None:
    """Missing numbers, unknown and missing categories, dates, and column names with quotes."""
    model, table = tabular
    later = table.part(np.arange(20))
    words = later.values["v0"].copy()
    words[0], words[1] = "Paris", None
    later = DataTable({**later.values, "v0": words})
    data: dict[str, Any] = {
        c.name: np.array([w or "" for w in later.strings(c.name)], dtype=object)
        if c.kind == "category"
        else c.values(later)
        for c in model.encoder.columns
    }
    outputs = RUNTIMES[runtime](model, tmp_path, data)
    expected = model.predict(later)
    np.testing.assert_allclose(outputs["mean"], expected["mean"], rtol=1e-5)
    np.testing.assert_allclose(np.sqrt(outputs["variance"]), expected["sd"], rtol=1e-5)


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> tuple[TabularModel, Any]:
    """Return a model of a column of dates, and its exported `predict`."""
    dates = np.datetime64("2024-01-01") + np.arange(60)
    table = DataTable.of({"when": dates.astype(str), "y": np.sin(np.arange(60.0) / 8)})
    with shortest_fits():
        model = fit_table(table, "y", missing="impute", test_size=0, tolerance=0.1, kernel="rbf")
    path = export_numpy(model, tmp_path_factory.mktemp("dated") / "model.py")
    return model, runpy.run_path(str(path))["predict"]


_MOMENTS = ["2024-02-01T06:00:00", "2024-01-05T00:00:00", "NaT"]


@pytest.mark.parametrize(
    "dates",
    [
        *(np.array(_MOMENTS, dtype=f"datetime64[{unit}]") for unit in ("h", "s", "us", "ns")),
        [*_MOMENTS[:2], ""],
        [*_MOMENTS[:2], None],
        np.array([*_MOMENTS[:2], float("nan")], dtype=object),
        [datetime(2024, 2, 1, 6), datetime(2024, 1, 5, tzinfo=UTC), None],
        ["2024-02-01 07:00+01:00", date(2024, 1, 5), None],
        [19754.25, 19727, float("nan")],
        [19754.25, 19727, None],
    ],
    ids=str,
)
def test_exported_numpy_dates_of_any_kind_predict_as_the_table(
    dated: tuple[TabularModel, Any], dates: Any
) -> None:
    model, predict = dated
    expected = model.predict({"when": np.array([*_MOMENTS[:2], None], dtype=object)})["mean"]
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(predict({"when": dates})["mean"], expected, rtol=1e-9)


@pytest.mark.parametrize("dates", [["03/04/2024"], np.array([["2024-02-01"]])], ids=str)
def test_exported_numpy_other_dates_raise(dated: tuple[TabularModel, Any], dates: Any) -> None:
    with pytest.raises(ValueError, match=r"isoformat|expected numbers"):
        dated[1]({"when": dates})


def test_exported_numpy_dates_for_numbers_raise(
    tabular: tuple[TabularModel, DataTable], tmp_path: Path
) -> None:
    """NumPy would count the units since 1970."""
    model, table = tabular
    data: dict[str, Any] = {c.name: table.values[c.name] for c in model.encoder.columns}
    number = next(c.name for c in model.encoder.columns if c.kind == "number")
    data[number] = np.full(table.N, np.datetime64("2024-01-01", "ns"))
    predict = runpy.run_path(str(export_numpy(model, tmp_path / "model.py")))["predict"]
    with pytest.raises(ValueError, match="expected numbers; got dates"):
        predict(data)


def test_exported_numpy_docstring_lists_classes_and_dates(
    dated: tuple[TabularModel, Any], tmp_path: Path
) -> None:
    text = export_numpy(dated[0], tmp_path / "model.py").read_text("utf-8")
    assert '\ndates: ["when"], which are datetimes' in text


ODD = [
    " up\t",
    "UP",
    "Up",
    "up",
    "\u3000up",
    "up\0",
    "na",
    " N/A ",
    "NaN",
    "",
    "1",
    "1.0",
    "01",
    "true",
]
_CATEGORY = st.one_of(
    st.sampled_from(ODD),
    st.text(max_size=3),
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(2**53 - 1, 2**54),
    st.floats(width=32),
    st.sampled_from([1.0, 0.1, -0.0]),
)


@pytest.fixture(scope="module")
def categorical(tmp_path_factory: pytest.TempPathFactory) -> tuple[TabularModel, Any]:
    """Return a model of a column of similar categories, and its exported `predict`."""
    words = np.array(["up", "Up", "1", "0.1", "true", "True", "up\0", "-1"] * 6, dtype=object)
    table = DataTable({"w": words, "y": np.arange(48.0) % 8 + 0.5 * np.sin(np.arange(48.0))})
    with shortest_fits():
        model = fit_table(table, "y", missing="impute", test_size=0, tolerance=0.1, kernel="rbf")
    path = export_numpy(model, tmp_path_factory.mktemp("categorical") / "model.py")
    return model, runpy.run_path(str(path))["predict"]


# Some categories are not in the training rows.
@pytest.mark.filterwarnings("ignore::winnowgp.errors.ExtrapolationWarning")
@pytest.mark.parametrize("container", ["list", "objects", "array"])
@settings(max_examples=60, deadline=None)
@given(words=st.lists(_CATEGORY, min_size=1, max_size=6))
def test_export_reads_categories_as_predict_does(
    container: str, words: list[Any], categorical: tuple[TabularModel, Any]
) -> None:
    """Blanks, case, missing values, numbers and Booleans, alone and mixed."""
    model, predict = categorical
    column: Any = words
    if container == "objects":
        column = np.empty(len(words), dtype=object)
        column[:] = words
    elif container == "array":
        column = np.array(words)
    expected = model.predict(DataTable.of({"w": column}))
    np.testing.assert_allclose(predict({"w": column})["mean"], expected["mean"], rtol=1e-6)


def test_export_predictions_differ_between_categories(
    categorical: tuple[TabularModel, Any],
) -> None:
    """Otherwise the test above would pass whatever was read."""
    _, predict = categorical
    words = np.empty(8, dtype=object)
    words[:] = ["up", "Up", "1", "0.1", "true", "True", "up\0", "-1"]
    # One of eight indicators is redundant. A fit may ignore it, and then predicts an unseen
    # category as that one.
    assert len(np.unique(predict({"w": words})["mean"].round(3))) == 8


def test_export_numpy_needs_only_numpy_for_any_number_of_rows(tmp_path: Path) -> None:
    model = SparseGPRegressor(**QUICK).fit(X, y)
    export_numpy(model, tmp_path / "small.py")
    many = np.tile(NEW, (250, 1))  # more than one chunk
    np.save(tmp_path / "many.npy", many)
    code = (
        "import sys, numpy as np\nfrom small import predict\n"
        "for n in (0, 1, 10_000): print(predict(np.load('many.npy')[:n])['mean'][-1:].tolist())\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'winnowgp', 'scipy'}))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    none, one, all_rows, modules = result.stdout.splitlines()
    assert (none, modules) == ("[]", "[]")
    assert json.loads(one) == pytest.approx(model.predict(NEW[:1]), rel=1e-6)
    assert json.loads(all_rows) == pytest.approx(model.predict(NEW[-1:]), rel=1e-6)


def test_export_of_an_unsupported_kernel_names_it(tmp_path: Path) -> None:
    model = SparseGPRegressor(K.PolynomialKernel(power=2), **QUICK).fit(X, y)
    with pytest.raises(NotSaveableError, match="PolynomialKernel cannot be exported"):
        export_numpy(model, tmp_path / "a.py")
    counts = np.stack([np.round(np.exp(y))] * 2, 1)
    several = SparseGPRegressor(likelihood="poisson", **QUICK).fit(X, counts)
    with pytest.raises(InputError, match="one target only"):
        export_numpy(several, tmp_path / "a.py")
    assert list(tmp_path.iterdir()) == []


def test_export_onnx_of_a_column_named_like_an_output_is_refused(tmp_path: Path) -> None:
    table = DataTable.of({"mean": X[:30, 0], "y": y[:30]})
    with shortest_fits():
        model = fit_table(table, "y", tolerance=1.0)
    with pytest.raises(InputError, match="rename the column"):
        export_onnx(model, tmp_path / "a.onnx")


@fitted_once
def several_targets(kind: str) -> Any:
    with short_process_fits():
        return _several_targets(kind)


def _several_targets(kind: str) -> Any:
    settings: dict[str, Any] = {"random_state": 0, "tolerance": 0.1, "n_candidates": 12}
    waves = np.column_stack([y, X[:, 2], np.cos(X[:, 0])])
    if kind == "gaussian":
        waves[::6, 1] = np.nan
        return MultiOutputGPRegressor(n_latents=2, kernel="matern52", **settings).fit(X, waves)
    if kind == "likelihoods":
        kinds = np.column_stack([y, COUNTS, y > 0])
        likelihood = ["student-t", "poisson", "bernoulli"]
        model = MultiOutputGPRegressor(n_latents=1, likelihood=likelihood, **settings)
        return model.fit(X, kinds)
    kernel = "rbf[0] + linear + periodic[1](period=3)"
    return AdditiveGPRegressor(kernel=kernel, **settings).fit(X, y)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kind", ["gaussian", "likelihoods", "effects"])
def test_exported_processes_predict_the_same(kind: str, runtime: str, tmp_path: Path) -> None:
    model = several_targets(kind)
    outputs = RUNTIMES[runtime](model, tmp_path, NEW)
    mean, sd = model.predict(NEW, return_std=True)
    assert outputs["mean"].shape == mean.shape
    np.testing.assert_allclose(outputs["mean"], mean, rtol=1e-7, atol=1e-7)
    # onnxruntime computes the error function of probabilities in single precision.
    atol = 1e-6 if kind == "likelihoods" else 1e-9
    np.testing.assert_allclose(outputs["variance"], sd**2, rtol=1e-7, atol=atol)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_exported_table_of_several_targets_predicts_the_same(runtime: str, tmp_path: Path) -> None:
    columns = {"x": X[:, 0], "kind": np.where(X[:, 2] > 0.3, "b", "a"), "p": y, "q": 1 - 2 * y}
    model = fit_outputs_table(columns, ["p", "q"], n_latents=1, tolerance=0.1)
    new = {"x": NEW[:, 0], "kind": np.where(NEW[:, 2] > 0.3, "b", "a").astype(object)}
    outputs, expected = RUNTIMES[runtime](model, tmp_path, new), model.predict(new)
    for number, name in enumerate(model.targets):
        mean = expected[f"{name}_mean"]
        np.testing.assert_allclose(outputs["mean"][:, number], mean, rtol=1e-7, atol=1e-7)


@fitted_once
def several_fidelities(relation: str) -> MultiFidelityGPRegressor:
    levels = np.array([0.1, 0.7, 3.0])[np.arange(70) % 3]
    rows = np.column_stack([X[:, 0], levels, X[:, 2]])
    model = MultiFidelityGPRegressor(
        fidelity=1, relation=relation, tolerance=0.1, n_candidates=30, random_state=0
    )
    with short_process_fits():
        return model.fit(rows, y * (1 + levels) + X[:, 2])


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("relation", ["linear", "nonlinear"])
def test_exported_fidelities_predict_the_same(relation: str, runtime: str, tmp_path: Path) -> None:
    model = several_fidelities(relation)
    new = np.column_stack([NEW[:, 0], np.array([0.1, 0.7, 3.0])[np.arange(40) % 3], NEW[:, 2]])
    mean, sd = model.predict(new, return_std=True)
    unknown = np.concatenate([new, [[1.0, 0.5, 0.1]]])
    outputs = RUNTIMES[runtime](model, tmp_path, unknown)
    np.testing.assert_allclose(outputs["mean"][:40], mean, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(outputs["variance"][:40], sd**2, rtol=1e-6)
    # `predict` refuses a fidelity that the model does not know.
    assert np.isnan([outputs["mean"][40], outputs["variance"][40]]).all()


@fitted_once
def boxes(kernel: str) -> MultiOutputGPRegressor:
    rows = np.column_stack([X[:25, 0], np.arange(25) % 3 * 0.4])
    model = MultiOutputGPRegressor(
        widths=[1], n_latents=1, kernel=kernel, tolerance=0.5, n_candidates=6, random_state=0
    )
    with short_process_fits():
        return model.fit(rows, np.column_stack([y, 1 - 2 * y])[:25])


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("kernel", ["matern32", "rbf * linear + periodic(period=3)"])
def test_exported_averages_over_boxes_predict_the_same(
    kernel: str, runtime: str, tmp_path: Path
) -> None:
    model = boxes(kernel)
    new = np.column_stack([NEW[:, 0], np.arange(40) % 4 * 0.3])
    mean, sd = model.predict(new, return_std=True)
    outputs = RUNTIMES[runtime](model, tmp_path, new)
    np.testing.assert_allclose(outputs["mean"], mean, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(outputs["variance"], sd**2, rtol=1e-6)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_exported_proportions_and_counts_predict_the_same(runtime: str, tmp_path: Path) -> None:
    model = proportions_and_counts()
    mean, sd = model.predict(NEW, return_std=True)
    outputs = RUNTIMES[runtime](model, tmp_path, NEW)
    np.testing.assert_allclose(outputs["mean"], mean, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(outputs["variance"], sd**2, rtol=1e-6)


@fitted_once
def proportions_and_counts() -> MultiOutputGPRegressor:
    targets = np.column_stack([1 / (1 + np.exp(-y)), COUNTS])
    model = MultiOutputGPRegressor(
        n_latents=1,
        likelihood=["beta", "negative-binomial"],
        tolerance=0.3,
        n_candidates=8,
        random_state=0,
    )
    with short_process_fits():
        return model.fit(X, targets)
