"""Files that an earlier version saved load, and predict the numbers that it predicted."""

import json

import pytest
from measurements import compact, differences, predictions
from record import FILES, PREDICTIONS

import winnowgp

EXPECTED = json.loads((FILES / PREDICTIONS).read_text(encoding="utf-8"))


def test_saved_files_are_all_recorded() -> None:
    assert {path.stem for path in FILES.glob("*.winnow")} == set(EXPECTED)


# To infer latent positions by samples takes seconds; `SampledPosterior`, which both contain, is in
# a file of its own.
SLOW = {"GPLVM-poisson", "GPLVM-matern"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in EXPECTED],
)
def test_saved_file_predicts_the_recorded_numbers(name: str) -> None:
    found = compact(predictions(winnowgp.load(FILES / f"{name}.winnow")))
    assert list(differences(EXPECTED[name], found, name, infer_sites=1e-5)) == []


def test_differences_of_a_changed_number_names_it() -> None:
    expected = EXPECTED["SparseGPRegressor-fast"]
    found = json.loads(json.dumps(expected))
    found["mean"]["entries"][3] *= 1 + 1e-8
    (line,) = differences(expected, found, "model")
    assert line.startswith("model.mean: 1 entries differ, first entry 3")
