"""What MLflow itself has of a fit that was watched."""

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from winnowgp.errors import MissingExtraError
from winnowgp.integrations import MLflow
from winnowgp.training import Progress


def step(number: int, objective: float = 0.0) -> Progress:
    return Progress(
        "inclusion", number, 20, objective, (torch.full((4,), 0.5),), (torch.zeros(4, 1),)
    )


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow", reason="needs winnowgp[mlflow]")
    # Files rather than a server or a data base, which the slim package has not.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "runs").as_uri()


def client(callback: MLflow) -> Any:
    return pytest.importorskip("mlflow").tracking.MlflowClient(callback.tracking_uri)


def curve(callback: MLflow, name: str) -> list[tuple[int, float]]:
    found = client(callback).get_metric_history(callback.run_id, name)
    return [(each.step, each.value) for each in found]


def run_of(callback: MLflow) -> Any:
    return client(callback).get_run(callback.run_id)


def test_metrics_and_words_are_in_the_run(runs: str) -> None:
    with MLflow("hills", run_name="first", tracking_uri=runs, params={"alpha": 0.5}) as callback:
        # More than are sent at once.
        for number in range(1, 301):
            callback(step(number, float(number)))
    run = run_of(callback)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params == {"alpha": "0.5"}
    assert curve(callback, "objective/inclusion") == [(n, float(n)) for n in range(1, 301)]
    assert curve(callback, "expected points") == [(n, 2.0) for n in range(1, 301)]
    assert curve(callback, "points")[-1] == (300, 4.0)


def test_a_run_that_fails_says_so(runs: str) -> None:
    callback = MLflow("hills", tracking_uri=runs)

    def failing() -> None:
        with callback:
            callback(step(1))
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert run_of(callback).info.status == "FAILED"


def test_a_fit_that_goes_on_goes_on_with_its_run(runs: str) -> None:
    killed = MLflow("hills", tracking_uri=runs)
    for number in (1, 2):
        killed(step(number, float(number)))
    memory = killed.state_dict()
    killed(step(3, -1.0))
    again = deepcopy(MLflow("hills", tracking_uri=runs))
    again.load_state_dict(memory)
    again(step(3, 3.0))
    again.close()
    assert again.run_id == killed.run_id
    assert curve(again, "objective/inclusion") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_the_extra_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'winnowgp\[mlflow\]'"):
        MLflow()
