"""The script that writes figures and claims into the page on the paper, on made-up results."""

import runpy
import sys
from pathlib import Path

import pytest

from helpers.toy_experiment import Toy
from winnowgp.errors import InputError
from winnowgp.experiments.base import Scope
from winnowgp.experiments.runner import Reproduction

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
SCRIPT = runpy.run_path(str(BENCHMARKS / "paper_page.py"))
sys.path.remove(str(BENCHMARKS))
PAGE = "text\n<!-- a -->\nold\n<!-- end -->\nmore\n<!-- b -->\nkept\n<!-- end -->\n"


def result(missing: int, *claims: str) -> Reproduction:
    lines = list(claims or ("agrees: one (1)", "does not agree: two (2)"))
    return Reproduction("a", "figure a", "a.jsonl", "folder/a.png", 4, missing, "", lines)


def test_section_has_figure_claims_and_missing_runs() -> None:
    complete = "![figure a](results/a.png)\n\n- agrees: one (1)\n- does not agree: two (2)"
    assert SCRIPT["section"](result(missing=0)) == complete
    assert SCRIPT["section"](result(missing=2)) == f"{complete}\n- missing: 2 of 6 runs"


def test_section_lists_claims_of_released_settings() -> None:
    text = SCRIPT["section"](result(0), result(1, "agrees: three (3)"))
    *_, title, _, line, missing = text.splitlines()
    assert title == "With the released settings:"
    assert (line, missing) == ("- agrees: three (3)", "- missing: 1 of 5 runs")


def test_parsed_claim_finds_the_longest_procedure() -> None:
    parsed = SCRIPT["parsed_claim"]
    line = (
        "agrees: fewer, and better, the fast schedule with automatic α (1, the fast schedule (2))"
    )
    assert parsed(line) == ("fewer, and better", "the fast schedule with automatic α", "agrees")
    line = "does not agree: more, the released settings (1)"
    assert parsed(line) == ("more", "the released settings", "does not agree")
    assert parsed("agrees: comparable (1)") is None
    assert parsed("test log density: 1, the fast schedule (2)") is None


def test_verdict_lines_says_not_run_and_how_much_was_run(tmp_path: Path) -> None:
    class Released(Toy):
        name = "a"
        has_released = True

    printed = result(
        0,
        "agrees: fewer, the paper's procedure (1)",
        "does not agree: fewer, the fast schedule (2)",
        "agrees: better, the fast schedule, α by cost (3)",
        "agrees: comparable (4)",
    )
    lines = SCRIPT["verdict_lines"]
    experiment = Released(tmp_path / "log")
    assert lines(experiment, printed, None) == [
        ["`a`", "fewer", "agrees", "not run", "does not agree", "–"],
        ["`a`", "better", "–", "not run", "–", "agrees"],
        ["`a`", "comparable", "agrees", "not run", "–", "–"],
    ]
    part = result(6, "does not agree: fewer, the released settings (1)")
    first, second, _ = lines(experiment, printed, part)
    assert first[3] == "does not agree (4 of 10 runs)"
    assert second[3] == "not run"
    assert (
        lines(experiment, printed, result(0, "agrees: more, the released settings (1)"))[0][3]
        == "–"
    )
    assert [line[3] for line in lines(Toy(tmp_path / "log"), printed, None)] == ["–"] * 3


def test_verdict_lines_unnamed_procedure_has_the_column_of_its_experiment(tmp_path: Path) -> None:
    class Deep(Toy):
        name = "square-wave"

    claims = "does not agree: selected beat random (1 (all))", "test log density: 2 (3)"
    (line,) = SCRIPT["verdict_lines"](Deep(tmp_path / "log"), result(0, *claims), None)
    assert line == ["`square-wave`", "selected beat random", "–", "–", "does not agree", "–"]


def test_few_seeds_lists_kinds_of_runs_with_less_than_five(tmp_path: Path) -> None:
    run = {"kind": "fast", "data": "energy", "cpu_seconds": 3.0, "device": "cpu"}
    rows = [{**run, "seed": seed} for seed in (0, 1, 1)]
    rows += [{**run, "kind": "auto", "seed": seed} for seed in range(5)]
    rows += [
        {"kind": "grid", "fold": fold, "cpu_seconds": 7.4, "device": "cuda"} for fold in (0, 1)
    ]
    rows.append({"kind": "time", "cpu_seconds": 1.0, "device": "cpu"})
    assert SCRIPT["few_seeds"](Toy(tmp_path / "log"), rows) == [
        ["`toy`", "the fast schedule on energy", "2", "3"],
        ["`toy`", "grid", "2", "7 with a GPU"],
    ]
    released = SCRIPT["few_seeds"](Toy(tmp_path / "log"), rows[:3], Scope(released=True))
    assert released[0][1] == "the fast schedule on energy, released"


def test_stored_rows_are_complete_and_their_disagreements_explained() -> None:
    lacking = {}
    for experiment in SCRIPT["select_experiments"]("all"):
        for released in (False, True)[: 1 + experiment.has_released]:
            status = SCRIPT["stored_rows"](experiment, Scope(released=released))
            assert not status.missing, (experiment.name, released)
            claims = experiment.claims(status.rows)
            judged = Reproduction(experiment.name, "", "", "", 0, 0, "", claims)
            assert SCRIPT["verdict_lines"](experiment, judged, None)
            lacking |= SCRIPT["disagreements"]([judged])
    assert lacking.keys() <= SCRIPT["EXPLANATIONS"].keys()


def test_disagreements_are_those_of_every_procedure_once() -> None:
    results = [
        result(
            0,
            "agrees: fewer, the paper's procedure (1)",
            "does not agree: fewer, the fast schedule (2)",
            "does not agree: fewer, the fast schedule with automatic α (3)",
            "does not agree: comparable (4)",
        )
    ]
    assert list(SCRIPT["disagreements"](results)) == [("a", "fewer"), ("a", "comparable")]


def test_explanations_without_a_sentence_raise(monkeypatch) -> None:
    results = [result(0, "does not agree: fewer, the fast schedule (2)")]
    with pytest.raises(InputError, match=r"must have a sentence for .*'a', 'fewer'"):
        SCRIPT["explanations"](results)
    monkeypatch.setitem(SCRIPT["EXPLANATIONS"], ("a", "fewer"), "because.")
    assert SCRIPT["explanations"](results) == ["- `a`, fewer: because."]


def test_replace_section_changes_only_its_section() -> None:
    page = SCRIPT["replace_section"](PAGE, "a", r"new \1")
    assert page == PAGE.replace("old\n", "\nnew \\1\n\n")
    assert SCRIPT["replace_section"](page, "a", r"new \1") == page


def test_replace_section_unknown_name_raises() -> None:
    with pytest.raises(InputError, match="one section `<!-- c -->`; it has 0"):
        SCRIPT["replace_section"](PAGE, "c", "new")
