"""Invalid input and internal errors: one line each, and different exit codes."""

import os
import re
import warnings
from pathlib import Path

import pytest

import winnowgp
from helpers.commands import refusal
from winnowgp.cli.app import run
from winnowgp.errors import CheckpointWarning, InputError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fit SHOP -t z", "`--target` must name columns.*'z' is not among 'id', 'x'"),
        ("fit SHOP -t y --drop zz", "'zz' is not among"),
        ("fit SHOP -t y --drop y", "`--target` must not be in `--drop`"),
        ("fit SHOP -t y --id id", "column 'x' has 3 missing values, the first in row 8"),
        (
            "fit SHOP -t x --id id",
            "the target 'x' must not be missing; it is in 3 rows, first in row 8",
        ),
        ("fit SHOP -t y --missing impute", "column 'id' has 48 different strings.*--id"),
        ("fit SHOP -t town --task regression", "the target 'town' must be numeric for regression"),
        (
            "fit SHOP -t y --task counts",
            "integers of at least 0 for counts; it has -0.9985 in row 1",
        ),
        ("fit SHOP -t y --task magic", "`--task` must be"),
        ("fit SHOP -t id", "2 to 50 different values for classification"),
        ("fit SHOP -t y --alpha many", "`--alpha` must be auto or a number"),
        ("fit SHOP -t y --test-size 1", "`--test-size` must be at least 0 and below 1"),
        ("fit SHOP -t y --id id --drop x --kernel cubic", "the kernels are rbf"),
        (
            "fit SHOP -t y --id id --drop x --device quantum",
            r"`--device` must be a device of this machine.* got 'quantum'\.$",
        ),
        ("fit SHOP -t y --id id --drop x --alpha -1", "`--alpha` must be"),
        ("fit SHOP -t y --missing guess", "`--missing` must be 'error' or 'impute'"),
        ("fit SHOP -t y -o nowhere/m.winnow", "folder that exists"),
        ("predict y.winnow SHOP -o out.xlsx", r"must end in one of \.csv"),
        ("predict y.winnow SHOP --level 95", "`--level` must lie between 0 and 1"),
        ("predict SHOP SHOP", "is not a winnowgp model"),
        ("predict nope.winnow SHOP", "nope.winnow does not exist; give a file"),
        ("predict . SHOP", "is a folder"),
        ("predict posterior.winnow SHOP", "holds a SparseGPRegressor, saved from Python"),
        ("plot y.winnow --what art", "`--what` must be one of"),
        ("plot y.winnow -o a.doc", r"must end in one of \.png"),
        ("data moon", "`NAME` must be one of"),
        ("data energy -o a.csv", r"`--output` must end in \.csv\.gz; got 'a\.csv'"),
        (
            "fit SHOP -t y --id id --drop x --test-file one.csv",
            "`--test-file` must have the target",
        ),
    ],
)
def test_invalid_input_is_one_line_and_exit_code_2(
    arguments: str,
    message: str,
    shop: Path,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = arguments.replace("SHOP", str(shop)).replace("y.winnow", str(models["y"])).split()
    if "posterior.winnow" in typed:
        model = winnowgp.load(models["y"]).estimator
        typed[1] = str(model.save(shop.parent / "posterior.winnow"))
    if "one.csv" in typed:
        typed[-1] = str(shop.parent / "one.csv")
        Path(typed[-1]).write_text("a\n1\n", encoding="utf-8")
    output = refusal(typed, capfd)
    assert re.search(message, output), output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["fit PIPE -t y", "update y.winnow PIPE", "fit - -t y"])
def test_tables_that_are_read_several_times_are_no_pipes(
    command: str, models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    typed = command.replace("PIPE", str(pipe)).replace("y.winnow", str(models["y"])).split()
    output = refusal([*typed, "-o", str(tmp_path / "new.winnow")], capfd)
    assert re.search(r"`DATA` must be a file, because it is read several times; got \S+, a", output)


def test_help_names_what_arguments_are_in_whole_sentences(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    assert "..." not in capfd.readouterr().out.split("Commands:")[1]
    assert run(["fit", "--help"]) == 0
    shown = capfd.readouterr().out
    assert re.search(r"Usage: winnow fit \[OPTIONS\] \W?DATA", shown)
    assert "--target COLUMN " in shown
    assert "list[" not in shown


def test_unknown_command_shows_usage(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run([]) == 2
    assert "frontier" in "".join(capfd.readouterr())
    assert run(["fly"]) == 2
    assert "No such command" in capfd.readouterr().err
    assert run(["fit"]) == 2
    assert "Missing argument" in capfd.readouterr().err


def test_internal_error_has_exit_code_1_and_no_traceback(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(path: Path) -> None:
        raise ZeroDivisionError("no\nway")

    monkeypatch.setattr("winnowgp.cli.options.load_summary", broken)
    assert run(["info", str(models["y"])]) == 1
    output = capfd.readouterr().err
    assert "internal error (ZeroDivisionError: no way)" in output
    assert output.count("\n") == 1


def test_warnings_of_other_libraries_are_hidden(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load(path: Path) -> None:
        warnings.warn("of a library", FutureWarning, stacklevel=1)
        warnings.warn("of ours", CheckpointWarning, stacklevel=1)
        raise InputError("it is no model.")

    monkeypatch.setattr("winnowgp.cli.options.load_summary", load)
    assert run(["info", str(models["y"])]) == 2
    assert capfd.readouterr().err == "winnow: of ours\nwinnow: it is no model.\n"
