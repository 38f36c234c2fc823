"""Libraries compared at the same parameters: the reference, and the rules of the tables."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="module")
def agreement() -> Any:
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield import_module("agreement")
    finally:
        sys.path.remove(folder)


def row(library: str, value: Any, **columns: Any) -> dict[str, Any]:
    standard = {"version": "1.0", "dtype": "float64", "variant": "", "case": "a"}
    return {"library": library, "value": value, "quantity": "collapsed bound"} | standard | columns


def rows_of(agreement: ModuleType, **values: float) -> list[dict[str, Any]]:
    """Return rows of all quantities, with the reference and winnowgp at 1."""
    return [
        row(library, value, quantity=quantity, dtype=dtype)
        for quantity in agreement.QUANTITIES
        for library, value, dtype in [
            (agreement.REFERENCE, 1.0, "mpf"),
            (agreement.OURS, 1.0, "float64"),
            *((name, value, "float64") for name, value in values.items()),
        ]
    ]


@pytest.mark.parametrize("copies", [1, 2])
def test_reference_values_equal_models_without_need_of_jitter(
    agreement: ModuleType, copies: int
) -> None:
    case = agreement.case(M=4, copies=copies, lengthscale=1.0, N=8)
    reference, ours = agreement.reference_values(case), agreement.our_quantities(case)
    assert set(ours) == set(reference) == set(agreement.QUANTITIES)
    for quantity, evaluate in ours.items():
        difference = agreement.relative_difference(quantity, evaluate(), reference[quantity])
        assert difference < 1e-8, quantity


def test_relative_difference_of_means_and_variances(agreement: ModuleType) -> None:
    value, expected = [1.0, 101.0], [2.0, 100.0]
    difference = agreement.relative_difference
    assert difference("collapsed mean", value, expected) == pytest.approx(0.01)
    assert difference("collapsed variance", value, expected) == pytest.approx(0.5)
    assert difference("collapsed bound", -1.5, -1.0) == pytest.approx(0.5)
    assert np.isnan(difference("collapsed mean", [np.nan, 100.0], expected))


def test_cell_marks_large_differences_and_failures(agreement: ModuleType) -> None:
    expected = row("winnowgp", 1.0)
    assert agreement.cell(row("a", 1.0 + 4e-9), expected) == "4e-9"
    assert agreement.cell(row("a", 1.002), expected) == "**2e-3**"
    assert agreement.cell(row("a", float("inf")), expected) == "**not finite**"
    assert agreement.cell({"quantity": "collapsed bound", "error": "E"}, expected) == "**fails**"
    assert agreement.cell(None, expected) == "–"


def test_float64_table_compares_peers_with_winnowgp(agreement: ModuleType) -> None:
    rows = rows_of(agreement, Peer=1.5)
    rows = [r for r in rows if (r["library"], r["quantity"]) != ("Peer", "upper bound")]
    for each in rows:
        if each["library"] == agreement.REFERENCE:
            each["value"] = 2.0
    ours, peer = agreement.float64_table(rows).splitlines()[2:]
    assert ours.split(" | ")[2:4] == ["**5e-1**", "**5e-1**"]
    assert peer.startswith("| | Peer 1.0 | **5e-1** | – | **5e-1** |")


def test_variant_table_shows_largest_difference_and_large_quantities(agreement: ModuleType) -> None:
    rows = rows_of(agreement)
    rows += [row("Peer", 1.0 + 2e-12, variant="v"), row("Peer", 1.0 + 4e-12, variant="w")]
    rows += [row("Peer", 1.0 + 3e-10, variant="v", quantity="upper bound")]
    rows += [row("Peer", None, variant="w", quantity="exact evidence") | {"error": "E"}]
    assert agreement.variant_table(rows).splitlines()[2:] == [
        "| Peer 1.0 | v | all | 3e-10 |",
        "| Peer 1.0 | w | the others | 4e-12 |",
        "| Peer 1.0 | w | exact evidence | **fails** |",
    ]


def test_float32_table_compares_with_reference(agreement: ModuleType) -> None:
    rows = rows_of(agreement)
    rows.append(row("Peer", 0.5, dtype="float32", quantity="collapsed variance"))
    first, second = agreement.float32_table(rows).splitlines()[2:]
    assert first == "| collapsed variance | Peer 1.0 | **5e-1** |"
    assert second == "| uncollapsed variance | Peer 1.0 | – |"
