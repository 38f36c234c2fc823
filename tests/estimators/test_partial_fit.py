"""`partial_fit`: batches of a stream, what it refuses, and what files remember."""

import pickle
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from numpy.typing import NDArray

from helpers import shared_streams
from helpers.forgery import contents, file_content
from helpers.forks import Forks
from helpers.shared_work import together
from helpers.short_fits import short_fits, shortest_fits
from helpers.stream_batches import batch, first_classifier, first_regressor, labelled
from winnowgp import SparseGPClassifier, SparseGPRegressor, load
from winnowgp.data import ArraySource, Dataset
from winnowgp.errors import CheckpointError, InputError
from winnowgp.estimators import streaming
from winnowgp.models import SparseGP
from winnowgp.training import Checkpoint

# Shapes are checked by the tests of `models.online` and of fits.
pytestmark = pytest.mark.unchecked


@pytest.fixture(scope="module")
def first() -> SparseGPRegressor:
    return first_regressor()


@pytest.fixture(scope="module")
def fitted(first: SparseGPRegressor) -> SparseGPRegressor:
    return deepcopy(first).partial_fit(*batch(1))


@pytest.fixture(scope="module")
def classifier() -> SparseGPClassifier:
    return first_classifier()


@pytest.fixture
def model(fitted: SparseGPRegressor) -> SparseGPRegressor:
    return deepcopy(fitted)


def test_partial_fit_more_batches_learns_the_function(model: SparseGPRegressor) -> None:
    X, y = batch(99, 200)
    for seed in range(2, 9):
        model.partial_fit(*batch(seed))
    # The true function and noise have −0.21.
    assert model.log_density(X, y).mean() > -0.26
    assert model.n_rows_seen_ == 180
    assert model.n_batches_ == 9
    # What all selections gave up together is within the tolerance.
    assert 0 <= model.elbo_gap_ <= 0.01 + 1e-12
    assert model.frontier_ is not None
    assert model.frontier_.elbos[model.n_inducing_].item() == pytest.approx(model.elbo_)
    # Points that a larger tolerance does not need are dropped.
    model.set_params(tolerance=0.2).partial_fit(*batch(9))
    assert model.batches_[-1].dropped
    assert model.n_inducing_ == len(model.inducing_points_) == model.batches_[-1].points
    sizes = [record.points for record in model.batches_]
    changes = [record.added - record.dropped for record in model.batches_]
    assert sizes == list(np.cumsum(changes))


def test_partial_fit_learns_hyperparameters_when_enough_rows_are_new(
    first: SparseGPRegressor, tmp_path: Path
) -> None:
    model, noises, waiting = deepcopy(first), [first.noise_[0]], []
    for seed in range(1, 4):
        model.partial_fit(*batch(seed, 1), sample_weight=[0.9])
        model = load(model.save(tmp_path / "model.winnow"))
        share = model._record().noise_share
        # The share of the noise that the rows show is that of each batch.
        noises.append(model.noise_[0] / (1.0 if share is None else share.item()))
        waiting.append(model._record().waiting)
    # 0.9 of 20.9, 1.8 of 21.8 and 2.7 of 22.7 observations: the last is more than 10 %.
    assert noises[:3] == pytest.approx([noises[0]] * 3, rel=1e-10)
    assert abs(noises[3] / noises[0] - 1) > 1e-4
    assert waiting == pytest.approx([0.9, 1.8, 0.0])


def test_partial_fit_predicts_with_the_noise_that_rows_show(tmp_path: Path) -> None:
    X, y = (np.concatenate(part) for part in zip(*map(batch, range(20)), strict=True))
    model = SparseGPRegressor("rbf", random_state=0, tolerance=0.3).fit(X, y)
    model.partial_fit(*batch(20))
    record = model._record()
    memory, share = record.memories[0], record.noise_share
    assert memory.lost is not None
    assert share is not None
    assert share.item() == (1 - memory.lost / memory.residual).clamp(0.5, 1).item() < 1
    posterior = model.posterior_
    learnt = model._online_model(
        model._standardised(Dataset.of(torch.tensor(X), torch.tensor(y))), model._validate_stream()
    )
    assert isinstance(learnt, SparseGP)
    noise = posterior.likelihood.noise.item()
    assert noise == pytest.approx(share.item() * learnt.noise.item(), rel=1e-10)
    # A file of an earlier version has neither, and goes on with the noise that it predicts with.
    outline, tensors = contents(model.save(tmp_path / "model.winnow"))
    state = outline["value"]["state"]["_stream"]["state"]
    del state["noise_share"]
    for each in state["memories"]["$tuple"]:
        del each["state"]["lost"]
    path = tmp_path / "earlier.winnow"
    path.write_bytes(file_content(outline, tensors, version="10"))
    earlier = load(path)
    assert earlier._record().noise_share is None
    earlier.partial_fit(*batch(21))
    assert earlier.log_density(*batch(99, 200)).mean() > -0.3


def test_partial_fit_of_loaded_model_equals_that_in_memory(
    model: SparseGPRegressor, tmp_path: Path
) -> None:
    loaded = load(model.save(tmp_path / "model.winnow"))
    assert str(loaded.batches_) == str(model.batches_)
    X, _ = batch(50)
    after = loaded.partial_fit(*batch(2)).predict(X)
    np.testing.assert_allclose(after, model.partial_fit(*batch(2)).predict(X), rtol=1e-10)


def test_partial_fit_after_fit_without_record_equals_with(
    first: SparseGPRegressor, model: SparseGPRegressor
) -> None:
    earlier = deepcopy(first)
    earlier._stream = None  # as in files of earlier versions
    X, _ = batch(50)
    np.testing.assert_allclose(earlier.partial_fit(*batch(1)).predict(X), model.predict(X))
    assert earlier.n_rows_seen_ == 40


def test_model_with_priors_survives_pickle(model: SparseGPRegressor) -> None:
    X, _ = batch(50)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again.predict(X), model.predict(X), rtol=1e-12)
    assert again.partial_fit(*batch(2)).n_batches_ == 3


def test_partial_fit_weights_equal_repeated_rows(model: SparseGPRegressor) -> None:
    other, (X, y) = deepcopy(model), batch(3)
    weights = np.where(np.arange(20) < 10, 2.0, 1.0)
    model.partial_fit(X, y, sample_weight=weights)
    other.partial_fit(np.vstack([X, X[:10]]), np.concatenate([y, y[:10]]))
    np.testing.assert_allclose(model.predict(X), other.predict(X), rtol=1e-6)
    assert model.n_rows_seen_ == other.n_rows_seen_ == 70


def test_batch_record_has_the_mean_density_of_repeated_rows(model: SparseGPRegressor) -> None:
    X, y = batch(4)
    X, y = np.vstack([X, np.repeat(X[:1], 30, 0)]), np.concatenate([y, np.repeat(y[:1] + 2, 30)])
    expected = model.log_density(X, y).mean()
    assert model.partial_fit(X, y).batches_[-1].log_density == pytest.approx(expected)


def test_partial_fit_keeps_frozen_lengthscales() -> None:
    kernel = ScaleKernel(RBFKernel())
    kernel.base_kernel.lengthscale = torch.tensor(5.0)
    kernel.base_kernel.raw_lengthscale.requires_grad_(False)
    X, y = batch(0)
    with shortest_fits():
        model = SparseGPRegressor(kernel, random_state=0).fit(X, y)
    model.partial_fit(X, np.sin(4 * X[:, 0]))
    assert model.kernel_.base_kernel.lengthscale.item() == pytest.approx(5.0)


def test_first_batch_that_a_stream_refuses_leaves_nothing() -> None:
    X, y = batch(0)
    Y = np.column_stack([y, y])
    Y[3, 1] = np.nan
    model = SparseGPRegressor("rbf", noise="shared", random_state=0)
    with shortest_fits(), pytest.raises(InputError, match="must not have missing targets"):
        model.partial_fit(X, Y)
    assert not hasattr(model, "posterior_")


def test_refused_classes_leave_the_columns(classifier: SparseGPClassifier) -> None:
    model, (X, _) = deepcopy(classifier), labelled(1)
    with pytest.raises(InputError, match="at least two classes"):
        model.fit(np.hstack([X, X]), np.zeros(len(X)))
    assert model.n_features_in_ == 2
    model.predict(X)


def test_partial_fit_source_equals_its_batches(
    model: SparseGPRegressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "BATCH_ROWS", 16)
    other, (X, y) = deepcopy(model), batch(4, 40)
    model.partial_fit(ArraySource(X, y))
    for start in range(0, 40, 16):
        other.partial_fit(X[start : start + 16], y[start : start + 16])
    assert model.n_batches_ == other.n_batches_ == 5
    np.testing.assert_allclose(model.predict(X), other.predict(X))


def test_partial_fit_killed_between_batches_goes_on(
    model: SparseGPRegressor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(streaming, "BATCH_ROWS", 16)
    whole, (X, y) = deepcopy(model).set_params(window=3), batch(4, 48)
    whole.partial_fit(ArraySource(X, y))
    stream, learnt = deepcopy(model), []
    stream.set_params(window=3, checkpoint=Checkpoint(tmp_path, every=0))
    before, update_once = dict(vars(stream)), SparseGPRegressor._update_once

    def killed(self: SparseGPRegressor, *arguments: Any) -> None:
        if len(learnt) == 2:
            raise KeyboardInterrupt
        learnt.append(self.n_batches_)
        update_once(self, *arguments)

    monkeypatch.setattr(SparseGPRegressor, "_update_once", killed)
    with pytest.raises(KeyboardInterrupt):
        stream.partial_fit(ArraySource(X, y))
    assert all(vars(stream)[key] is before[key] for key in before)
    learnt.clear()
    # Another stream is refused while this one has not ended.
    with pytest.raises(CheckpointError, match="another fit, which has not ended"):
        deepcopy(stream).partial_fit(ArraySource(X, y + 1))
    assert not learnt
    stream.partial_fit(ArraySource(X, y))
    assert learnt == [4]
    np.testing.assert_allclose(stream.predict(X), whole.predict(X), rtol=1e-10)
    assert stream.elbo_ == pytest.approx(whole.elbo_, rel=1e-10)
    assert stream.n_batches_ == 5
    # An update that had ended is not repeated.
    again = deepcopy(model).set_params(window=3, checkpoint=Checkpoint(tmp_path, every=0))
    after = again.partial_fit(ArraySource(X, y)).predict(X)
    np.testing.assert_allclose(after, whole.predict(X), rtol=1e-10)
    assert learnt == [4]


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_two_processes_update_as_one(forks: Forks) -> None:
    (alone,) = forks.call(together, shared_streams.updates, 1)
    first, second = forks.call(together, shared_streams.updates, 2)
    # The first process learns; each reads its own half of the rows.
    assert (first.pop("learnt"), second.pop("learnt"), alone.pop("learnt")) == (3, 0, 3)
    assert (first.pop("read"), second.pop("read"), alone.pop("read")) == (24, 24, 48)
    assert first == second
    np.testing.assert_allclose(first["predicted"], alone["predicted"], rtol=1e-8)
    assert first["elbo"] == pytest.approx(alone["elbo"], rel=1e-8)
    assert first["sizes"] == alone["sizes"]
    # An error of one process is raised in both.
    for raised in (first["error"], alone["error"]):
        assert "X[40, 1]` is nan" in raised


def test_file_of_version_6_goes_on(first: SparseGPRegressor, tmp_path: Path) -> None:
    # After one batch the posterior is all that is remembered, as in every file of version 6.
    model = deepcopy(first)
    outline, tensors = contents(model.save(tmp_path / "model.winnow"))
    record = outline["value"]["state"]["_stream"]["state"]
    for name in ("points", "memory_points", "arrived", "memories"):
        del record[name]
    path = tmp_path / "earlier.winnow"
    path.write_bytes(file_content(outline, tensors, version="6"))
    loaded = load(path)
    assert loaded.point_ids_.tolist() == list(range(model.n_inducing_))
    X, _ = batch(50)
    after = loaded.partial_fit(*batch(2)).predict(X)
    np.testing.assert_allclose(after, model.partial_fit(*batch(2)).predict(X), rtol=1e-10)


def test_point_ids_stay_when_points_move(model: SparseGPRegressor) -> None:
    before = model.point_ids_
    model.set_params(move_points=True, max_points=5).partial_fit(*batch(2))
    after, record = model.point_ids_, model.batches_[-1]
    assert record.moved
    assert len(set(after) & set(before)) == len(before) - record.dropped
    assert len(set(after) - set(before)) == record.added
    assert min(set(after) - set(before), default=99) > max(before)


def test_move_points_moves_them(model: SparseGPRegressor) -> None:
    model.set_params(max_points=5)
    moved = deepcopy(model).set_params(move_points=True).partial_fit(*batch(2))
    model.partial_fit(*batch(2))
    assert model.batches_[-1].moved == 0
    assert moved.batches_[-1].moved == moved.n_inducing_
    assert moved.elbo_ > model.elbo_


@pytest.mark.parametrize("move_points", [False, True])
def test_elbo_gap_of_a_stream_is_that_of_the_frontier(
    model: SparseGPRegressor, tmp_path: Path, move_points: bool
) -> None:
    model.set_params(move_points=move_points)
    # Without the first rows the memory gives up nats that no number of points regains.
    model._stream = replace(model._record(), first=None)
    for seed in (2, 3):
        model.partial_fit(*batch(seed))
    loaded = load(model.save(tmp_path / "model.winnow"))
    for each in (model, loaded):
        assert each.frontier_ is not None
        assert each.frontier_.earlier_gap > 0
        gap = each.frontier_.gaps[each.n_inducing_].item()
        assert gap == pytest.approx(each.elbo_gap_, rel=1e-9)
        assert gap == pytest.approx(each.batches_[-1].gap, rel=1e-9)


def test_partial_fit_constant_first_batch_then_structure() -> None:
    rows = 3
    model = SparseGPRegressor("rbf", random_state=0)
    with shortest_fits():
        model.partial_fit(np.ones((rows, 2)), np.zeros(rows))
        assert model.n_inducing_ == 0
        model.partial_fit(*batch(0))
    assert model.n_inducing_ > 0
    assert model.n_rows_seen_ == rows + 20
    assert np.isfinite(model.partial_fit(*batch(1)).predict(batch(2)[0])).all()


ZEROS = np.zeros((3, 2))
WRONG = np.array([0.0, np.nan, 1.0])
BAD = {
    "NaN": (
        ZEROS + WRONG[:, None],
        ZEROS[:, 0],
        r"`X` contains NaN: column 0 has 1, first in row 1",
    ),
    "columns": (ZEROS[:, :1], ZEROS[:, 0], "X has 1 features, but .* expecting 2"),
    "rows": (ZEROS[:0], ZEROS[:0, 0], r"0 sample\(s\)"),
    "targets": (ZEROS, ZEROS, "`y` must have 1 target columns as before; got 2"),
    "length": (ZEROS, np.zeros(4), r"inconsistent numbers of samples: \[3, 4\]"),
    "words": (np.full((3, 2), "high"), ZEROS[:, 0], "`X` must be numbers; column 0 has"),
    "target words": (ZEROS, np.full(3, "high"), "`y` must be numbers"),
    "missing target": (ZEROS, WRONG, "`y` contains NaN in 1 of 3 rows, first in row 1 .*leave"),
    "infinite target": (ZEROS, np.full(3, np.inf), "`y` contains infinity in 3 of 3 rows"),
    "infinite": (
        ZEROS + np.array([0, np.inf]),
        WRONG[:1].repeat(3),
        "`X` contains infinity in 3 of 3 rows",
    ),
    "far": (
        ZEROS + np.array([0, 1e200]),
        ZEROS[:, 0],
        "`X` must be within 1e.08.*column 1 .counted from 0. has a value",
    ),
    "far target": (
        ZEROS,
        np.array([0, 1e12, 0]),
        "`y` must be within 1e.08.*column 0 .counted from 0. has a value.*units",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_partial_fit_bad_batch_leaves_the_model_as_it_was(
    model: SparseGPRegressor, name: str
) -> None:
    before, (X, y, message) = dict(vars(model)), BAD[name]
    with pytest.raises(ValueError, match=message):
        model.partial_fit(X, y)
    assert vars(model).keys() == before.keys()
    assert all(vars(model)[key] is before[key] for key in before)


def test_partial_fit_killed_in_a_batch_leaves_the_model_as_it_was(
    model: SparseGPRegressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(vars(model))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    # After the update of the posterior, before that of the record.
    monkeypatch.setattr(streaming.StreamRecord, "plus", killed)
    with pytest.raises(KeyboardInterrupt):
        model.partial_fit(*batch(2))
    assert all(vars(model)[key] is before[key] for key in before)


@pytest.mark.parametrize("X", [np.ones((1, 2)), np.ones((6, 2))])
def test_partial_fit_one_row_and_constant_batches_are_used(
    model: SparseGPRegressor, X: NDArray[Any]
) -> None:
    model.partial_fit(X, np.ones(len(X)))
    assert model.n_rows_seen_ == 40 + len(X)
    assert np.isfinite(model.predict(X)).all()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"criterion": "predictive"}, "`criterion` must be 'elbo'"),
        ({"forgetting": 1.5}, "at most 1"),
        ({"forgetting": 0}, "`forgetting` must be a positive number"),
        ({"window": 1}, "at least 2 batches.*fit a new model"),
        ({"window": 2.5}, "`window` must be"),
    ],
)
def test_partial_fit_unsupported_parameters_are_errors(
    model: SparseGPRegressor, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        model.set_params(**parameters).partial_fit(*batch(2))
    first = SparseGPRegressor("rbf", **parameters)
    with pytest.raises(InputError, match=message):
        first.partial_fit(*batch(2))
    assert not hasattr(first, "posterior_")


def test_classifier_partial_fit_learns_and_is_saved(
    classifier: SparseGPClassifier, tmp_path: Path
) -> None:
    model = deepcopy(classifier)
    X, y = labelled(9, 200)
    for seed in range(1, 4):
        model.partial_fit(*labelled(seed))
    # That of all rows at once has −0.39.
    assert model.log_density(X, y).mean() > -0.42
    assert model.n_rows_seen_ == 100
    loaded = load(model.save(tmp_path / "model.winnow"))
    np.testing.assert_allclose(loaded.predict_proba(X), model.predict_proba(X))
    np.testing.assert_allclose(
        loaded.partial_fit(*labelled(5)).predict_proba(X),
        model.partial_fit(*labelled(5)).predict_proba(X),
    )


def test_classifier_unknown_labels_are_errors(classifier: SparseGPClassifier) -> None:
    X, y = labelled(1)
    with pytest.raises(InputError, match="labels of the first batch"):
        classifier.partial_fit(X, np.where(y == "low", "other", y))
    with pytest.raises(InputError, match="`classes` must be those of the first batch"):
        classifier.partial_fit(X, y, classes=["a", "b"])
    with pytest.raises(InputError, match="balanced"):
        deepcopy(classifier).set_params(class_weight="balanced").partial_fit(X, y)


def test_classifier_batches_of_one_class_are_used_but_not_first(
    classifier: SparseGPClassifier,
) -> None:
    model, (X, y) = deepcopy(classifier), labelled(1, 60)
    for label in ("low", "high"):
        model.partial_fit(X[y == label], y[y == label])
    assert model.n_rows_seen_ == 85
    assert model.score(X, y) > 0.7
    first = SparseGPClassifier("rbf")
    with pytest.raises(InputError, match="first batch must have at least two classes"):
        first.partial_fit(X[y == "low"], y[y == "low"], classes=["low", "high"])


@pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")
@pytest.mark.parametrize(("likelihood", "mean"), [("gaussian", "auto"), ("gaussian", "constant")])
def test_partial_fit_one_row_does_not_replace_a_constant(likelihood: str, mean: str) -> None:
    rng = np.random.default_rng(1)
    X, y = rng.uniform(0, 6, (60, 1)), 10 + rng.standard_normal(60)
    with shortest_fits():
        model = SparseGPRegressor("rbf", likelihood=likelihood, mean=mean, random_state=0)
        model.partial_fit(X, y)
        assert model.n_inducing_ == 0
        model.partial_fit([[3.0]], [12.0])
    assert model.n_rows_seen_ == 61
    centre, deviation = model.predict([[3.0]], return_std=True)
    assert abs(centre[0] - y.mean()) < 0.2
    assert 0.8 < deviation[0] / y.std() < 1.3


@pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")
def test_classifier_one_label_does_not_replace_a_constant() -> None:
    rng = np.random.default_rng(2)
    X, y = rng.uniform(0, 6, (40, 1)), np.arange(40) % 2
    with shortest_fits():
        model = SparseGPClassifier("rbf", random_state=0).partial_fit(X, y, classes=[0, 1])
        assert model.n_inducing_ == 0
        model.partial_fit([[3.0]], [1])
    assert 0.4 < model.predict_proba([[3.0]])[0, 1] < 0.6


def test_partial_fit_after_resizing_remembers_what_that_gave_up() -> None:
    X, y = batch(0)
    with short_fits(sizes=1):
        model = SparseGPRegressor("rbf", random_state=0).fit(X, y)
    small = model.resized(model.available_sizes_[0])
    gap = small.elbo_gap_
    assert gap > 0.05
    small.partial_fit(*batch(1, 2))
    assert small.elbo_gap_ > 0.8 * gap * 20 / 22
