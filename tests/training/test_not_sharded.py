"""Warnings where several processes repeat the same work."""

import warnings

import numpy as np
import pytest
import torch

from winnowgp.data import Dataset
from winnowgp.data.distributed import ProcessGroup
from winnowgp.errors import NotShardedWarning
from winnowgp.estimators import SparseGPClassifier
from winnowgp.training.adam import Minibatches
from winnowgp.training.schedules import warn_not_sharded


def test_warn_not_sharded_warns_in_first_process() -> None:
    with pytest.warns(
        NotShardedWarning, match=r"each of 3 processes repeats the work of this fit: so be it\."
    ):
        warn_not_sharded(ProcessGroup(0, 3), "so be it")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_not_sharded(ProcessGroup(1, 3), "so be it")
        warn_not_sharded(ProcessGroup(0, 1), "so be it")


def test_minibatches_of_all_rows_warn() -> None:
    data = Dataset.of(torch.zeros(8, 1), torch.zeros(8))
    generator = torch.Generator()
    for size in (None, 8):
        with pytest.warns(NotShardedWarning, match="with a `batch_size` below all rows"):
            Minibatches(data, size, generator, process_group=ProcessGroup(0, 2))
    Minibatches(data, 4, generator, process_group=ProcessGroup(0, 2))


def test_estimator_of_arrays_under_torchrun_warns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    X = np.linspace(0, 1, 8)[:, None]
    settings = {"schedule": "paper", "alpha": 0.1, "epochs": (0, 1, 0), "n_candidates": 3}
    classifier = SparseGPClassifier(**settings, random_state=0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(
        NotShardedWarning, match=r"2 processes .* `fit\(shard\(.* minibatches of classes"
    ):
        classifier.fit(X, X[:, 0] > 0.5)
