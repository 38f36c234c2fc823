"""Tables as their owners keep them: odd cells, separators, signs, dates, codes, wrong names."""

import csv
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from helpers.commands import refusal
from helpers.forgery import contents, file_content
from helpers.short_fits import short_fits
from winnowgp import TabularModel, fit_table, load
from winnowgp.cli.app import run
from winnowgp.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::winnowgp.errors.RandomSplitWarning")

N = 60
QUICK = "--kernel rbf --max-points 5 --test-size 0.1"


def columns() -> dict[str, list[Any]]:
    rng = np.random.default_rng(3)
    size = rng.integers(40, 200, N) * 10
    price = 1500.0 * size + rng.normal(scale=5000, size=N)
    return {
        "house": list(range(1, N + 1)),
        "size": [f"{s:,}" for s in size],
        "rooms": [str(1 + s // 400) for s in size],
        "zip": [f"0{s % 7}139" for s in size],
        "alley": ["NA" if s % 20 else "paved" for s in size],
        "sold": [f"{1 + i % 28:02d}/{1 + i % 12:02d}/2024" for i in range(N)],
        "tax": [f"{1 + i % 9 / 10:.1f}%" for i in range(N)],
        "garden": ["" if i % 15 == 0 else str(i % 40) for i in range(N)],
        "price": [f"${p:,.2f}" for p in price],
    }


def write(path: Path, table: dict[str, list[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(table), *zip(*table.values(), strict=True)])
    return path


def fit(path: Path, options: str, output: Path | None = None) -> int:
    model = output or path.with_suffix(".winnow")
    with short_fits():
        return run(["fit", str(path), *f"{options} {QUICK}".split(), "-o", str(model)])


@pytest.fixture(scope="module")
def houses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with separators, signs, codes and dates."""
    return write(tmp_path_factory.mktemp("houses") / "houses.csv", columns())


OPTIONS = "-t price --id house --categorical alley --decimal . --missing impute --drop rooms"


@pytest.fixture(scope="module")
def model(houses: Path) -> Path:
    assert fit(houses, f"{OPTIONS} --quiet") == 0
    return houses.with_suffix(".winnow")


def test_info_shows_what_became_of_each_column(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", str(model), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert {c["name"]: (c["kind"], c["missing"]) for c in info["inputs"]} == {
        "size": ("number", 0),
        "zip": ("number", 0),
        "alley": ("category", 0),
        "sold": ("date", 0),
        "tax": ("number", 0),
        "garden": ("number", 4),
    }
    assert [(c["name"], c["kind"]) for c in info["ignored_columns"]] == [
        ("house", "identifier"),
        ("rooms", "dropped"),
    ]
    notes = {c["name"]: c["note"] for c in info["inputs"]}
    assert notes["size"] == "commas separate thousands"
    assert notes["tax"] == "in %"
    assert notes["sold"] == "dates are day-first"
    assert notes["zip"].startswith("codes with leading zeros")
    assert run(["info", str(model)]) == 0
    text = capsys.readouterr().out
    for words in ("target, number", "identifier", "dropped", "category", "date", "missing"):
        assert words in text


def test_predictions_read_a_new_table_in_the_notation_of_the_first(
    model: Path, houses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = columns()
    plain["size"] = [s.replace(",", "") for s in plain["size"]]
    plain["price"] = [""] * N
    predictions = []
    for path in (houses, write(tmp_path / "plain.csv", plain)):
        assert run(["predict", str(model), str(path)]) == 0
        predictions.append(list(csv.DictReader(capsys.readouterr().out.splitlines())))
    assert predictions[0] == predictions[1]
    actual = [float(p.strip("$").replace(",", "")) for p in columns()["price"]]
    error = np.array([float(row["mean"]) for row in predictions[0]]) - actual
    assert np.sqrt(np.mean(error**2)) < 0.2 * np.std(actual)


def test_fit_prints_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = {"a": list(range(30)), "b": ["x", "y"] * 15, "y": [i % 7 for i in range(30)]}
    assert fit(write(tmp_path / "a.csv", table), "-t y") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("│ b" in line and "category" in line and "2: x, y" in line for line in lines)
    assert any("│ a" in line and "number" in line and "perhaps an" in line for line in lines)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rooms": "many"}, "'rooms' has numbers in all but 1 of 60 rows, where it has 'many'"),
        ({"price": "sold"}, "'price' has numbers in all but 1 of 60 rows"),
        ({}, "'2,698' may be 2698 or 2.698"),
    ],
)
def test_fit_odd_or_ambiguous_cell_is_explained(
    change: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {"rooms": columns()["rooms"], "price": list(range(40)) + [7] * 20}
    if not change:
        table["area"] = ["2,698" if i % 2 else "950" for i in range(N)]
    for name, value in change.items():
        table[name][3] = value
    assert fit(write(tmp_path / "a.csv", table), "-t price") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "write them with points" not in error


@pytest.mark.parametrize(("option", "mean"), [("--decimal .", 2698.0), ("--decimal ,", 2.698)])
def test_fit_decimal_option_decides(option: str, mean: float, tmp_path: Path) -> None:
    table = {"x": ["1,250", "2,500"] * 20, "y": ["2,698", "2,698"] * 20}
    table["y"][0] = "2,699"
    assert fit(write(tmp_path / "a.csv", table), f"-t y {option} --task regression --quiet") == 0
    summary = load(tmp_path / "a.winnow").summary
    assert summary["target_summary"]["spread"][0] == pytest.approx(mean)


def test_fit_ambiguous_dates_need_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {"d": [f"0{1 + i % 9}/05/2024" for i in range(30)], "y": list(range(30))}
    path = write(tmp_path / "a.csv", table)
    assert fit(path, "-t y") == 2
    assert "`--dates day-first`" in capsys.readouterr().err
    assert fit(path, "-t y --dates month-first --quiet") == 0
    assert load(tmp_path / "a.winnow").summary["columns"][0]["spread"][-1] == 19_971  # 5 September


def test_fit_misspelt_column_is_reported_before_pytorch_is_imported(houses: Path) -> None:
    code = (
        "import sys\nfrom winnowgp.cli.app import run\n"
        f"code = run(['fit', {str(houses)!r}, '-t', 'prize'])\n"
        "heavy = {'torch', 'sklearn', 'scipy', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'{code} {sorted(heavy)}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "`--target` must name columns of the table; 'prize' is not among" in done.stderr
    assert "Did you mean 'price'?" in done.stderr
    assert done.stderr.endswith("2 []\n")


def test_table_without_a_line_of_names_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "numbers.csv"
    path.write_text("1.5,-2,1e3\n2,3,4\n", encoding="utf-8")
    output = refusal(["fit", str(path), "-t", "price"], capfd)
    assert "'price' is not among '1.5', '-2', '1e3'. The first line must name the columns" in output


@pytest.mark.parametrize("option", ["--drop", "--id", "--categorical"])
def test_fit_misspelt_option_names_it(
    option: str, houses: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", str(houses), "-t", "price", option, "hause"]) == 2
    assert f"`{option}` must name columns of the table; 'hause'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--drop", "--categorical"])
def test_fit_repeated_option_names_columns_of_each(
    option: str, houses: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", str(houses), "-t", "price", option, "hause", option, "hoose"]) == 2
    assert "'hause', 'hoose'" in capsys.readouterr().err


def test_info_of_a_missing_file_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "missing.winnow"]) == 2
    message = "winnow: missing.winnow does not exist; give a file that `winnow fit` wrote.\n"
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("path", "value"), [("rows", 0), ("train_rows", 0), ("rows", 1), ("quality rows", 0)]
)
def test_forged_number_of_rows_is_refused(
    path: str, value: int, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outline, tensors = contents(model)
    forged = outline["value"]["state"]["summary"]
    *outer, last = path.split()
    for name in outer:
        forged = forged[name]
    forged[last] = value
    file = tmp_path / "forged.winnow"
    file.write_bytes(file_content(outline, tensors))
    for command in (["info", str(file)], ["predict", str(file), "rows.csv"]):
        assert run(command) == 2
        assert "forged.winnow" in capsys.readouterr().err


def test_files_without_notes_and_ignored_columns_load(model: Path, tmp_path: Path) -> None:
    """Such files were written by earlier versions."""
    outline, tensors = contents(model)
    summary = outline["value"]["state"]["summary"]
    del summary["ignored"], summary["target_summary"]["note"]
    for column in summary["columns"]:
        del column["note"]
    file = tmp_path / "earlier.winnow"
    file.write_bytes(file_content(outline, tensors))
    assert run(["info", str(file)]) == 0
    assert isinstance(load(file), TabularModel)


def test_plot_prints_a_note_about_characters_that_no_font_has(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outline, tensors = contents(model)
    outline["value"]["state"]["summary"]["target"] = "\U0010fff0"  # of a private area
    file = tmp_path / "private.winnow"
    file.write_bytes(file_content(outline, tensors))
    assert run(["plot", str(file), "-o", str(tmp_path / "a.png")]) == 0
    assert "winnow: no installed font has the characters of" in capsys.readouterr().err


FRAME = {name: columns()[name] for name in ("sold", "rooms", "price")}


@pytest.fixture(scope="module")
def frame_model() -> TabularModel:
    with short_fits():
        return fit_table(
            pandas.DataFrame(FRAME), "price", kernel="rbf", max_points=4, test_size=0.1
        )


@pytest.mark.parametrize("package", ["pandas", "polars", "pyarrow"])
def test_fit_table_and_predict_take_data_frames(package: str, frame_model: TabularModel) -> None:
    module = import_module(package)
    frame = module.table(FRAME) if package == "pyarrow" else module.DataFrame(FRAME)
    expected = frame_model.predict(FRAME)["mean"]
    np.testing.assert_allclose(frame_model.predict(frame)["mean"], expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(InputError, match="`target` must name columns of the table; 'cost'"):
        fit_table(frame, "cost")
