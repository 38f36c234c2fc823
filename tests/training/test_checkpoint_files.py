"""Checkpoints that are damaged, foreign, or cannot be written or read."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_tensors

from helpers.forgery import file_content
from helpers.stopped_fits import fitted, gp, same, stopped
from winnowgp import Checkpoint
from winnowgp.errors import CheckpointError, CheckpointWarning, InputError
from winnowgp.training import Progress
from winnowgp.training import checkpoint as checkpoint_module
from winnowgp.training.checkpoint import CheckpointLog, open_checkpoint


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "foreign"])
def test_checkpoint_damaged_file_raises(tmp_path: Path, damage: str) -> None:
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
        {**GOOD, "more": 1},
    ],
    ids=str,
)
def test_open_checkpoint_other_structure_raises(tmp_path: Path, state: Any) -> None:
    where = Checkpoint(tmp_path)
    where.write(state)
    with pytest.raises(CheckpointError, match=r"fit\.checkpoint is not a checkpoint.*delete it"):
        open_checkpoint(where)


@pytest.mark.parametrize("entry", [{}, {"parameters": {}}, {"parameters": {"values": [1]}}])
def test_stage_unsuitable_state_raises(tmp_path: Path, entry: Any) -> None:
    stopped(Checkpoint(tmp_path, 0))
    held = Checkpoint(tmp_path).read()
    assert held is not None
    held["entries"][1]["memory"] = entry
    Checkpoint(tmp_path).write(held)
    with pytest.raises(CheckpointError, match="does not suit this fit; delete it"):
        fitted(Checkpoint(tmp_path, 0))


def test_log_confused_stage_and_value_raises(tmp_path: Path) -> None:
    for entry in (ENTRY, {"ended": True, "value": 3}):
        checkpoint_log = CheckpointLog(lambda _: None, entries={1: entry})
        with pytest.raises(CheckpointError, match="delete"):
            checkpoint_log.once(lambda: 4) if entry is ENTRY else checkpoint_log.stage({})


def test_checkpoint_folder_instead_of_file_raises(tmp_path: Path) -> None:
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
        file_content({"kind": "Checkpoint", "value": {"$tuple": 3}}, {}),
        file_content({"kind": "Checkpoint", "value": {"$float": []}}, {}),
        file_content({"kind": "Checkpoint", "about": {}, "parts": {}}, {}, version="1"),
        file_content(["Checkpoint"], {}),
    ],
    ids=[
        "empty",
        "table",
        "zip",
        "pickle",
        "safetensors",
        "tuple",
        "float",
        "version 1",
        "outline",
    ],
)
def test_checkpoint_foreign_file_raises_and_remains(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "fit.checkpoint").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"fit\.checkpoint is not a checkpoint.*delete it"):
        fitted(Checkpoint(tmp_path))
    assert (tmp_path / "fit.checkpoint").read_bytes() == content


def test_checkpoint_model_file_raises(tmp_path: Path) -> None:
    from winnowgp import save

    save(gp(), tmp_path / "fit.checkpoint")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        fitted(Checkpoint(tmp_path))


def test_full_disk_warns_and_last_file_remains(tmp_path: Path, monkeypatch) -> None:
    """From the eighth write on there is no space left; the file is that of the seventh."""
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
    with pytest.warns(CheckpointWarning, match="No space left.*continues"):
        whole = fitted(Checkpoint(tmp_path, 0))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["fit.checkpoint"]
    assert (tmp_path / "fit.checkpoint").read_bytes() == kept[-1]
    events: list[Progress] = []
    assert same(fitted(Checkpoint(tmp_path, 0), callbacks=events.append), whole)
    assert 0 < len(events) < 12
    assert same(whole, fitted(None))


def test_unwritable_folder_raises_before_any_step(tmp_path: Path, monkeypatch) -> None:
    def full(packed: Any, path: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "write_archive", full)
    events: list[Progress] = []
    with pytest.raises(CheckpointError, match=r"`checkpoint` must be.*No space left"):
        fitted(Checkpoint(tmp_path), callbacks=events.append)
    assert events == []


def test_checkpoint_invalid_arguments_raise(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="must be a folder"):
        Checkpoint(tmp_path / "file")
    with pytest.raises(InputError, match="zero or more seconds; got -1"):
        Checkpoint(tmp_path, every=-1)
    with pytest.raises(InputError, match="got nan"):
        Checkpoint(tmp_path, every=float("nan"))


def test_temporary_file_that_cannot_be_removed_is_ignored(tmp_path: Path) -> None:
    (tmp_path / ".left.checkpoint").mkdir()
    assert same(fitted(Checkpoint(tmp_path)), fitted(None))
