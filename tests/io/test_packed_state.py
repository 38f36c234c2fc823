"""States in words and tensors, and back."""

from math import inf, isnan, nan
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnowgp.errors import NotSaveableError
from winnowgp.io import packed_state, read_packed, state_from, write_packed

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
STATES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=9), inner)
    ),
    max_leaves=20,
)


@given(STATES)
def test_any_state_comes_back(state) -> None:
    found = state_from(packed_state("State", state))
    assert found == state
    assert repr(found) == repr(state)


def test_tensors_of_every_kind_come_back_from_a_file(tmp_path: Path) -> None:
    tensors = [
        torch.zeros(0, 3, dtype=torch.float64),
        torch.tensor(1.5),
        torch.tensor([True, False]),
        torch.arange(6).reshape(2, 3).mT,
        torch.tensor([inf, nan, -0.0], dtype=torch.float64),
        torch.Generator().manual_seed(3).get_state(),
    ]
    write_packed(packed_state("State", {"a": {"b": tensors}, "c": nan}), tmp_path / "state")
    found = state_from(read_packed(tmp_path / "state"))
    assert isnan(found["c"])
    for before, after in zip(tensors, found["a"]["b"], strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert before.contiguous().numpy().tobytes() == after.numpy().tobytes()
        # As aligned as any tensor, so that products with it round alike.
        assert after.data_ptr() % 64 == 0


@pytest.mark.parametrize("state", [object(), {"a": [{1, 2}]}, b"bytes", 1j])
def test_what_has_no_words_is_named(state) -> None:
    with pytest.raises(NotSaveableError, match=f"got {type(state).__name__}|got set"):
        packed_state("State", state)
