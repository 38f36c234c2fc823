"""Values survive serialisation, and what cannot be serialised is named."""

from math import inf, isnan, nan
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import ModelFileError, NotSaveableError
from winnowgp.io.format import Archive, read_archive, write_archive
from winnowgp.io.registry import deserialise, load_field, matches, register, serialise

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
STATES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=9), inner)
    ),
    max_leaves=20,
)


@given(STATES)
def test_deserialise_restores_any_value(state) -> None:
    restored = deserialise(serialise("Checkpoint", state))
    assert restored == state
    assert repr(restored) == repr(state)


def test_deserialise_restores_tensors_of_every_dtype_from_a_file(tmp_path: Path) -> None:
    tensors = [
        torch.zeros(0, 3, dtype=torch.float64),
        torch.tensor(1.5),
        torch.tensor([True, False]),
        torch.arange(6).reshape(2, 3).mT,
        torch.tensor([inf, nan, -0.0], dtype=torch.float64),
        torch.Generator().manual_seed(3).get_state(),
    ]
    write_archive(serialise("Checkpoint", {"a": {"b": tensors}, "c": nan}), tmp_path / "state")
    restored = deserialise(read_archive(tmp_path / "state"))
    assert isnan(restored["c"])
    for before, after in zip(tensors, restored["a"]["b"], strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert before.contiguous().numpy().tobytes() == after.numpy().tobytes()
        # Aligned like any tensor, so that products with it round alike.
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
def test_deserialise_returns_numpy_scalars_as_python_numbers(scalar, plain, tmp_path: Path) -> None:
    state = {"a": scalar, "b": [(scalar,)], "c": {scalar: scalar}}
    write_archive(serialise("Checkpoint", state), tmp_path / "state")
    restored = deserialise(read_archive(tmp_path / "state"))
    assert restored == {"a": plain, "b": [(plain,)], "c": {plain: plain}}
    assert {type(x) for x in (restored["a"], *restored["b"][0], *restored["c"])} == {type(plain)}


@pytest.mark.parametrize("scalar", [torch.tensor(0.1), torch.tensor(True), torch.tensor(7)])
def test_deserialise_restores_tensors_without_dimensions(scalar) -> None:
    restored = deserialise(serialise("Checkpoint", {"a": scalar}))["a"]
    assert (restored.dtype, restored.shape) == (scalar.dtype, ())
    assert torch.equal(restored, scalar)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (object(), "the value must .* got object,"),
        (b"bytes", "the value must .* got bytes,"),
        (1j, "the value must .* got complex,"),
        ({"a": [0, {1, 2}]}, "`a.1` must .* got set,"),
        ({"a": {3: (np.zeros(2, dtype=complex),)}}, "`a.3.0` must .* got ndarray,"),
        ({"a": np.array(["word"])}, "`a` must .* got ndarray,"),
        ({"a": np.complex128(1j)}, "`a` must .* got complex,"),
        ({"a": np.longdouble(1)}, "`a` must .* got longdouble,"),
        ({"a": np.datetime64("2020-01-01")}, "`a` must .* got date,"),
        ({(1, object()): 0}, "must .* got object,"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_serialise_of_an_unknown_type_names_it(state, named: str) -> None:
    with pytest.raises(NotSaveableError, match=named):
        serialise("Checkpoint", state)


@pytest.mark.parametrize(
    "outline",
    [
        [{"$tensor": "0"}, {"$tensor": "0"}],
        {"$tensor": "1"},
        {"$set": [1]},
        {"$tuple": [], "$float": "1"},
        {"$float": "1", "other": 2},
        {"$object": "Unknown", "state": {}},
        {"$object": "Kernel"},
    ],
    ids=["twice", "missing", "unknown mark", "two marks", "other key", "unknown kind", "no state"],
)
def test_deserialise_of_an_invalid_outline_is_refused(outline) -> None:
    with pytest.raises((KeyError, ValueError)):
        deserialise(Archive("Checkpoint", outline, {"0": torch.zeros(3)}))


@pytest.mark.parametrize(
    "array",
    [np.zeros((0, 3)), np.eye(2, dtype=np.float32)[:, ::-1], np.array([True]), np.array(3)],
    ids=["empty", "strided", "bool", "no dimensions"],
)
def test_deserialise_restores_numeric_arrays(array, tmp_path: Path) -> None:
    write_archive(serialise("Checkpoint", (array, "x")), tmp_path / "a")
    restored, _ = deserialise(read_archive(tmp_path / "a"))
    assert (restored.dtype, restored.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(restored, array)


def test_deserialise_restores_tensors_under_keys_that_collide(tmp_path: Path) -> None:
    keys = ["a/b", "__metadata__", "", "\ud800", "$tensor", "ü"]
    state: dict[str, Any] = {key: torch.tensor(float(i)) for i, key in enumerate(keys)}
    state["a"] = {"b": torch.tensor(9.0), "": {"": torch.tensor(8.0)}}
    write_archive(serialise("Checkpoint", state), tmp_path / "a")
    restored = deserialise(read_archive(tmp_path / "a"))
    assert restored == state


def test_deserialise_checks_fields_and_shapes_before_building() -> None:
    class Line:
        def __init__(self, slope, level) -> None:
            self.slope, self.level = slope, level
            built.append(self)

    built: list[Line] = []
    fields = {"slope": Float[Tensor, "D P"], "level": Float[Tensor, " P"]}
    register("test: Line", Line, fields=fields)(Line)
    good = serialise("Model", Line(torch.ones(3, 2), torch.zeros(2)))
    assert torch.equal(deserialise(good).slope, torch.ones(3, 2))
    built.clear()
    for bad in (torch.zeros(3), torch.zeros(2, 1), torch.zeros(2).long(), torch.full((2,), nan)):
        with pytest.raises(ModelFileError, match="'level' of a test: Line must be Float"):
            deserialise(Archive("Model", good.outline, good.tensors | {"level": bad}))
    assert built == []


def test_load_field_builds_nothing_else(tmp_path: Path) -> None:
    class Pair:
        def __init__(self, first, second) -> None:
            self.first, self.second = first, second
            built.append(self)

    built: list[Pair] = []
    register("test: Pair", Pair, fields={"first": int | str, "second": Float[Tensor, " P"]})(Pair)
    write_archive(serialise("Model", Pair(3, torch.ones(2))), tmp_path / "a")
    built.clear()
    assert load_field(tmp_path / "a", "first", int) == ("test: Pair", 3)
    assert load_field(tmp_path / "a", "third", int) == ("test: Pair", None)
    with pytest.raises(ModelFileError, match="'first' of a test: Pair must be str; got int"):
        load_field(tmp_path / "a", "first", str)
    assert built == []
    write_archive(serialise("Model", {"first": 3}), tmp_path / "a")
    with pytest.raises(ModelFileError, match="does not understand"):
        load_field(tmp_path / "a", "first", int)


class Row(TypedDict):
    name: str
    counts: list[tuple[str, int]]


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, int, True),
        (True, int, False),
        (3.0, int, False),
        (3, float, True),
        (True, float, False),
        (None, float | None, True),
        ("x", float | None, False),
        ({"name": "a", "counts": [["b", 1]]}, Row, True),
        ({"name": "a", "counts": [["b", "1"]]}, Row, False),
        ({"name": "a", "counts": [["b"]]}, Row, False),
        ({"name": "a"}, Row, False),
        ({"name": "a", "counts": [], "more": 1}, Row, False),
        ([1, 2, 3], tuple[int, ...], True),
        ((1, "2"), tuple[int, ...], False),
        (3, tuple[int, ...], False),
        ({"a": 1.0}, dict[str, float], True),
        ({1: 1.0}, dict[str, float], False),
        ("ab", list[str], False),
    ],
)
def test_matches_of_a_value_and_a_type(value, hint, expected: bool) -> None:
    assert matches(value, hint) == expected
