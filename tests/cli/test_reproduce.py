"""`winnow reproduce`, on a toy experiment and, marked slow, on all of them."""

import json
from pathlib import Path

import pytest

from helpers.toy_experiment import Toy
from winnowgp.cli.app import run
from winnowgp.experiments import runner as catalogue
from winnowgp.experiments.base import Experiment

NAMES = [experiment.name for experiment in catalogue.all_experiments()]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def known(monkeypatch, *experiments: Experiment) -> None:
    monkeypatch.setattr(catalogue, "select_experiments", lambda *names: list(experiments))


def made(log: Path) -> int:
    return len(log.read_text(encoding="utf-8").splitlines()) if log.exists() else 0


def test_reproduce_without_a_name_lists_experiments(capsys) -> None:
    assert run(["reproduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert run(["reproduce", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == NAMES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["figure-9"], "the experiment must be all or one of illustration, noise"),
        (["noise", "--device", "tpu"], "must be cpu or cuda; got 'tpu'"),
        (["noise", "--as", "printed-twice"], "`--as` must be printed or released; got 'printed-tw"),
        (["noise", "gplvm", "--as", "released"], "noise: no released settings are known; `--as "),
        (["noise", "-o", "taken/deeper"], "must be a folder that can be written to"),
        (["noise", "--only-draw", "-o", "empty"], "has no rows of these settings"),
    ],
)
def test_reproduce_invalid_input_is_one_line(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file")
    assert run(["reproduce", *arguments]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
    assert not (tmp_path / "empty").exists()


def test_reproduce_all_as_released_runs_those_that_have_released_settings(
    tmp_path: Path, monkeypatch, capsys, log: Path
) -> None:
    class Released(Toy):
        name = "other"
        has_released = True

    known(monkeypatch, Toy(log), Released(log))
    options = ["--seeds", "1", "--jobs", "1", "-o", str(tmp_path), "--as", "released"]
    assert run(["reproduce", "all", *options]) == 0
    assert [path.name for path in tmp_path.glob("*.jsonl")] == ["other-released.jsonl"]
    assert "toy" not in capsys.readouterr().out


def test_reproduce_writes_rows_figure_claims_and_never_repeats_runs(
    tmp_path: Path, monkeypatch, capsys, log: Path
) -> None:
    known(monkeypatch, Toy(log))
    arguments = ["reproduce", "toy", "--jobs", "1", "-o", str(tmp_path / "new" / "folder")]
    assert run(arguments) == 0
    first = capsys.readouterr()
    assert "agrees: the sum is five ([5])" in first.out
    assert "4/4" in first.err
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "toy.jsonl",
        "toy.png",
    ]
    assert run(arguments) == 0
    assert capsys.readouterr().out == first.out
    assert made(log) == 4


def test_reproduce_quick_has_its_own_file_and_prints_reductions(
    tmp_path: Path, monkeypatch, capsys, log: Path
) -> None:
    known(monkeypatch, Toy(log))
    assert run(["reproduce", "toy", "--jobs", "1", "-o", str(tmp_path), "--quick"]) == 0
    out = capsys.readouterr().out
    assert "quick: 1 run instead of 3; seed 0 instead of 0, 1, 2" in out
    assert "does not agree: the sum is five ([0])" in out
    assert (tmp_path / "toy-quick.png").exists()
    assert not (tmp_path / "toy.jsonl").exists()


def test_reproduce_json_and_quiet(tmp_path: Path, monkeypatch, capsys, log: Path) -> None:
    known(monkeypatch, Toy(log))
    arguments = ["reproduce", "toy", "--jobs", "1", "-o", str(tmp_path)]
    assert run([*arguments, "--json"]) == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert (found["rows"], found["missing"], found["cuts"]) == (4, 0, "")
    assert found["claims"] == ["agrees: the sum is five ([5])"]
    assert output.err == ""
    assert run([*arguments, "--quiet"]) == 0
    output = capsys.readouterr()
    assert output.out == output.err == ""


def test_reproduce_only_draw_makes_no_runs(tmp_path: Path, monkeypatch, capsys, log: Path) -> None:
    known(monkeypatch, Toy(log))
    arguments = ["reproduce", "toy", "--jobs", "1", "-o", str(tmp_path)]
    assert run([*arguments, "--seeds", "1"]) == 0
    capsys.readouterr()
    assert run([*arguments, "--only-draw"]) == 0
    assert "2 runs missing" in capsys.readouterr().out
    assert made(log) == 2


def test_reproduce_too_few_rows_is_invalid_input(tmp_path: Path, capsys) -> None:
    row = {"kind": "paper", "seed": 1, "candidates": 50, "alpha": 0.2, "learning_rate": 0.03}
    steps = {"pre": 400, "process": 300, "post": 200}
    (tmp_path / "illustration.jsonl").write_text(json.dumps({**row, "steps": steps}))
    assert run(["reproduce", "illustration", "--only-draw", "-o", str(tmp_path)]) == 2
    assert "9 runs missing" in capsys.readouterr().err


def test_reproduce_interrupted_keeps_rows(tmp_path: Path, monkeypatch, capsys, log: Path) -> None:
    known(monkeypatch, Toy(log))
    run_once = Toy.run

    def interrupted(self, settings, scope):
        if settings.get("seed") == 1:
            raise KeyboardInterrupt
        return run_once(self, settings, scope)

    arguments = ["reproduce", "toy", "--jobs", "1", "-o", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(Toy, "run", interrupted)
        assert run(arguments) == 130
    assert "run the same command again to resume" in capsys.readouterr().err
    assert run(arguments) == 0
    assert made(log) == 4


def test_reproduce_failed_run_is_named(tmp_path: Path, monkeypatch, capsys, log: Path) -> None:
    known(monkeypatch, Toy(log, fails_at=1))
    assert run(["reproduce", "toy", "--jobs", "1", "-o", str(tmp_path)]) == 1
    output = capsys.readouterr().err
    assert "a square that cannot be computed" in output
    assert '"seed": 1' in output


class Needy(Toy):
    name = "needy"
    tables = ("protein",)


class Needier(Toy):
    name = "needier"
    tables = ("energy", "protein")


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch) -> Path:
    """A folder without data, in which data are looked for."""
    for name in ("WINNOWGP_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def test_reproduce_missing_data_is_refused_first(
    nowhere: Path, monkeypatch, capsys, log: Path
) -> None:
    known(monkeypatch, Needy(log))
    folder = nowhere / "new"
    assert run(["reproduce", "needy", "--jobs", "1", "-o", str(folder)]) == 2
    output = capsys.readouterr().err
    assert f"needy: no protein.csv.gz in {nowhere}" in output
    assert "Nothing was run." in output
    assert "Without them" not in output
    assert made(log) == 0
    assert not folder.exists()


def test_reproduce_all_lists_every_missing_table_first(
    nowhere: Path, monkeypatch, capsys, log: Path
) -> None:
    (nowhere / "energy.csv.gz").write_bytes(b"")
    known(monkeypatch, Toy(log), Needy(log), Needier(log), Failing(log))
    assert run(["reproduce", "all", "--jobs", "1", "-o", str(nowhere)]) == 2
    output = capsys.readouterr().err
    assert "needy, needier: no protein.csv.gz in" in output
    assert "point WINNOWGP_DATA" in output
    assert output.endswith("Without them: winnow reproduce toy failing\n")
    assert output.count("\n") == 1
    assert made(log) == 0


def test_reproduce_finished_runs_need_no_data(
    nowhere: Path, monkeypatch, capsys, log: Path
) -> None:
    arguments = ["reproduce", "needy", "--jobs", "1", "-o", str(nowhere)]
    known(monkeypatch, Needy(log))
    with monkeypatch.context() as patch:
        patch.setattr(Needy, "tables", ())
        assert run(arguments) == 0
    assert run(arguments) == 0
    assert run([*arguments, "--seeds", "4"]) == 2
    assert run([*arguments, "--seeds", "4", "--only-draw"]) == 0
    assert made(log) == 4


class Folded(Toy):
    name, folds = "folded", 2


def test_reproduce_more_seeds_than_folds_warns(
    tmp_path: Path, monkeypatch, capsys, log: Path
) -> None:
    known(monkeypatch, Folded(log))
    arguments = ["reproduce", "folded", "--jobs", "1", "-o", str(tmp_path)]
    for seeds, more in ((3, []), (2, []), (3, ["--quiet"])):
        assert run([*arguments, "--seeds", str(seeds), *more]) == 0
        output = "folded has 2 folds; `--seeds 3` uses all of them."
        assert (output in capsys.readouterr().err) == (seeds == 3 and not more)


def test_reproduce_takes_several_names(capsys) -> None:
    found = catalogue.select_experiments("estimators", "noise", "noise")
    assert [experiment.name for experiment in found] == ["noise", "estimators"]
    assert len(catalogue.select_experiments("noise", "all")) == len(NAMES)
    assert run(["reproduce", "noise", "figure-9"]) == 2
    assert "one of illustration, noise" in capsys.readouterr().err


def test_reproduce_continues_after_a_failed_experiment(
    tmp_path: Path, monkeypatch, capsys, log: Path
) -> None:
    known(monkeypatch, Failing(log, fails_at=0), Toy(log))
    assert run(["reproduce", "all", "--jobs", "1", "-o", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert "winnow: failing failed and is skipped: a square" in output.err
    assert "toy: squares, and their sum" in output.out


class Failing(Toy):
    name = "failing"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_reproduce_quick_runs_every_experiment(
    paper_data, tmp_path: Path, capsys, name: str
) -> None:
    assert run(["reproduce", name, "--quick", "--jobs", "2", "-o", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["missing"] == 0
    assert found["claims"]
    assert "instead of" in found["cuts"]
    assert Path(found["figure"]).stat().st_size > 10_000
    assert Path(found["results"]).stat().st_size < 250_000
