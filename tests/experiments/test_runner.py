"""Every run is made once, even if the process that makes it is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.toy_experiment import Toy
from winnowgp.errors import TrainingError
from winnowgp.experiments.base import Experiment, Row, Scope
from winnowgp.experiments.runner import make_runs, quick_differences, run_status
from winnowgp.experiments.runs import Runs

FULL = Scope()


def kinds(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [line.split()[0] for line in lines]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "toy.jsonl")


def check_each_once(toy: Toy, log: Path, runs: Runs, jobs: int) -> None:
    """Make all runs twice; check that each is made once, and the sum after the squares."""
    calls: list[tuple[int, int]] = []
    rows = make_runs(
        toy, runs, FULL, jobs=jobs, on_run=lambda done, total, row: calls.append((done, total))
    )
    assert calls == [(1, 3), (2, 3), (3, 3), (4, 4)]
    assert kinds(log) == ["square", "square", "square", "sum"]
    assert [row.get("square", row.get("sum")) for row in rows] == [0, 1, 4, 5]
    assert make_runs(toy, runs, FULL, jobs=jobs) == rows
    assert len(kinds(log)) == len(list(runs)) == 4


def test_make_runs_makes_each_once_and_dependent_ones_later(log: Path, runs: Runs) -> None:
    check_each_once(Toy(log), log, runs, jobs=1)


@pytest.mark.slow
def test_make_runs_timing_comes_last_in_this_process(log: Path, runs: Runs) -> None:
    # The sum depends on the run that was made alone. Processes take seconds to start: two jobs are
    # tested here and after a kill only.
    check_each_once(Toy(log, alone_at=0), log, runs, jobs=2)
    pids = [int(line.split()[1]) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [row.get("square") for row in runs][2] == 0
    assert pids[2] == os.getpid()
    assert os.getpid() not in pids[:2]


def test_make_runs_row_has_settings_results_times_and_versions(log: Path, runs: Runs) -> None:
    first = make_runs(Toy(log), runs, Scope(seeds=1))[0]
    assert {key: first[key] for key in ("kind", "seed", "sizes", "steps", "square", "device")} == {
        "kind": "square",
        "seed": 0,
        "sizes": [0, 2],
        "steps": {"pre": 7},
        "square": 0,
        "device": "cpu",
    }
    assert min(first["seconds"], first["cpu_seconds"]) >= 0
    assert "torch" in first["versions"]


def test_make_runs_rows_of_other_settings_are_not_reused(log: Path, runs: Runs) -> None:
    make_runs(Toy(log, steps=7), runs, FULL)
    rows = make_runs(Toy(log, steps=8), runs, FULL)
    assert [row["steps"]["pre"] for row in rows if row["kind"] == "square"] == [8, 8, 8]
    # The sum depends on the squares only, which are the same.
    assert kinds(log).count("square") == 6
    assert kinds(log).count("sum") == 1
    assert len(make_runs(Toy(log, steps=7), runs, Scope(seeds=2))) == 3


def test_run_status_absent_setting_does_not_match_none(log: Path, runs: Runs) -> None:
    class Wider(Experiment):
        name, title = "wider", "one more setting"

        def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
            return [{"kind": "square", "limit": None}]

        def run(self, settings: Row, scope: Scope) -> Row:
            return {}

        def draw(self, rows: Sequence[Row], path: Path) -> Path:
            return path

    runs.add({"kind": "square"})
    assert run_status(Wider(), runs, FULL).missing == [{"kind": "square", "limit": None}]


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_make_runs_failed_run_keeps_others_and_is_named(log: Path, runs: Runs, jobs: int) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        make_runs(Toy(log, fails_at=0), runs, FULL, jobs=jobs)
    notes = " ".join(caught.value.__notes__)
    assert '"seed": 0' in notes
    assert "1 of 3 runs failed" in notes
    assert sorted(row["square"] for row in runs) == [1, 4]
    make_runs(Toy(log), runs, FULL, jobs=jobs)
    assert kinds(log) == ["square"] * 4 + ["sum"]


def test_make_runs_result_named_like_setting_raises(log: Path, runs: Runs, monkeypatch) -> None:
    monkeypatch.setattr(Toy, "run", lambda self, settings, scope: {"seed": 9, "square": 1})
    with pytest.raises(AssertionError, match="settings already: seed"):
        make_runs(Toy(log), runs, FULL)


PROGRAM = """
import sys
from pathlib import Path
from helpers.toy_experiment import Toy
from winnowgp.experiments.base import Scope
from winnowgp.experiments.runs import Runs
from winnowgp.experiments.runner import make_runs

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make_runs(Toy(folder / "log", hangs_at=2), Runs(folder / "toy.jsonl"), Scope(), jobs=2)
"""


def hanging(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that makes two rows and hangs in the third run."""
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, str(program), str(folder)], env=environment, stderr=subprocess.PIPE
    )
    results, log = folder / "toy.jsonl", folder / "log"
    while not (results.exists() and results.read_text().count("\n") == 2 and len(kinds(log)) == 3):
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        time.sleep(0.05)
    return process


def workers(log: Path) -> set[int]:
    return {int(line.split()[1]) for line in log.read_text(encoding="utf-8").splitlines()}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize(
    "sign", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_make_runs_killed_keeps_rows_and_ends_workers(
    tmp_path: Path, log: Path, runs: Runs, sign: signal.Signals
) -> None:
    process = hanging(tmp_path)
    process.send_signal(sign)
    process.communicate(timeout=60)
    for _ in range(600):
        if not any(alive(pid) for pid in workers(log)):
            break
        time.sleep(0.05)
    assert not any(alive(pid) for pid in workers(log))
    assert sorted(row["square"] for row in runs) == [0, 1]
    # Simulate a kill while a row was being written.
    with runs.path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "square"})[:9])
    rows = make_runs(Toy(log), runs, FULL)
    assert [row.get("square", row.get("sum")) for row in rows] == [0, 1, 4, 5]
    assert kinds(log) == ["square"] * 4 + ["sum"]


@pytest.mark.slow
def test_make_runs_killed_worker_raises_training_error(log: Path, runs: Runs) -> None:
    with pytest.raises(TrainingError, match="fewer `jobs`"):
        make_runs(KillsItself(log), runs, FULL, jobs=2)


class KillsItself(Experiment):
    name, title = "kills-itself", "kills its own process"

    def __init__(self, log: Path) -> None:
        self.log = log

    def settings(self, scope: Scope, rows: Sequence[Row]) -> list[Row]:
        return [{"seed": 0}, {"seed": 1}]

    def run(self, settings: Row, scope: Scope) -> Row:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def draw(self, rows: Sequence[Row], path: Path) -> Path:
        return path


def test_quick_differences_lists_differing_settings(log: Path) -> None:
    assert quick_differences(Toy(log), Scope(quick=True)) == (
        "1 run instead of 3; seed 0 instead of 0, 1, 2; sizes (0, 2) instead of "
        "(0, 2), (1, 2), (2, 2)"
    )
