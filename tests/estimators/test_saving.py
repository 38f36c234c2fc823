"""Estimators in files, pickles and joblib's dumps."""

import pickle
import random
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, LaplaceLikelihood
from sklearn.base import clone as sklearn_clone
from sklearn.exceptions import NotFittedError

import winnowgp
from helpers.forgery import forged_outline, forged_tensor
from winnowgp import GPLVM, DeepGPClassifier, DeepGPRegressor, SparseGPClassifier, SparseGPRegressor
from winnowgp.errors import ModelFileError
from winnowgp.training import Progress

rng = np.random.default_rng(0)
X = rng.uniform(0, 6, (60, 2))
y = np.sin(X[:, 0]) + 0.1 * rng.normal(size=60)
LABELS: dict[str, Any] = {
    "words": np.where(y > 0, "up", "low"),
    "objects": np.where(y > 0, "up", "low").astype(object),
    "whole numbers": np.where(y > 0, 7, np.where(X[:, 1] > 4, 3, -2)),
    "booleans": y > 0,
}


def clone(model: Any) -> Any:
    """Of one estimator, where scikit-learn's own may be of many."""
    return sklearn_clone(model)


QUICK: dict[str, Any] = {"schedule": "paper", "alpha": 0.1, "epochs": (3, 3, 3), "n_candidates": 6}


def callback(progress: Progress) -> None:
    pass


REGRESSORS = {
    "defaults": SparseGPRegressor(max_points=5, random_state=0),
    "paper": SparseGPRegressor(**QUICK),
    "kernel": SparseGPRegressor(
        ScaleKernel(MaternKernel(nu=1.5)), random_state=np.random.RandomState(3), **QUICK
    ),
    "counts": SparseGPRegressor(likelihood="poisson", callbacks=callback, **QUICK),
    "locations": SparseGPRegressor(candidates=X[:8], tolerance=np.float64(0.1)),
}


def targets(name: str) -> Any:
    if name == "counts":
        return np.round(np.exp(y))
    return np.stack([y, -y], 1) if name == "locations" else y


def same(a: Any, b: Any) -> None:
    """Everything that ends in _, and the arguments but for the watcher."""
    for name in [n for n in vars(a) if n.endswith("_")]:
        ours, theirs = getattr(a, name), getattr(b, name)
        if isinstance(ours, np.ndarray):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype
        elif isinstance(ours, tuple) and isinstance(ours[0], np.ndarray):
            for a_layer, b_layer in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a_layer, b_layer)
        elif ours is None or isinstance(ours, float | int | tuple):
            assert name == "frontiers_" or ours == theirs, name
    assert {n for n in vars(a) if n.endswith("_")} == {n for n in vars(b) if n.endswith("_")}
    for name in ("alpha", "tolerance", "epochs", "schedule", "n_candidates"):
        assert getattr(a, name) == getattr(b, name)


@pytest.mark.parametrize("name", REGRESSORS)
def test_a_regressor_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    model = REGRESSORS[name].fit(X, targets(name))
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    same(model, back)
    for ours, theirs in zip(
        model.predict(X, return_std=True), back.predict(X, return_std=True), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    np.testing.assert_allclose(
        model.log_density(X, targets(name)), back.log_density(X, targets(name)), rtol=1e-10
    )
    if model.frontier_ is not None:
        assert back.frontier_.best_for_alpha(0.1).bound == model.frontier_.best_for_alpha(0.1).bound
    if name == "kernel":
        assert isinstance(back.kernel, ScaleKernel)
        assert isinstance(model.random_state, np.random.RandomState)
        assert back.random_state.randint(1000) == model.random_state.randint(1000)


@pytest.mark.parametrize("name", LABELS)
def test_a_classifier_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    model = SparseGPClassifier(**QUICK).fit(X, LABELS[name])
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    same(model, back)
    np.testing.assert_allclose(model.predict_proba(X), back.predict_proba(X), rtol=1e-12)
    np.testing.assert_array_equal(model.predict(X), back.predict(X))


DEEP: dict[str, Any] = {
    "n_candidates": 6,
    "hidden_mean": "identity",
    "predict_samples": 6,
    "random_state": 0,
    "schedule": "paper",
    "alpha": 0.1,
    "epochs": (2, 3, 3, 3),
}
FAST: dict[str, Any] = DEEP | {
    "schedule": "fast",
    "alpha": "auto",
    "epochs": (2, 2, 2),
    "n_candidates": 4,
    "max_cost": np.float32(20),
}
LAYERS: dict[str, Any] = DEEP | {"alpha": (0.1, 0.2, 0.3)}
DEEP_REGRESSORS: dict[str, DeepGPRegressor] = {
    "fast": DeepGPRegressor(**FAST),
    "layers": DeepGPRegressor(
        3,
        width=(2, 1),
        kernel=(ScaleKernel(MaternKernel(nu=1.5)), "rbf", "matern12"),
        connected=True,
        **LAYERS,
    ),
    "counts": DeepGPRegressor(likelihood="poisson", **DEEP),
    "locations": DeepGPRegressor(likelihood=LaplaceLikelihood(), callbacks=print, **DEEP),
}


@pytest.mark.parametrize("name", DEEP_REGRESSORS)
def test_a_deep_regressor_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    asked = clone(DEEP_REGRESSORS[name]).set_params(callbacks=None)
    model = asked.fit(X, targets(name))
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    same(model, back)
    for method in ("mixture", "matched"):
        found = [m.predict(X, return_std=True, method=method) for m in (model, back)]
        np.testing.assert_allclose(*found, rtol=1e-12)
    found = [m.log_density(X, targets(name)) for m in (model, back)]
    np.testing.assert_allclose(*found, rtol=1e-10)
    found = [m.predict_quantiles(X, [0.1, 0.8], observed=False) for m in (model, back)]
    np.testing.assert_allclose(*found, rtol=1e-10)
    for ours, theirs in zip(model.frontiers_, back.frontiers_, strict=True):
        assert (ours is None) == (theirs is None) == (name != "fast")
        if ours is not None:
            assert theirs.best_for_alpha(0.1).bound == ours.best_for_alpha(0.1).bound
    settings = {k: v for k, v in model.get_params().items() if k not in ("kernel", "likelihood")}
    assert {k: back.get_params()[k] for k in settings} == settings
    if name == "layers":
        assert [type(k) for k in back.kernel] == [ScaleKernel, str, str]
    if name == "layers":  # and it can be fitted again
        again = clone(back).fit(X, targets(name))
        assert again.elbo_ == model.elbo_


@pytest.mark.parametrize("name", ["words", "whole numbers"])
def test_a_deep_classifier_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    model = DeepGPClassifier(**DEEP).fit(X, LABELS[name])
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    same(model, back)
    np.testing.assert_allclose(model.predict_proba(X), back.predict_proba(X), rtol=1e-12)
    np.testing.assert_array_equal(model.predict(X), back.predict(X))
    found = [m.log_density(X, LABELS[name]) for m in (model, back)]
    np.testing.assert_allclose(*found, rtol=1e-10)


STARTS = X[:14] - 3
_t = X[:14, 0]
TABLE = np.stack([np.sin(_t), _t * 10, np.cos(_t), np.full(14, 3.0), y[:14]], 1)
TABLE[4, 1] = TABLE[9, 0] = np.nan
_FIXED = GaussianLikelihood(noise_constraint=GreaterThan(1e-6))
_FIXED.initialize(noise=0.2)
_FIXED.requires_grad_(False)
_JOINT: dict[str, Any] = {"schedule": "paper", "alpha": 0.3, "epochs": 4, "n_candidates": 5}
MAPS: dict[str, GPLVM] = {
    "defaults": GPLVM(1, max_iter=6, random_state=0),
    "columns": GPLVM(2, noise="column", max_points=4, max_iter=4, random_state=0),
    "paper": GPLVM(1, kernel="matern32", random_state=0, **_JOINT),
    "outliers": GPLVM(1, likelihood="student-t", random_state=0, **_JOINT),
    "batches": GPLVM(1, noise="column", batch_size=7, random_state=0, **_JOINT),
    "places": GPLVM(
        2,
        kernel=ScaleKernel(RBFKernel(ard_num_dims=2)),
        likelihood=_FIXED,
        start=STARTS,
        candidates=STARTS[:9].tolist(),
        max_iter=6,
    ),
}


SLOW = ("outliers", "batches")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MAPS]
)
def test_a_map_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    model = clone(MAPS[name]).fit(TABLE)
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    same(model, back)
    assert np.isfinite(back.embedding_).all()
    found = [m.inverse_transform(model.embedding_[:5]) for m in (model, back)]
    np.testing.assert_allclose(*found, rtol=1e-10)
    new = TABLE[:2] + 0.01
    new[0, 2] = np.nan
    # Rows are placed by an optimiser, which follows rounding where the map is flat.
    np.testing.assert_allclose(model.transform(new), back.transform(new), atol=1e-4)
    if model.schedule == "fast":
        pairs = zip(*(m.reconstruct(new, return_std=True) for m in (model, back)), strict=True)
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, rtol=1e-4)
        found = [m.log_density(TABLE[:2], given=new) for m in (model, back)]
        np.testing.assert_allclose(*found, atol=1e-3)
        np.testing.assert_allclose(model.score_samples(new), back.score_samples(new), atol=1e-4)
    assert list(back.get_feature_names_out()) == list(model.get_feature_names_out())
    if name == "places":
        np.testing.assert_array_equal(back.start, STARTS)
        assert not any(p.requires_grad for p in back.likelihood.parameters())


def test_a_map_s_file_grows_with_places_alone(tmp_path: Path) -> None:
    sizes = []
    for rows in (TABLE, np.tile(TABLE, (30, 1))):
        model = GPLVM(1, max_points=3, max_iter=3, random_state=0)
        sizes.append(model.fit(rows).save(tmp_path / "a.winnow").stat().st_size)
        assert model.frontier_ is not None
        found = [model.candidates_, model.inclusion_, model.frontier_.bounds, model.frontier_.masks]
        sizes[-1] -= sum(part.nbytes for part in found)  # grows with candidates
    # Mean and deviation of each row, and again where new rows may start; 406 rows more.
    assert 0.9 < (sizes[1] - sizes[0]) / (406 * 4 * 8) < 1.1


KINDS: dict[str, Any] = {
    "SparseGPRegressor": lambda: REGRESSORS["paper"].fit(X, y),
    "SparseGPClassifier": lambda: SparseGPClassifier(**QUICK).fit(X, LABELS["whole numbers"]),
    "DeepGPRegressor": lambda: clone(DEEP_REGRESSORS["layers"]).fit(X, y),
    "DeepGPClassifier": lambda: DeepGPClassifier(**DEEP).fit(X, LABELS["words"]),
    "GPLVM": lambda: clone(MAPS["columns"]).fit(TABLE),
}


@pytest.fixture(scope="module", params=KINDS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return KINDS[request.param]().save(tmp_path_factory.mktemp(request.param) / "a.winnow")


def used(model: Any) -> None:
    """What people do with a model."""
    if isinstance(model, GPLVM):
        model.reconstruct(TABLE[:2])
        model.inverse_transform(model.embedding_[:2])
    else:
        model.predict(X[:2])
    repr(model)


def test_a_damaged_estimator_is_refused(file: Path, tmp_path: Path) -> None:
    content, rng, bad = file.read_bytes(), random.Random(1), tmp_path / "bad"
    written_by = content.index(b'"written_by"')
    for _ in range(60):
        place = rng.randrange(len(content))
        changed = bytearray(content)
        changed[place] ^= rng.randrange(1, 256)
        if written_by <= place < written_by + 24:
            continue  # who wrote it is only said in messages
        for damaged in (content[:place], bytes(changed)):
            bad.write_bytes(damaged)
            with pytest.raises(ModelFileError):
                winnowgp.load(bad)


def test_a_forged_estimator_is_refused_or_can_be_used(file: Path, tmp_path: Path) -> None:
    """Another `tolerance` is harmless, as long as nobody fits anew."""
    rng, bad = random.Random(3), tmp_path / "bad"
    refused = 0
    for _ in range(80):
        bad.write_bytes(forged_outline(rng, file))
        try:
            model = winnowgp.load(bad)
        except ModelFileError:
            refused += 1
        else:
            used(model)
    assert refused > 40


def test_a_forged_tensor_of_an_estimator_is_refused(file: Path, tmp_path: Path) -> None:
    rng, bad = random.Random(4), tmp_path / "bad"
    for _ in range(60):
        name, content = forged_tensor(rng, file)
        if name.startswith("settings/"):
            continue  # of no use before the next fit, which checks them
        bad.write_bytes(content)
        with pytest.raises(ModelFileError):
            pytest.fail(f"{name} was let in: {winnowgp.load(bad)}")


def test_names_of_columns_are_kept(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(X, columns=["depth", "age"])
    model = SparseGPRegressor(**QUICK).fit(frame, y)
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    np.testing.assert_allclose(back.predict(frame), model.predict(frame), rtol=1e-12)
    with pytest.raises(ValueError, match="feature names"):
        back.predict(frame.rename(columns={"age": "years"}))


@pytest.mark.parametrize("way", ["pickle", "joblib"])
def test_estimators_survive_pickle_and_joblib(way: str, tmp_path: Path) -> None:
    for model, labels in (
        (SparseGPRegressor(**QUICK), y),
        (SparseGPClassifier(**QUICK), LABELS["words"]),
        (DeepGPRegressor(**DEEP), y),
        (DeepGPClassifier(**DEEP), LABELS["words"]),
    ):
        model.fit(X, labels)
        if way == "pickle":
            back = pickle.loads(pickle.dumps(model))
        else:
            joblib.dump(model, tmp_path / "a.joblib")
            back = joblib.load(tmp_path / "a.joblib")
        assert (back.predict(X) == model.predict(X)).all()


@pytest.mark.parametrize("kind", [SparseGPRegressor, DeepGPClassifier, GPLVM])
def test_an_estimator_that_is_not_fitted_says_so(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        kind().save(tmp_path / "a.winnow")
    assert list(tmp_path.iterdir()) == []
