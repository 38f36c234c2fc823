"""Values that estimators hold: files whose values break a rule are refused, others are restored."""

from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch

import winnowgp.estimators.serialization  # noqa: F401 - registers the values
from winnowgp.bounds.evidence import Evidence
from winnowgp.bounds.streaming import Memory
from winnowgp.data import Standardiser
from winnowgp.errors import ModelFileError
from winnowgp.estimators.rows import TargetScaler
from winnowgp.estimators.stream_records import StreamRecord
from winnowgp.io.registry import deserialise, serialise
from winnowgp.selection import Frontier
from winnowgp.selection.subset_samples import SubsetSamples

ONES = torch.ones(2, dtype=torch.float64)
MEMORY = Memory(
    torch.zeros(3, 1).double(), torch.eye(3).double()[None], torch.ones(3, 1), ONES[0], 5
)
RECORD = StreamRecord(9.0, 9.0, 1, 0.0, (), (0, 1), (0, 1, 2), 3, (MEMORY,))
SAMPLES = SubsetSamples(
    torch.zeros(1, 4, 2) > 0, torch.zeros(1, 4), torch.zeros(1, 2), torch.zeros(3)
)
SINGLE = torch.tensor([[False, False], [True, False]])
RULES: list[tuple[Any, str]] = [
    (Standardiser(ONES, torch.tensor([1.0, 0.0])), "positive scales"),
    (TargetScaler(Standardiser(ONES, ONES), single=True), "one column for one target"),
    (Frontier(torch.tensor([0.0, nan]), SINGLE, 4), "bounds that are numbers"),
    (Frontier(ONES, SINGLE.flip(0), 4), "subsets of 0, 1, 2"),
    (Evidence(2.0, 1.0, "trace"), "a lower bound below the upper one"),
    (replace(SAMPLES, log_weights=torch.zeros(2)), "a weight for each size"),
    (replace(RECORD, count=0), "batches with rows"),
    (replace(RECORD, remembered=10.0), "no more rows in memory than were seen"),
    (replace(RECORD, points=(1, 1)), "different numbers of its points"),
    (replace(RECORD, points=(0, 3)), "different numbers of its points"),
    (replace(RECORD, memory_points=(1, 2, 0), points=(0, 1), arrived=2), "different numbers"),
    (replace(RECORD, points=(2,), memory_points=(0, 1), memories=()), "all inducing points"),
    (replace(RECORD, memory_points=(0, 1)), "a number for each point of its memory"),
    (replace(RECORD, noise_share=1.5 * ONES[0]), "a share of the noise between 0 and 1"),
    (replace(MEMORY, N=0), "rows"),
    (replace(MEMORY, residual=ONES), "one residual, or one of each output"),
    (replace(MEMORY, fixed=replace(MEMORY, y=torch.ones(3, 2))), "the same points and outputs"),
]


@pytest.mark.parametrize(("value", "rule"), RULES)
def test_value_that_breaks_a_rule_is_refused(value: Any, rule: str) -> None:
    with pytest.raises(ModelFileError, match=f"a {type(value).__name__} must have {rule}"):
        deserialise(serialise("Model", value))


LOST = replace(MEMORY, lost=ONES[0])
SHARED = replace(RECORD, memories=(LOST,), noise_share=0.7 * ONES[0])


@pytest.mark.parametrize(
    "value", [RECORD, SHARED, MEMORY, SAMPLES], ids=["record", "share", "memory", "samples"]
)
def test_value_that_keeps_the_rules_is_restored(value: Any) -> None:
    archive = serialise("Model", value)
    again = serialise("Model", deserialise(archive))
    assert again.outline == archive.outline
    assert all(torch.equal(again.tensors[name], each) for name, each in archive.tensors.items())
