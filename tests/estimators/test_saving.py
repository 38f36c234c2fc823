"""Estimators survive `save` and `load`, pickle and joblib."""

import pickle
import random
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, LaplaceLikelihood
from sklearn.base import clone as sklearn_clone
from sklearn.exceptions import NotFittedError

import winnowgp
from helpers.forgery import forged_outline, forged_tensor
from helpers.short_fits import short_fits
from winnowgp import GPLVM, DeepGPClassifier, DeepGPRegressor, SparseGPClassifier, SparseGPRegressor
from winnowgp.bounds.evidence import Evidence
from winnowgp.errors import ModelFileError
from winnowgp.training import Progress

rng = np.random.default_rng(0)
X = rng.uniform(0, 6, (60, 2))
y = np.sin(X[:, 0]) + 0.1 * rng.normal(size=60)
LABELS: dict[str, Any] = {
    "strings": np.where(y > 0, "up", "low"),
    "objects": np.where(y > 0, "up", "low").astype(object),
    "integers": np.where(y > 0, 7, np.where(X[:, 1] > 4, 3, -2)),
    "booleans": y > 0,
}


def clone(model: Any) -> Any:
    """Clone one estimator; the return type of scikit-learn's function may also be a list."""
    return sklearn_clone(model)


# Fits of a few steps without a seed may select all candidates, or none.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::winnowgp.errors.{name}")
    for name in ("AllCandidatesWarning", "NoInducingPointsWarning")
]

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
    """Compare the fitted attributes and some parameters."""
    for name in [n for n in vars(a) if n.endswith("_")]:
        ours, theirs = getattr(a, name), getattr(b, name)
        if isinstance(ours, np.ndarray):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype
        elif isinstance(ours, tuple) and ours and isinstance(ours[0], np.ndarray):
            for a_layer, b_layer in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a_layer, b_layer)
        elif isinstance(ours, float) and np.isnan(ours):
            assert np.isnan(theirs), name
        elif ours is None or isinstance(ours, float | int | str | dict | tuple | Evidence):
            assert name == "frontiers_" or ours == theirs, name
    assert {n for n in vars(a) if n.endswith("_")} == {n for n in vars(b) if n.endswith("_")}
    for name in ("alpha", "tolerance", "epochs", "schedule", "n_candidates"):
        assert getattr(a, name) == getattr(b, name)


def same_sizes(a: Any, b: Any) -> None:
    """Compare the frontiers, and the models of other sizes."""
    assert (a.frontier_ is None) == (b.frontier_ is None)
    if a.frontier_ is not None:
        assert torch.equal(a.frontier_.elbos, b.frontier_.elbos)
        densities = a.frontier_.log_densities, b.frontier_.log_densities
        np.testing.assert_array_equal(*densities)
        for name in ("N", "evidence", "exact_log_density"):
            assert getattr(a.frontier_, name) == getattr(b.frontier_, name)
    assert a.available_sizes_ == b.available_sizes_
    for points in a.available_sizes_:
        ours, theirs = a.resized(points), b.resized(points)
        assert ours.elbo_ == theirs.elbo_
        np.testing.assert_allclose(ours.predict(X), theirs.predict(X), rtol=1e-12)


@pytest.mark.parametrize("name", REGRESSORS)
def test_load_restores_a_regressor(name: str, tmp_path: Path) -> None:
    with short_fits(sizes=3):
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
    same_sizes(model, back)
    if name == "kernel":
        assert isinstance(back.kernel, ScaleKernel)
        assert isinstance(model.random_state, np.random.RandomState)
        assert back.random_state.randint(1000) == model.random_state.randint(1000)


@pytest.mark.parametrize("name", LABELS)
def test_load_restores_a_classifier(name: str, tmp_path: Path) -> None:
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
        skip_connections=True,
        **LAYERS,
    ),
    "counts": DeepGPRegressor(likelihood="poisson", **DEEP),
    "locations": DeepGPRegressor(likelihood=LaplaceLikelihood(), callbacks=print, **DEEP),
}


@pytest.mark.parametrize("name", DEEP_REGRESSORS)
def test_load_restores_a_deep_regressor(name: str, tmp_path: Path) -> None:
    estimator = clone(DEEP_REGRESSORS[name]).set_params(callbacks=None)
    model = estimator.fit(X, targets(name))
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    same(model, back)
    for method in ("mixture", "matched"):
        results = [m.predict(X, return_std=True, method=method) for m in (model, back)]
        np.testing.assert_allclose(*results, rtol=1e-12)
    results = [m.log_density(X, targets(name)) for m in (model, back)]
    np.testing.assert_allclose(*results, rtol=1e-10)
    results = [m.predict_quantiles(X, [0.1, 0.8], observed=False) for m in (model, back)]
    np.testing.assert_allclose(*results, rtol=1e-10)
    for ours, theirs in zip(model.frontiers_, back.frontiers_, strict=True):
        assert (ours is None) == (theirs is None) == (name != "fast")
        if ours is not None:
            assert theirs.best_for_alpha(0.1).bound == ours.best_for_alpha(0.1).bound
    settings = {k: v for k, v in model.get_params().items() if k not in ("kernel", "likelihood")}
    assert {k: back.get_params()[k] for k in settings} == settings
    if name == "layers":
        assert [type(k) for k in back.kernel] == [ScaleKernel, str, str]
    if name == "layers":  # it can be fitted again
        again = clone(back).fit(X, targets(name))
        assert again.elbo_ == model.elbo_


@pytest.mark.parametrize("name", ["strings", "integers"])
def test_load_restores_a_deep_classifier(name: str, tmp_path: Path) -> None:
    model = DeepGPClassifier(**DEEP).fit(X, LABELS[name])
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    same(model, back)
    np.testing.assert_allclose(model.predict_proba(X), back.predict_proba(X), rtol=1e-12)
    np.testing.assert_array_equal(model.predict(X), back.predict(X))
    results = [m.log_density(X, LABELS[name]) for m in (model, back)]
    np.testing.assert_allclose(*results, rtol=1e-10)


STARTS = X[:14] - 3
_t = X[:14, 0]
TABLE = np.stack([np.sin(_t), _t * 10, np.cos(_t), np.full(14, 3.0), y[:14]], 1)
TABLE[4, 1] = TABLE[9, 0] = np.nan
_FIXED = GaussianLikelihood(noise_constraint=GreaterThan(1e-6))
_FIXED.initialize(noise=0.2)
_FIXED.requires_grad_(False)
_JOINT: dict[str, Any] = {"schedule": "paper", "alpha": 0.3, "epochs": 4, "n_candidates": 5}
GPLVMS: dict[str, GPLVM] = {
    "defaults": GPLVM(1, max_iter=6, random_state=0),
    "columns": GPLVM(2, noise="column", max_points=4, max_iter=4, random_state=0),
    "paper": GPLVM(1, kernel="matern32", random_state=0, **_JOINT),
    "student-t": GPLVM(1, likelihood="student-t", random_state=0, **_JOINT),
    "batches": GPLVM(1, noise="column", batch_size=7, random_state=0, **_JOINT),
    "start": GPLVM(
        2,
        kernel=ScaleKernel(RBFKernel(ard_num_dims=2)),
        likelihood=_FIXED,
        start=STARTS,
        candidates=STARTS[:9].tolist(),
        max_iter=6,
    ),
}


SLOW = ("student-t", "batches")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in GPLVMS]
)
def test_load_restores_a_gplvm(name: str, tmp_path: Path) -> None:
    model = clone(GPLVMS[name]).fit(TABLE)
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    same(model, back)
    assert np.isfinite(back.embedding_).all()
    results = [m.inverse_transform(model.embedding_[:5]) for m in (model, back)]
    np.testing.assert_allclose(*results, rtol=1e-10)
    new = TABLE[:2] + 0.01
    new[0, 2] = np.nan
    # The optimiser that infers latent positions amplifies rounding in flat directions.
    np.testing.assert_allclose(model.transform(new), back.transform(new), atol=1e-4)
    if model.schedule == "fast":
        pairs = zip(*(m.reconstruct(new, return_std=True) for m in (model, back)), strict=True)
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, rtol=1e-4)
        results = [m.log_density(TABLE[:2], given=new) for m in (model, back)]
        np.testing.assert_allclose(*results, atol=1e-3)
        np.testing.assert_allclose(model.score_samples(new), back.score_samples(new), atol=1e-4)
    assert list(back.get_feature_names_out()) == list(model.get_feature_names_out())
    if name == "start":
        np.testing.assert_array_equal(back.start, STARTS)
        assert not any(p.requires_grad for p in back.likelihood.parameters())


def test_save_of_a_gplvm_grows_with_latent_positions_alone(tmp_path: Path) -> None:
    sizes = []
    for rows in (TABLE, np.tile(TABLE, (30, 1))):
        model = GPLVM(1, max_points=3, max_iter=3, random_state=0)
        sizes.append(model.fit(rows).save(tmp_path / "a.winnow").stat().st_size)
        assert model.frontier_ is not None
        frontier = model.frontier_
        arrays = [model.candidates_, model.inclusion_, frontier.bounds, frontier.masks]
        sizes[-1] -= sum(array.nbytes for array in arrays)  # these grow with the candidates
    # 406 more rows, each with a mean and a standard deviation, stored as embedding and anchor.
    assert 0.9 < (sizes[1] - sizes[0]) / (406 * 4 * 8) < 1.1


KINDS: dict[str, Any] = {
    "SparseGPRegressor": lambda: REGRESSORS["defaults"].fit(X, y),
    "SparseGPClassifier": lambda: SparseGPClassifier(**QUICK).fit(X, LABELS["integers"]),
    "DeepGPRegressor": lambda: clone(DEEP_REGRESSORS["layers"]).fit(X, y),
    "DeepGPClassifier": lambda: DeepGPClassifier(**DEEP).fit(X, LABELS["strings"]),
    "GPLVM": lambda: clone(GPLVMS["columns"]).fit(TABLE),
}


@pytest.fixture(scope="module", params=KINDS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with short_fits():
        model = KINDS[request.param]()
    return model.save(tmp_path_factory.mktemp(request.param) / "a.winnow")


def used(model: Any) -> None:
    """Use a model as users do."""
    if isinstance(model, GPLVM):
        model.reconstruct(TABLE[:2])
        model.inverse_transform(model.embedding_[:2])
    else:
        model.predict(X[:2])
    repr(model)


def test_load_of_a_damaged_estimator_is_refused(file: Path, tmp_path: Path) -> None:
    content, rng, bad = file.read_bytes(), random.Random(1), tmp_path / "bad"
    written_by = content.index(b'"written_by"')
    for _ in range(60):
        position = rng.randrange(len(content))
        changed = bytearray(content)
        changed[position] ^= rng.randrange(1, 256)
        if written_by <= position < written_by + 24:
            continue  # only used in messages
        for damaged in (content[:position], bytes(changed)):
            bad.write_bytes(damaged)
            with pytest.raises(ModelFileError):
                winnowgp.load(bad)


def test_load_of_a_forged_estimator_is_refused_or_usable(file: Path, tmp_path: Path) -> None:
    """Some changes are harmless, such as another `tolerance`, which only `fit` reads."""
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


def test_load_of_a_forged_estimator_tensor_is_refused(file: Path, tmp_path: Path) -> None:
    rng, bad = random.Random(4), tmp_path / "bad"
    for _ in range(60):
        name, content = forged_tensor(rng, file)
        if name.startswith("parameters/"):
            continue  # only used by `fit`, which checks them
        bad.write_bytes(content)
        with pytest.raises(ModelFileError):
            pytest.fail(f"{name} was accepted: {winnowgp.load(bad)}")


def test_load_restores_feature_names(tmp_path: Path) -> None:
    frame = pandas.DataFrame(X, columns=["depth", "age"])
    model = SparseGPRegressor(**QUICK).fit(frame, y)
    back = winnowgp.load(model.save(tmp_path / "a.winnow"))
    np.testing.assert_allclose(back.predict(frame), model.predict(frame), rtol=1e-12)
    with pytest.raises(ValueError, match="feature names"):
        back.predict(frame.rename(columns={"age": "years"}))


def test_estimators_survive_pickle_and_joblib(tmp_path: Path) -> None:
    for model, labels in (
        (SparseGPRegressor(**QUICK), y),
        (SparseGPClassifier(**QUICK), LABELS["strings"]),
        (DeepGPRegressor(**DEEP), y),
        (DeepGPClassifier(**DEEP), LABELS["strings"]),
    ):
        model.fit(X, labels)
        joblib.dump(model, tmp_path / "a.joblib")
        for back in (pickle.loads(pickle.dumps(model)), joblib.load(tmp_path / "a.joblib")):
            densities = back.log_density(X, labels), model.log_density(X, labels)
            np.testing.assert_allclose(*densities, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [SparseGPRegressor, DeepGPClassifier, GPLVM])
def test_save_of_an_unfitted_estimator_is_refused(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        kind().save(tmp_path / "a.winnow")
    assert list(tmp_path.iterdir()) == []
