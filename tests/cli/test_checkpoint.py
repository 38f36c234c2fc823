"""`winnow fit --checkpoint`; killed processes are tested in `tests/training`."""

from pathlib import Path
from typing import Any

import pytest

from winnowgp.cli.app import run
from winnowgp.io import load
from winnowgp.tabular.table_summary import TrainingHistory
from winnowgp.training import Progress
from winnowgp.training import checkpoint as checkpoint_module


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    table = tmp_path / "line.csv"
    table.write_text("x,y\n" + "\n".join(f"{x},{x * x}" for x in range(12)))
    fit = ["fit", str(table), "-t", "y", "--tolerance", "1", "--kernel", "rbf", "--quiet"]
    kept = ["--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "0"]
    return [*fit, *kept, "-o", str(tmp_path / "line.winnow")]


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TrainingHistory.__call__

    def call(history: TrainingHistory, progress: Progress) -> None:
        if progress.phase == "optimisation" and progress.step == step:
            raise KeyboardInterrupt
        real(history, progress)

    monkeypatch.setattr(TrainingHistory, "__call__", call)


@pytest.mark.usefixtures("quickly")
def test_fit_interrupted_resumes_to_the_same_model(
    arguments: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    plain = tmp_path / "plain.winnow"
    assert run([*arguments[:9], "-o", str(plain)]) == 0
    interrupt_at(2, monkeypatch)
    assert run(arguments) == 130
    assert "to resume from its checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "line.winnow").exists()
    monkeypatch.undo()
    # Another command may not have the folder yet.
    assert run([*arguments, "--tolerance", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "`--tolerance` was 1.0 and is 2.0" in line
    assert run(arguments) == 0
    found, expected = load(tmp_path / "line.winnow"), load(plain)
    assert found.summary["training"] == expected.summary["training"]
    assert found.estimator.elbo_ == expected.estimator.elbo_
    assert found.estimator.checkpoint is None


def test_fit_interrupted_before_its_first_checkpoint_has_nothing_to_resume(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("winnowgp.cli.fit.check_columns", interrupted)
    assert run(arguments) == 130
    assert "interrupted; nothing was written." in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()


def test_fit_damaged_checkpoint_is_one_line(arguments: list[str], tmp_path: Path, capsys) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "fit.checkpoint").write_bytes(b"nonsense")
    assert run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "delete it to start again" in line


@pytest.mark.usefixtures("quickly")
def test_fit_full_disk_warns_and_saves_the_model(
    arguments: list[str], tmp_path: Path, monkeypatch, capsys
) -> None:
    real, writings = checkpoint_module.write_archive, iter(range(1000))

    def write(archive: Any, path: Path) -> Path:
        if next(writings) == 5:
            raise OSError(28, "No space left on device")
        return real(archive, path)

    monkeypatch.setattr(checkpoint_module, "write_archive", write)
    assert run(arguments) == 0
    assert "No space left on device); the fit continues" in capsys.readouterr().err
    assert load(tmp_path / "line.winnow").estimator.n_inducing_ > 0


def test_fit_checkpoint_that_is_a_file_is_named(
    arguments: list[str], tmp_path: Path, capsys
) -> None:
    (tmp_path / "kept").touch()
    assert run(arguments) == 2
    assert "`--checkpoint` must be a folder" in capsys.readouterr().err
