"""States in words and tensors, and back."""

from math import inf, isnan, nan
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from winnowgp.errors import NotSaveableError
from winnowgp.io import Packed, packed_state, read_packed, state_from, write_packed

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


@pytest.mark.parametrize(
    ("scalar", "plain"),
    [
        (np.float64(0.1), 0.1),
        (np.float64(-inf), -inf),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.int64(-3), -3),
        (np.uint8(255), 255),
        (np.str_("word"), "word"),
    ],
)
def test_scalars_of_numpy_come_back_as_plain_numbers(scalar, plain, tmp_path: Path) -> None:
    state = {"a": scalar, "b": [(scalar,)], "c": {scalar: scalar}}
    write_packed(packed_state("State", state), tmp_path / "state")
    found = state_from(read_packed(tmp_path / "state"))
    assert found == {"a": plain, "b": [(plain,)], "c": {plain: plain}}
    assert {type(x) for x in (found["a"], *found["b"][0], *found["c"])} == {type(plain)}


@pytest.mark.parametrize("scalar", [torch.tensor(0.1), torch.tensor(True), torch.tensor(7)])
def test_tensors_of_no_dimensions_come_back_as_themselves(scalar) -> None:
    found = state_from(packed_state("State", {"a": scalar}))["a"]
    assert (found.dtype, found.shape) == (scalar.dtype, ())
    assert torch.equal(found, scalar)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (object(), "got object[.]"),
        (b"bytes", "got bytes[.]"),
        (1j, "got complex[.]"),
        ({"a": [0, {1, 2}]}, "got set for `a.1`[.]"),
        ({"a": {3: (np.zeros(2),)}}, "got ndarray for `a.3.0`[.]"),
        ({"a": np.complex128(1j)}, "got complex for `a`[.]"),
        ({"a": np.longdouble(1)}, "got longdouble for `a`[.]"),
        ({"a": np.datetime64("2020-01-01")}, "got date for `a`[.]"),
        ({(1, object()): 0}, "got object for"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_has_no_words_is_named(state, named: str) -> None:
    with pytest.raises(NotSaveableError, match=named):
        packed_state("State", state)


@pytest.mark.parametrize(
    "outline",
    [
        {"list": [{"tensor": "0"}, {"tensor": "0"}]},
        {"tensor": "1"},
        {"set": [1]},
        {"list": [], "dict": {}},
    ],
    ids=["a tensor twice", "a tensor that is not there", "another kind", "two kinds"],
)
def test_what_no_state_says_is_refused(outline) -> None:
    with pytest.raises((KeyError, ValueError)):
        state_from(Packed("State", {"state": outline}, {"0": torch.zeros(3)}))
