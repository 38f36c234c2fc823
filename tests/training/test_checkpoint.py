"""Interrupted fits: what is restored, and which fits are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel

from helpers.stopped_fits import Stopped, fitted, gp, plan, rows, same, seeded, stop_at, stopped
from winnowgp import Checkpoint, Dataset, MaskedMatrix, SparseGP
from winnowgp.errors import CheckpointError, InputError, NotSaveableError
from winnowgp.gradients import Baseline, ScoreFunction
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import FastSchedule, PaperSchedule, Progress, Tolerance
from winnowgp.training import checkpoint as checkpoint_module
from winnowgp.training.checkpoint import open_checkpoint
from winnowgp.training.schedules import TrainingContext


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient": ScoreFunction(samples=2)}, {"draws": 3}],
    ids=["plain", "samples", "draws"],
)
def test_resumed_fit_takes_only_missing_steps(tmp_path: Path, settings: Any) -> None:
    whole = fitted(None, schedule=plan(**settings))
    stopped(Checkpoint(tmp_path, 0), step=4, schedule=plan(**settings))
    events: list[tuple[str, int]] = []
    again = fitted(
        Checkpoint(tmp_path, 0),
        schedule=plan(**settings),
        callbacks=lambda p: events.append((p.phase, p.step)),
    )
    # The fourth step was reported and not taken.
    inclusion = [("inclusion", step) for step in (4, 5, 6)]
    assert events == [*inclusion, *[("post-train", step) for step in (1, 2, 3)]]
    assert same(again, whole)


def test_finished_fit_is_restored_without_steps(tmp_path: Path) -> None:
    first = fitted(Checkpoint(tmp_path))
    events: list[Progress] = []
    assert same(fitted(Checkpoint(tmp_path), callbacks=events.append), first)
    assert events == []


def test_another_fit_replaces_finished_one(tmp_path: Path) -> None:
    fitted(Checkpoint(tmp_path))
    other = fitted(Checkpoint(tmp_path), generator=seeded(5))
    assert same(other, fitted(None, generator=seeded(5)))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"data": Dataset(rows().X, 2 * rows().Y)}, "`targets` was"),
        ({"data": Dataset(rows().X + 1, rows().Y)}, "`inputs` was"),
        ({"model": gp(ScaleKernel(MaternKernel(nu=1.5)))}, "`model` was"),
        ({"generator": seeded(1)}, "`generator` was"),
        ({"schedule": plan(learning_rate=0.02)}, "learning_rate=0.01.*learning_rate=0.02"),
        (
            {"schedule": FastSchedule(Tolerance(1.0))},
            "`schedule` was PaperSchedule.*is FastSchedule",
        ),
    ],
    ids=["targets", "inputs", "model", "generator", "rate", "schedule"],
)
def test_another_fit_is_refused_with_what_differs(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    stopped(Checkpoint(tmp_path))
    with pytest.raises(CheckpointError, match=f"(?s){named}.*delete"):
        fitted(Checkpoint(tmp_path), **changed)
    # The interrupted fit can still be resumed.
    assert same(fitted(Checkpoint(tmp_path)), fitted(None))


def test_fingerprint_kernels_with_other_attributes_differ(tmp_path: Path) -> None:
    stopped(Checkpoint(tmp_path), model=gp(ScaleKernel(MaternKernel(nu=0.5))))
    with pytest.raises(CheckpointError, match="`model` was"):
        fitted(Checkpoint(tmp_path), model=gp(ScaleKernel(MaternKernel(nu=1.5))))


def test_fingerprint_frozen_parameter_differs(tmp_path: Path) -> None:
    stopped(Checkpoint(tmp_path))
    frozen = gp()
    frozen.candidates.requires_grad_(False)
    with pytest.raises(CheckpointError, match="`model` was"):
        fitted(Checkpoint(tmp_path), model=frozen)


def test_invalid_fit_does_not_claim_the_folder(tmp_path: Path) -> None:
    where = Checkpoint(tmp_path / "run")
    with pytest.raises(InputError, match="`prior` must be over as many candidates"):
        fitted(where, schedule=PaperSchedule(SquaredCardinality(5, 0.1)))
    with pytest.raises(InputError, match="`data` must be a MaskedMatrix for a GP-LVM"):
        fitted(where, data=MaskedMatrix.of(rows().Y))
    assert not (tmp_path / "run").exists()


def test_resume_with_other_threads_is_refused(tmp_path: Path, monkeypatch) -> None:
    stopped(Checkpoint(tmp_path))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with pytest.raises(CheckpointError, match="`threads` was 1 and is 7"):
        fitted(Checkpoint(tmp_path))


def test_checkpoint_every_limits_writes(tmp_path: Path, monkeypatch) -> None:
    real, written = checkpoint_module.write_archive, [0]

    def counted(archive: Any, path: Path) -> Path:
        written[0] += 1
        return real(archive, path)

    monkeypatch.setattr(checkpoint_module, "write_archive", counted)
    fitted(Checkpoint(tmp_path / "seldom", every=1e6))
    # When it begins and when it ends.
    assert written[0] == 2
    written[0] = 0
    fitted(Checkpoint(tmp_path / "often", every=0))
    # Those two, twelve steps, and the ends of three stages.
    assert written[0] == 17


def test_resume_from_different_start_raises(tmp_path: Path, monkeypatch) -> None:
    """Resume where computations between stages give another result, as on another processor."""
    with pytest.raises(Stopped):
        fitted(Checkpoint(tmp_path, 0), callbacks=stop_at(2, "post-train"))
    real = SparseGP.prune
    monkeypatch.setattr(SparseGP, "prune", lambda model, mask: real(model, mask.roll(1)))
    with pytest.raises(CheckpointError, match="differs from the interrupted one"):
        fitted(Checkpoint(tmp_path, 0))


class Diary(Baseline[Any]):
    """A baseline whose state cannot be saved."""

    def init(self) -> Any:
        return object()

    def step(self, values: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return torch.zeros_like(values), state


def test_state_that_cannot_be_saved_raises(tmp_path: Path) -> None:
    schedule = plan(gradient=ScoreFunction(baseline=Diary()))
    with pytest.raises(NotSaveableError, match="got object"):
        fitted(Checkpoint(tmp_path, 0), schedule=schedule)
    # Without a checkpoint the state is not saved.
    fitted(None, schedule=schedule)


def test_stage_of_user_loop_resumes(tmp_path: Path) -> None:
    def run(stop: int) -> tuple[float, int]:
        model, steps = torch.nn.Linear(1, 1, bias=False), [0]
        torch.nn.init.zeros_(model.weight)

        def take_a_step(model: torch.nn.Linear) -> None:
            steps[0] += 1
            if steps[0] == stop:
                raise Stopped
            model.weight.data += 1

        checkpoint_log = open_checkpoint(Checkpoint(tmp_path, 0))
        context = TrainingContext(seeded(), (), checkpoint_log)
        stage = context.checkpoint_log.stage({"model": model}, start=list(model.parameters()))
        while not stage.ended and model.weight.item() < 5:
            take_a_step(model)
            stage.save()
        stage.end()
        return model.weight.item(), steps[0]

    with pytest.raises(Stopped):
        run(stop=4)
    assert run(stop=0) == (5.0, 2)
    assert run(stop=0) == (5.0, 0)
