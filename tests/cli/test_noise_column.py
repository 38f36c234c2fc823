"""`winnow fit --noise-column`: known noise variances in a column of the table."""

import csv
from pathlib import Path

import numpy as np
import pytest

import winnowgp
from helpers.short_fits import shortest_fits
from winnowgp import fit_table
from winnowgp.cli.app import run
from winnowgp.tabular import evaluate_model
from winnowgp.tabular import model as tabular_model
from winnowgp.tabular.splits import held_out_split

N = 90
HEADER = ["x", "s2", "y"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the rows have noise of a hundred times the standard deviation of the others."""
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 6, N)
    s2 = np.where(rng.random(N) < 0.5, 1.0, 1e-4)
    y = np.sin(x) + np.sqrt(s2) * rng.normal(size=N)
    path = tmp_path_factory.mktemp("noise") / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([HEADER, *zip(x, s2, y, strict=True)])
    return path


@pytest.fixture(scope="module")
def model(table: Path) -> Path:
    path = table.parent / "model.winnow"
    words = ["-t", "y", "--noise-column", "s2", "--kernel", "rbf", "--max-points", "8"]
    with shortest_fits():
        assert run(["fit", str(table), *words, "-o", str(path), "--quiet"]) == 0
    return path


def columns(text: str) -> dict[str, np.ndarray]:
    rows = list(csv.DictReader(text.splitlines()))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def test_noise_column_is_no_input_and_is_used_for_held_out_rows(table: Path, model: Path) -> None:
    fitted = winnowgp.load(model)
    assert [column.name for column in fitted.encoder.columns] == ["x"]
    assert fitted.noise_column == "s2"
    quality = fitted.summary["quality"]
    assert quality is not None
    # With common noise the difference is 0.3 nats.
    metric = quality["metrics"][2]
    assert metric["value"] > metric["baseline"] + 1
    data = columns(table.read_text(encoding="utf-8"))
    again = evaluate_model(fitted, winnowgp.read_table(table))["metrics"][2]["value"]
    x, y = data["x"][:, None], data["y"]
    nats = fitted.estimator.log_density(x, y, noise_variance=data["s2"])
    assert again == pytest.approx(nats.mean(), rel=1e-9)


def test_info_names_the_noise_column_and_the_learnt_noise(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", str(model)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "variances in column 's2'; learnt in addition: a standard deviation of 0.0" in shown
    assert "│ s2 │ noise variance │" in shown


def test_update_uses_the_noise_column_and_needs_it(
    table: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, fitted = winnowgp.read_table(table), winnowgp.load(model)
    result = winnowgp.tabular.update_table(fitted, rows, test_size=0.25)
    _, test = held_out_split(rows, 0.25)
    x, y, s2 = (np.array([float(v) for v in rows.values[name]])[test] for name in ("x", "y", "s2"))
    before = fitted.estimator.log_density(x[:, None], y, noise_variance=s2).mean()
    assert result.density_before == pytest.approx(before)
    assert result.density is not None
    # Without the known noise of the new rows it is far lower.
    assert result.density > before - 0.1
    assert result.model.estimator._record().memories[0].fixed is not None
    without = tmp_path / "without.csv"
    text = table.read_text(encoding="utf-8").replace("s2", "other", 1)
    without.write_text(text, encoding="utf-8")
    assert run(["update", str(model), str(without), "-o", str(tmp_path / "new.winnow")]) == 2
    assert "the noise column of the fit" in " ".join(capsys.readouterr().err.split())


def test_predict_uses_the_noise_column_if_the_table_has_it(
    table: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["predict", str(model), str(table)]) == 0
    sd = columns(capsys.readouterr().out)["sd"]
    data = columns(table.read_text(encoding="utf-8"))
    fitted = winnowgp.load(model).estimator
    _, latent = fitted.predict(data["x"][:, None], return_std=True, observed=False)
    np.testing.assert_allclose(sd**2, latent**2 + fitted.noise_ + data["s2"], rtol=1e-9)
    bare = tmp_path / "bare.csv"
    bare.write_text("x\n1.5\n2.5\n", encoding="utf-8")
    assert run(["predict", str(model), str(bare)]) == 0
    captured = capsys.readouterr()
    assert "the noise column 's2' is missing" in captured.err
    assert (columns(captured.out)["sd"] < 0.3).all()


def test_evaluate_and_compare_say_that_the_noise_column_is_missing(
    table: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare.csv"
    bare.write_text(table.read_text(encoding="utf-8").replace("s2", "other", 1), encoding="utf-8")
    words = [["evaluate", str(model)], ["compare", str(model), str(model)]]
    for command in words:
        for option in ([], ["--json"]):
            assert run([*command, str(bare), *option]) == 0
            assert "noise column 's2' of model.winnow is missing" in capsys.readouterr().err
        assert run([*command, str(table)]) == 0
        assert "missing" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--noise-column", "s3"], "s3"),
        (["--noise-column", "y"], "must not be the target"),
        (["--noise-column", "s2", "--likelihood", "student-t"], "'student-t'"),
        (["--noise-column", "s2", "--log-target"], "`--log-target`"),
    ],
)
def test_bad_noise_column_is_an_error(
    table: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    positive = table.parent / "positive.csv"
    text = table.read_text(encoding="utf-8").splitlines()
    cells = [line.split(",") for line in text[1:]]
    lines = [text[0], *(f"{x},{s},{float(y) + 9}" for x, s, y in cells)]
    positive.write_text("\n".join(lines), encoding="utf-8")
    assert run(["fit", str(positive), "-t", "y", *words, "--quiet"]) != 0
    assert message in capsys.readouterr().err


def test_negative_variance_names_the_row() -> None:
    rows = {"x": np.arange(9.0), "s2": np.r_[np.ones(4), -1, np.ones(4)], "y": np.arange(9.0) % 4}
    with pytest.raises(winnowgp.errors.InputError, match="got -1 in row 5"):
        fit_table(rows, "y", noise_column="s2")
    rows["s2"] = np.array(["a"] * 9)
    with pytest.raises(winnowgp.errors.InputError, match="it has strings"):
        fit_table(rows, "y", noise_column="s2")


def test_negative_variance_in_a_later_chunk_names_the_line_of_the_file(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tabular_model, "rows_at_once", lambda _: 3)
    path = tmp_path / "new.csv"
    path.write_text("x,s2\n" + "1.5,0.1\n" * 7 + "1.5,-1\n", encoding="utf-8")
    assert run(["predict", str(model), str(path)]) != 0
    assert "got -1 in row 8" in capsys.readouterr().err
