"""Fits that are stopped and go on: what is written, what is refused, what is said."""

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from safetensors.torch import save as save_tensors

from forgery import written
from winnowgp import Checkpoint, Dataset, SparseGP, fit
from winnowgp.data import hills
from winnowgp.errors import CheckpointError, CheckpointWarning, InputError, NotSaveableError
from winnowgp.gradients import Baseline, ScoreFunction
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import (
    Course,
    EndPhase,
    Fast,
    Fit,
    Journal,
    Progress,
    ThreePhases,
    Tolerance,
    opened,
)
from winnowgp.training import checkpoint as checkpoint_module


class Stopped(Exception):
    """Something else than the library would raise."""


def stop_at(step: int, phase: str = "inclusion") -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if (progress.phase, progress.step) == (phase, step):
            raise Stopped

    return watch


def rows() -> Dataset:
    data = hills()
    return Dataset(data.X[::4], data.Y[::4])


def gp(kernel: Any = None, K: int = 8) -> SparseGP:
    return SparseGP(kernel or ScaleKernel(RBFKernel()), rows().X[:K], noise=0.1)


def plan(**words: Any) -> ThreePhases:
    asked: dict[str, Any] = {"pre": 3, "process": 6, "post": 3, **words}
    return ThreePhases(SquaredCardinality(8, 0.1), **asked)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fitted(where: Checkpoint | None, **words: Any) -> Fit[SparseGP]:
    asked: dict[str, Any] = {"schedule": plan(), "generator": seeded(), **words}
    return fit(
        asked.pop("model", None) or gp(), asked.pop("data", rows()), checkpoint=where, **asked
    )


def stopped(where: Checkpoint, step: int = 4, **words: Any) -> None:
    with pytest.raises(Stopped):
        fitted(where, on_progress=stop_at(step), **words)


def same(a: Fit[SparseGP], b: Fit[SparseGP]) -> bool:
    pairs = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return (
        all(torch.equal(x, y) for x, y in pairs)
        and torch.equal(a.selection.trace, b.selection.trace)
        and torch.equal(a.selection.mask, b.selection.mask)
        and a.bound == b.bound
    )


@pytest.mark.parametrize(
    "asked",
    [{}, {"gradient": ScoreFunction(samples=2)}, {"draws": 3}],
    ids=["plain", "samples", "draws"],
)
def test_a_fit_that_was_stopped_takes_only_the_steps_it_lacks(tmp_path: Path, asked: Any) -> None:
    whole = fitted(None, schedule=plan(**asked))
    stopped(Checkpoint(tmp_path, 0), step=4, schedule=plan(**asked))
    told: list[tuple[str, int]] = []
    again = fitted(
        Checkpoint(tmp_path, 0),
        schedule=plan(**asked),
        on_progress=lambda p: told.append((p.phase, p.step)),
    )
    # The fourth step was told of and not taken.
    inclusion = [("inclusion", step) for step in (4, 5, 6)]
    assert told == [*inclusion, *[("post-train", step) for step in (1, 2, 3)]]
    assert same(again, whole)


def test_a_fit_that_had_ended_is_answered_without_a_step(tmp_path: Path) -> None:
    first = fitted(Checkpoint(tmp_path))
    told: list[Progress] = []
    assert same(fitted(Checkpoint(tmp_path), on_progress=told.append), first)
    assert told == []


def test_another_fit_takes_the_place_of_one_that_had_ended(tmp_path: Path) -> None:
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
        ({"schedule": Fast(Tolerance(1.0))}, "`schedule` was ThreePhases.*is Fast"),
    ],
    ids=["targets", "inputs", "model", "generator", "rate", "schedule"],
)
def test_another_fit_is_refused_while_one_is_under_way(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    stopped(Checkpoint(tmp_path))
    with pytest.raises(CheckpointError, match=f"(?s){named}.*delete"):
        fitted(Checkpoint(tmp_path), **changed)
    # And did no harm.
    assert same(fitted(Checkpoint(tmp_path)), fitted(None))


def test_kernels_that_differ_only_in_a_plain_number_are_different_models(tmp_path: Path) -> None:
    stopped(Checkpoint(tmp_path), model=gp(ScaleKernel(MaternKernel(nu=0.5))))
    with pytest.raises(CheckpointError, match="`model` was"):
        fitted(Checkpoint(tmp_path), model=gp(ScaleKernel(MaternKernel(nu=1.5))))


def test_a_frozen_parameter_makes_another_model(tmp_path: Path) -> None:
    stopped(Checkpoint(tmp_path))
    frozen = gp()
    frozen.candidates.requires_grad_(False)
    with pytest.raises(CheckpointError, match="`model` was"):
        fitted(Checkpoint(tmp_path), model=frozen)


def test_other_threads_round_differently_and_are_refused(tmp_path: Path, monkeypatch) -> None:
    stopped(Checkpoint(tmp_path))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with pytest.raises(CheckpointError, match="`threads` was 1 and is 7"):
        fitted(Checkpoint(tmp_path))


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign"])
def test_a_damaged_checkpoint_is_named_and_not_used(tmp_path: Path, damage: str) -> None:
    stopped(Checkpoint(tmp_path, 0))
    path = tmp_path / "fit.checkpoint"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    spoilt = {"cut": content[:-20], "changed": content, "empty": b"", "foreign": b"{}" * 20}
    path.write_bytes(bytes(spoilt[damage]))
    with pytest.raises(CheckpointError, match=r"fit\.checkpoint is not.*delete it"):
        fitted(Checkpoint(tmp_path, 0))


GOOD: dict[str, Any] = {"heading": {}, "finished": False, "entries": {}}
ENTRY: dict[str, Any] = {"ended": True, "start": "", "memory": {}}


@pytest.mark.parametrize(
    "state",
    [
        [GOOD],
        {},
        {"finished": False, "entries": {}},
        {**GOOD, "heading": ["inputs"]},
        {**GOOD, "heading": {"inputs": 3}},
        {**GOOD, "finished": "no"},
        {**GOOD, "entries": [ENTRY]},
        {**GOOD, "entries": {"1": ENTRY}},
        {**GOOD, "entries": {1: [True]}},
        {**GOOD, "entries": {1: {"ended": True, "memory": {}}}},
        {**GOOD, "entries": {1: {**ENTRY, "ended": None}}},
        {**GOOD, "entries": {1: {**ENTRY, "memory": []}}},
        {**GOOD, "entries": {1: {"start": "", "memory": {}}}},
        {**GOOD, "more": 1},
    ],
    ids=str,
)
def test_a_file_that_holds_something_else_than_a_journal_is_refused(
    tmp_path: Path, state: Any
) -> None:
    where = Checkpoint(tmp_path)
    where.write("fit", state)
    with pytest.raises(CheckpointError, match=r"fit\.checkpoint is not a checkpoint.*delete it"):
        opened(where, "fit")


@pytest.mark.parametrize("entry", [{}, {"parameters": {}}, {"parameters": {"values": [1]}}])
def test_a_memory_that_does_not_suit_the_fit_is_refused(tmp_path: Path, entry: Any) -> None:
    stopped(Checkpoint(tmp_path, 0))
    held = Checkpoint(tmp_path).read("fit")
    assert held is not None
    held["entries"][1]["memory"] = entry
    Checkpoint(tmp_path).write("fit", held)
    with pytest.raises(CheckpointError, match="does not suit this fit; delete it"):
        fitted(Checkpoint(tmp_path, 0))


def test_a_stage_and_what_was_decided_once_are_not_taken_for_each_other(tmp_path: Path) -> None:
    for entry in (ENTRY, {"ended": True, "value": 3}):
        journal = Journal(lambda _: None, entries={1: entry})
        with pytest.raises(CheckpointError, match="delete"):
            journal.once(lambda: 4) if entry is ENTRY else journal.stage({})


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "fit.checkpoint").mkdir()
    with pytest.raises(CheckpointError, match=r"fit\.checkpoint must be a file.*delete it"):
        fitted(Checkpoint(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x,y\n1,2\n",
        b"PK\x03\x04" + bytes(60),
        b"\x80\x04\x95 a pickle",
        save_tensors({"w": torch.zeros(2)}, metadata={"format": "pt"}),
        written({"kind": "Checkpoint", "about": {"state": {"dict": []}}, "parts": {}}, {}),
        written({"kind": "Checkpoint", "about": {"state": {"float": []}}, "parts": {}}, {}),
        written({"kind": "Checkpoint", "about": [], "parts": {}}, {}),
        written(["Checkpoint"], {}),
    ],
    ids=["empty", "table", "zip", "pickle", "safetensors", "list", "float", "about", "outline"],
)
def test_a_file_of_another_program_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "fit.checkpoint").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"fit\.checkpoint is not a checkpoint.*delete it"):
        fitted(Checkpoint(tmp_path))
    assert (tmp_path / "fit.checkpoint").read_bytes() == content


def test_a_model_file_is_no_checkpoint(tmp_path: Path) -> None:
    from winnowgp import save

    save(gp(), tmp_path / "fit.checkpoint")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        fitted(Checkpoint(tmp_path))


def test_a_full_disk_does_not_end_the_fit_and_the_last_good_file_stays(
    tmp_path: Path, monkeypatch
) -> None:
    """From the eighth writing on there is no space left; the file is that of the seventh."""
    writings = iter(range(1, 1000))
    kept: list[bytes] = []
    real = Path.write_bytes

    def write(path: Path, content: bytes) -> int:
        if next(writings) > 7:
            real(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        kept.append(content)
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.warns(CheckpointWarning, match="No space left.*goes on"):
        whole = fitted(Checkpoint(tmp_path, 0))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["fit.checkpoint"]
    assert (tmp_path / "fit.checkpoint").read_bytes() == kept[-1]
    told: list[Progress] = []
    assert same(fitted(Checkpoint(tmp_path, 0), on_progress=told.append), whole)
    assert 0 < len(told) < 12
    assert same(whole, fitted(None))


def test_a_folder_that_cannot_be_written_to_is_named_before_anything_is_computed(
    tmp_path: Path, monkeypatch
) -> None:
    def full(packed: Any, path: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "write_packed", full)
    told: list[Progress] = []
    with pytest.raises(CheckpointError, match=r"`checkpoint` must be.*No space left"):
        fitted(Checkpoint(tmp_path), on_progress=told.append)
    assert told == []


def test_a_place_that_is_no_folder_and_a_senseless_interval_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="must be a folder"):
        Checkpoint(tmp_path / "file")
    with pytest.raises(InputError, match="zero or more seconds; got -1"):
        Checkpoint(tmp_path, every=-1)
    with pytest.raises(InputError, match="got nan"):
        Checkpoint(tmp_path, every=float("nan"))


def test_it_is_written_only_as_often_as_asked(tmp_path: Path, monkeypatch) -> None:
    real, written = checkpoint_module.write_packed, [0]

    def counted(packed: Any, path: Path) -> Path:
        written[0] += 1
        return real(packed, path)

    monkeypatch.setattr(checkpoint_module, "write_packed", counted)
    fitted(Checkpoint(tmp_path / "seldom", every=1e6))
    # When it begins and when it ends.
    assert written[0] == 2
    written[0] = 0
    fitted(Checkpoint(tmp_path / "often", every=0))
    # Those two, twelve steps, and the ends of three stages.
    assert written[0] == 17


def test_a_start_that_was_computed_otherwise_is_noticed(tmp_path: Path, monkeypatch) -> None:
    """As on another processor: what lies between stages no longer leads to the same place."""
    with pytest.raises(Stopped):
        fitted(Checkpoint(tmp_path, 0), on_progress=stop_at(2, "post-train"))
    real = SparseGP.prune
    monkeypatch.setattr(SparseGP, "prune", lambda model, mask: real(model, mask.roll(1)))
    with pytest.raises(CheckpointError, match="another place than before"):
        fitted(Checkpoint(tmp_path, 0))


class Diary(Baseline[Any]):
    """A baseline with a memory that no file has words for."""

    def init(self) -> Any:
        return object()

    def step(self, values: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return torch.zeros_like(values), state


def test_a_memory_without_words_is_named(tmp_path: Path) -> None:
    schedule = plan(gradient=ScoreFunction(baseline=Diary()))
    with pytest.raises(NotSaveableError, match="got object"):
        fitted(Checkpoint(tmp_path, 0), schedule=schedule)
    # Without a checkpoint nobody asks.
    fitted(None, schedule=schedule)


def test_a_loop_of_the_users_becomes_a_stage_as_the_docs_say(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(stage = .*?)```", text, flags=re.DOTALL)

    def run(stop: int) -> tuple[float, int]:
        model, steps = torch.nn.Linear(1, 1, bias=False), [0]
        torch.nn.init.zeros_(model.weight)

        def take_a_step(model: torch.nn.Linear) -> None:
            steps[0] += 1
            if steps[0] == stop:
                raise Stopped
            model.weight.data += 1

        journal = opened(Checkpoint(tmp_path, 0), "loop")
        course = Course(seeded(), lambda progress: None, journal)
        names = {"course": course, "model": model, "take_a_step": take_a_step}
        exec(block, {**names, "not_done": lambda model: model.weight.item() < 5})
        return model.weight.item(), steps[0]

    with pytest.raises(Stopped):
        run(stop=4)
    assert run(stop=0) == (5.0, 2)
    assert run(stop=0) == (5.0, 0)


class Counter:
    """A watcher with a memory."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, progress: Progress) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_a_watcher_may_remember_scalars_of_numpy(tmp_path: Path) -> None:
    class Best(Counter):
        best, lucky = np.float64(-np.inf), np.bool_(False)

        def __call__(self, progress: Progress) -> None:
            super().__call__(progress)
            self.best = max(self.best, np.float64(progress.objective))
            stop_at(4)(progress)

        def state_dict(self) -> dict[str, Any]:
            return {"best": self.best, "lucky": self.lucky, "steps": np.int64(self.steps)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.best, self.steps = state["best"], state["steps"]

    told: list[float] = []
    fitted(None, on_progress=lambda p: told.append(p.objective))
    with pytest.raises(Stopped):
        fitted(Checkpoint(tmp_path, 0), on_progress=Best())
    watcher = Best()
    # It stops once more, at the step that was not taken.
    with pytest.raises(Stopped):
        fitted(Checkpoint(tmp_path, 0), on_progress=watcher)
    assert (watcher.steps, watcher.best) == (7, max(told[:7]))


def test_a_watcher_whose_memory_has_no_words_is_named_before_anything_is_computed(
    tmp_path: Path,
) -> None:
    class Album(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"pictures": [np.zeros(3)]}

    watcher = Album()
    with pytest.raises(NotSaveableError, match=r"got ndarray for `.*Album\.pictures\.0`"):
        fitted(Checkpoint(tmp_path), on_progress=watcher)
    assert watcher.steps == 0
    assert list(tmp_path.iterdir()) == []


def test_only_a_watcher_that_says_what_it_decides_by_belongs_to_the_request(
    tmp_path: Path,
) -> None:
    """As the docs say of watchers that raise `EndPhase`."""

    class Ends:
        def __init__(self, at: int) -> None:
            self.at = at

        def __call__(self, progress: Progress) -> None:
            stop_at(5)(progress)
            if progress.phase == "post-train" and progress.step == self.at:
                raise EndPhase

    class Says(Ends):
        def decides(self) -> str:
            return f"post-train ends at {self.at}"

    for kind, folder in ((Says, tmp_path / "says"), (Ends, tmp_path / "silent")):
        with pytest.raises(Stopped):
            fitted(Checkpoint(folder, 0), on_progress=kind(2))
    with pytest.raises(CheckpointError, match="ends at 2' and is 'post-train ends at 3'"):
        fitted(Checkpoint(tmp_path / "says", 0), on_progress=Says(3))
    gone_on = fitted(Checkpoint(tmp_path / "silent", 0), on_progress=end_at(3))
    assert same(gone_on, fitted(None, on_progress=end_at(3)))


def end_at(step: int) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if (progress.phase, progress.step) == ("post-train", step):
            raise EndPhase

    return watch


def test_a_watcher_with_a_memory_is_reminded(tmp_path: Path) -> None:
    class Impatient(Counter):
        def __call__(self, progress: Progress) -> None:
            super().__call__(progress)
            stop_at(4)(progress)

    Impatient.__qualname__ = Counter.__qualname__
    with pytest.raises(Stopped):
        fitted(Checkpoint(tmp_path, 0), on_progress=Impatient())
    counter = Counter()
    fitted(Checkpoint(tmp_path, 0), on_progress=counter)
    assert counter.steps == 12
    other: list[Progress] = []
    fitted(Checkpoint(tmp_path, 0), on_progress=other.append)
    assert other == []
