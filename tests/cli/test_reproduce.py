"""The command that makes the paper's figures, on a toy and, slowly, on all of them."""

import json
from pathlib import Path

import pytest

from helpers.toy_experiment import Toy
from winnowgp.cli.app import run
from winnowgp.experiments import runner as catalogue
from winnowgp.experiments.base import Experiment
from winnowgp.experiments.runner import EXPERIMENTS


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def known(monkeypatch, *experiments: Experiment) -> None:
    monkeypatch.setattr(catalogue, "select_experiments", lambda *names: list(experiments))


def made(log: Path) -> int:
    return len(log.read_text(encoding="utf-8").splitlines()) if log.exists() else 0


def test_without_a_name_the_names_are_listed(capsys) -> None:
    assert run(["reproduce"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [kind.name for kind in EXPERIMENTS]
    assert run(["reproduce", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [
        kind.name for kind in EXPERIMENTS
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["figure-9"], "must be all or one of illustration, noise"),
        (["noise", "--device", "tpu"], "must be cpu or cuda; got 'tpu'"),
        (["noise", "-o", "taken/deeper"], "must be a folder that can be written to"),
        (["noise", "--only-draw", "-o", "empty"], "has no rows of these settings"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch, capsys, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file")
    assert run(["reproduce", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "empty").exists()


def test_rows_figure_and_claims_come_of_it_and_nothing_twice(
    tmp_path: Path, monkeypatch, capsys, log: Path
) -> None:
    known(monkeypatch, Toy(log))
    words = ["reproduce", "toy", "--jobs", "1", "-o", str(tmp_path / "new" / "folder")]
    assert run(words) == 0
    first = capsys.readouterr()
    assert "agrees: the sum is five ([5])" in first.out
    assert "4/4" in first.err
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "toy.jsonl",
        "toy.png",
    ]
    assert run(words) == 0
    assert capsys.readouterr().out == first.out
    assert made(log) == 4


def test_quick_rows_have_their_own_file_and_say_what_was_left_out(
    tmp_path: Path, monkeypatch, capsys, log: Path
) -> None:
    known(monkeypatch, Toy(log))
    assert run(["reproduce", "toy", "--jobs", "1", "-o", str(tmp_path), "--quick"]) == 0
    out = capsys.readouterr().out
    assert "quick: 1 run instead of 3; seed 0 instead of 0, 1, 2" in out
    assert "does not agree: the sum is five ([0])" in out
    assert (tmp_path / "toy-quick.png").exists()
    assert not (tmp_path / "toy.jsonl").exists()


def test_json_is_one_object_and_quiet_is_nothing(
    tmp_path: Path, monkeypatch, capsys, log: Path
) -> None:
    known(monkeypatch, Toy(log))
    words = ["reproduce", "toy", "--jobs", "1", "-o", str(tmp_path)]
    assert run([*words, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["rows"], found["missing"], found["cuts"]) == (4, 0, "")
    assert found["claims"] == ["agrees: the sum is five ([5])"]
    assert said.err == ""
    assert run([*words, "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.out == said.err == ""


def test_rows_that_exist_can_be_drawn_without_making_more(
    tmp_path: Path, monkeypatch, capsys, log: Path
) -> None:
    known(monkeypatch, Toy(log))
    words = ["reproduce", "toy", "--jobs", "1", "-o", str(tmp_path)]
    assert run([*words, "--seeds", "1"]) == 0
    capsys.readouterr()
    assert run([*words, "--only-draw"]) == 0
    assert "2 runs still to be made" in capsys.readouterr().out
    assert made(log) == 2


def test_too_few_rows_to_draw_are_no_mistake_of_ours(tmp_path: Path, capsys) -> None:
    row = {"kind": "paper", "seed": 1, "candidates": 50, "alpha": 0.2, "learning_rate": 0.03}
    steps = {"pre": 400, "process": 300, "post": 200}
    (tmp_path / "illustration.jsonl").write_text(json.dumps({**row, "steps": steps}))
    assert run(["reproduce", "illustration", "--only-draw", "-o", str(tmp_path)]) == 2
    assert "5 runs missing" in capsys.readouterr().err


def test_ctrl_c_keeps_rows_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch, capsys, log: Path
) -> None:
    known(monkeypatch, Toy(log))
    run_once = Toy.run

    def interrupted(self, settings, scope):
        if settings.get("seed") == 1:
            raise KeyboardInterrupt
        return run_once(self, settings, scope)

    words = ["reproduce", "toy", "--jobs", "1", "-o", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(Toy, "run", interrupted)
        assert run(words) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert run(words) == 0
    assert made(log) == 4


def test_a_run_that_fails_is_named(tmp_path: Path, monkeypatch, capsys, log: Path) -> None:
    known(monkeypatch, Toy(log, fails_at=1))
    assert run(["reproduce", "toy", "--jobs", "1", "-o", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "a square that cannot be computed" in said
    assert '"seed": 1' in said


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


def test_without_its_data_an_experiment_does_not_begin(
    nowhere: Path, monkeypatch, capsys, log: Path
) -> None:
    known(monkeypatch, Needy(log))
    output = nowhere / "new"
    assert run(["reproduce", "needy", "--jobs", "1", "-o", str(output)]) == 2
    said = capsys.readouterr().err
    assert f"needy: no protein.csv.gz in {nowhere}" in said
    assert "Nothing was run." in said
    assert "Without them" not in said
    assert made(log) == 0
    assert not output.exists()


def test_all_names_every_missing_table_and_what_needs_none_before_anything_is_run(
    nowhere: Path, monkeypatch, capsys, log: Path
) -> None:
    (nowhere / "energy.csv.gz").write_bytes(b"")
    known(monkeypatch, Toy(log), Needy(log), Needier(log), Failing(log))
    assert run(["reproduce", "all", "--jobs", "1", "-o", str(nowhere)]) == 2
    said = capsys.readouterr().err
    assert "needy, needier: no protein.csv.gz in" in said
    assert "point WINNOWGP_DATA" in said
    assert said.endswith("Without them: winnow reproduce toy failing\n")
    assert said.count("\n") == 1
    assert made(log) == 0


def test_data_are_not_missed_where_all_runs_are_made_or_none_is_wanted(
    nowhere: Path, monkeypatch, capsys, log: Path
) -> None:
    words = ["reproduce", "needy", "--jobs", "1", "-o", str(nowhere)]
    known(monkeypatch, Needy(log))
    with monkeypatch.context() as patch:
        patch.setattr(Needy, "tables", ())
        assert run(words) == 0
    assert run(words) == 0
    assert run([*words, "--seeds", "4"]) == 2
    assert run([*words, "--seeds", "4", "--only-draw"]) == 0
    assert made(log) == 4


class Folded(Toy):
    name, folds = "folded", 2


def test_more_seeds_than_folds_are_told_of(tmp_path: Path, monkeypatch, capsys, log: Path) -> None:
    known(monkeypatch, Folded(log))
    words = ["reproduce", "folded", "--jobs", "1", "-o", str(tmp_path)]
    for seeds, more in ((3, []), (2, []), (3, ["--quiet"])):
        assert run([*words, "--seeds", str(seeds), *more]) == 0
        said = "folded repeats over the 2 folds of its data; with `--seeds 3` all 2 are used."
        assert (said in capsys.readouterr().err) == (seeds == 3 and not more)


def test_several_experiments_can_be_named_in_the_order_of_their_figures(capsys) -> None:
    found = catalogue.select_experiments("estimators", "noise", "noise")
    assert [experiment.name for experiment in found] == ["noise", "estimators"]
    assert len(catalogue.select_experiments("noise", "all")) == len(EXPERIMENTS)
    assert run(["reproduce", "noise", "figure-9"]) == 2
    assert "one of illustration, noise" in capsys.readouterr().err


def test_one_that_fails_does_not_keep_the_rest_of_all_from_being_made(
    tmp_path: Path, monkeypatch, capsys, log: Path
) -> None:
    known(monkeypatch, Failing(log, fails_at=0), Toy(log))
    assert run(["reproduce", "all", "--jobs", "1", "-o", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "winnow: failing is left out: a square" in said.err
    assert "toy: squares, and their sum" in said.out


class Failing(Toy):
    name = "failing"


@pytest.mark.slow
@pytest.mark.parametrize("name", [kind.name for kind in EXPERIMENTS])
def test_a_quick_look_at_every_experiment(paper_data, tmp_path: Path, capsys, name: str) -> None:
    assert run(["reproduce", name, "--quick", "--jobs", "2", "-o", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["missing"] == 0
    assert found["claims"]
    assert "instead of" in found["cuts"]
    assert Path(found["figure"]).stat().st_size > 10_000
    assert Path(found["results"]).stat().st_size < 250_000
