"""Parameters are validated before a checkpoint is claimed, rows are read or a fit is changed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel

from winnowgp import GPLVM, DeepGPClassifier, DeepGPRegressor, SparseGPClassifier, SparseGPRegressor
from winnowgp.errors import InputError
from winnowgp.estimators.rows import tensor
from winnowgp.estimators.validation import validated

X = np.linspace(0, 6, 20)[:, None]
Y = np.sin(X[:, 0])
TABLE = np.c_[np.sin(X), np.cos(X), X]
PAPER: dict[str, Any] = {"schedule": "paper", "alpha": 0.1, "n_candidates": 5, "random_state": 0}
DATA: dict[type, tuple[np.ndarray, ...]] = {
    SparseGPRegressor: (X, Y),
    SparseGPClassifier: (X, Y > 0),
    DeepGPRegressor: (X, Y),
    DeepGPClassifier: (X, Y > 0),
    GPLVM: (TABLE,),
}
QUICK: dict[type, dict[str, Any]] = {
    SparseGPRegressor: {**PAPER, "epochs": (1, 1, 1)},
    SparseGPClassifier: {**PAPER, "epochs": (1, 1, 1)},
    DeepGPRegressor: {**PAPER, "epochs": (0, 1, 1, 1), "predict_samples": 2},
    DeepGPClassifier: {**PAPER, "epochs": (0, 1, 1, 1), "predict_samples": 2},
    GPLVM: {**PAPER, "epochs": 1},
}
EVERY = list(DATA)
SPARSE, DEEP = EVERY[:2], EVERY[2:4]
WRONG: list[tuple[type, dict[str, Any]]] = [
    *((kind, {"kernel": "rbff"}) for kind in EVERY),
    *((kind, {"kernel": RBFKernel(ard_num_dims=7)}) for kind in EVERY),
    *((kind, {"device": "abacus"}) for kind in EVERY),
    *((kind, {"tolerance": 0}) for kind in EVERY),
    *((kind, {"random_state": "seven"}) for kind in EVERY),
    *((kind, {"callbacks": 3}) for kind in EVERY),
    *((kind, {"candidates": np.zeros((4, 3))}) for kind in (*SPARSE, GPLVM)),
    *((kind, {"kernel": "rbf[3]"}) for kind in SPARSE),
    *((kind, {"kernel": "periodic(period=2)"}) for kind in DEEP),
    *((kind, {"hidden_mean": "none"}) for kind in DEEP),
    *((kind, {"width": (1, 2)}) for kind in DEEP),
    (SparseGPRegressor, {"precision": "half"}),
    (SparseGPRegressor, {"precision": "mixed", "batch_size": 5}),
    (SparseGPRegressor, {"likelihood": "poisson"}),
    (DeepGPRegressor, {"likelihood": "poisson"}),
    (GPLVM, {"noise": "loud"}),
    (GPLVM, {"n_components": 0}),
    (GPLVM, {"start": np.zeros((3, 2))}),
    (GPLVM, {"likelihood": "student-t", "noise": "column"}),
    (GPLVM, {"schedule": "fast", "kernel": "matern32"}),
]


def named(case: Any) -> str:
    if isinstance(case, type):
        return case.__name__
    return ",".join(f"{name}={_short(value)}" for name, value in case.items())


def _short(value: Any) -> str:
    return str(value) if isinstance(value, str | int | float) else type(value).__name__


@pytest.mark.parametrize(("kind", "wrong"), WRONG, ids=named)
def test_wrong_parameter_leaves_the_checkpoint_to_the_corrected_call(
    kind: Any, wrong: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(InputError):
        kind(**{**QUICK[kind], **wrong}, checkpoint=tmp_path / "runs").fit(*DATA[kind])
    assert not (tmp_path / "runs").exists()


@pytest.mark.filterwarnings("ignore:the latent positions")
@pytest.mark.parametrize("kind", EVERY, ids=named)
def test_corrected_call_fits_in_the_same_folder(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`kernel`"):
        kind(**QUICK[kind], kernel="rbff", checkpoint=tmp_path).fit(*DATA[kind])
    model = kind(**QUICK[kind], kernel="rbf", checkpoint=tmp_path).fit(*DATA[kind])
    assert np.isfinite(model.elbo_)
    assert any(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:the latent positions")
@pytest.mark.parametrize("kind", EVERY, ids=named)
def test_wrong_parameter_leaves_a_fitted_estimator_unchanged(kind: Any) -> None:
    model = kind(**QUICK[kind]).fit(*DATA[kind])
    before = dict(vars(model))
    with pytest.raises(InputError):
        model.set_params(tolerance=-1.0).fit(*(2 * np.asarray(part, float) for part in DATA[kind]))
    assert vars(model) == {**before, "tolerance": -1.0}


@pytest.mark.parametrize("kind", EVERY, ids=named)
def test_every_parameter_has_a_constraint(kind: Any) -> None:
    assert set(kind().get_params()) <= set(kind._constraints)
    assert validated(kind._constraints, kind().get_params()).alpha is None


@pytest.mark.parametrize(
    ("kind", "goals"),
    [
        (SparseGPRegressor, {"alpha": 0.1, "max_points": 3}),
        (SparseGPClassifier, {"max_points": 3, "max_predict_us": 9.0}),
        (DeepGPRegressor, {"alpha": (0.1, 0.2), "max_cost": 30.0}),
        (GPLVM, {"alpha": 0.1, "max_points": 3}),
    ],
    ids=named,
)
def test_two_goals_are_refused_with_both_named(kind: Any, goals: dict[str, Any]) -> None:
    first, second = (f"`{name}` {value!r}" for name, value in goals.items())
    with pytest.raises(InputError, match="in one way only") as error:
        kind(**goals).fit(*DATA[kind])
    assert f"got {first} and {second}." in str(error.value)


@pytest.mark.parametrize("kind", EVERY, ids=named)
def test_paper_schedule_without_alpha_is_refused(kind: Any) -> None:
    with pytest.raises(InputError, match="`schedule='paper'` needs a number for `alpha`"):
        kind(schedule="paper").fit(*DATA[kind])


@pytest.mark.filterwarnings("ignore:the latent positions")
@pytest.mark.parametrize("kind", EVERY, ids=named)
def test_callbacks_may_be_several(kind: Any) -> None:
    first, second = list[Any](), list[Any]()
    for callbacks in ([first.append, second.append], first.append, None):
        kind(**QUICK[kind], callbacks=callbacks).fit(*DATA[kind])
    assert len(second) > 0
    assert len(first) == 2 * len(second)


def test_tensor_copies_numbers_of_any_type_and_strides() -> None:
    values = np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::-1]
    found = tensor(values)
    assert found.dtype == torch.float64
    assert found.tolist() == [[2, 1, 0], [5, 4, 3]]
    assert tensor(np.array(["3", "4.5"])).tolist() == [3, 4.5]


def test_tensor_of_strings_is_refused() -> None:
    with pytest.raises(InputError, match=r"`y` must be numbers; got 'many'\. Use a classifier"):
        tensor(np.array(["3", "many"]))
