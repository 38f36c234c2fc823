"""The file format: JSON and named tensors in one checked file, written atomically.

A file is a safetensors file, which any safetensors reader opens:

    8 bytes      length of the header, little-endian
    header       JSON: where each tensor lies, and under `__metadata__`
                     format      "winnowgp"
                     version     of this layout, an integer
                     written_by  version of winnowgp
                     outline     JSON: {"kind": ..., "value": ...}, everything but the tensors
                     sha256      digest of the version, the outline and all tensors
    the rest     tensors

Reading a file executes nothing that the file contains.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from stat import S_IMODE
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from winnowgp import __version__
from winnowgp.errors import InputError, ModelFileError
from winnowgp.io.upgrades import upgraded

FORMAT_VERSION = 11

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


@dataclass(frozen=True, slots=True)
class Archive:
    """The contents of a file: a value that `winnowgp.io.registry.serialise` has encoded."""

    kind: str
    """Purpose of the file: "Model" or "Checkpoint"."""
    outline: Any
    """The value in JSON, with references to tensors by name."""
    tensors: dict[str, Tensor]


def write_archive(archive: Archive, path: Path) -> Path:
    """Write an archive to a file; the file appears complete or not at all."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"`path` must be a file in a folder that exists; got {path}.")
    tensors = {
        name: tensor.detach().cpu().contiguous().clone() for name, tensor in archive.tensors.items()
    }
    outline = json.dumps({"kind": archive.kind, "value": archive.outline}, allow_nan=False)
    metadata = {
        "format": "winnowgp",
        "version": str(FORMAT_VERSION),
        "written_by": __version__,
        "outline": outline,
        "sha256": _digest(outline, tensors, FORMAT_VERSION),
    }
    content = save_tensors(tensors, metadata=metadata)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return path


def read_archive(path: Path) -> Archive:
    """Read a file and verify its checksum; files of earlier format versions are upgraded.

    Raises:
        ModelFileError: the file was not written by winnowgp, is truncated or damaged, or has a
            newer format.
    """
    with path.open("rb") as file:
        metadata, header = _checked_metadata(file, path)
        content = header + file.read()
    try:
        # Copies lie where the allocator aligns them: on some processors, products of the same
        # numbers at other addresses differ in the last digit.
        tensors = {name: tensor.clone() for name, tensor in load_tensors(content).items()}
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise ModelFileError(
            f"{path} is truncated or damaged; copy it again or refit the model."
        ) from error
    if _digest(metadata["outline"], tensors, int(metadata["version"])) != metadata["sha256"]:
        raise ModelFileError(
            f"{path} is damaged: its contents do not match its checksum; copy it again or refit "
            "the model."
        )
    try:
        outline = upgraded(json.loads(metadata["outline"]), int(metadata["version"]), tensors)
        return Archive(outline["kind"], outline["value"], tensors)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise unreadable(path) from error


def unreadable(path: Path) -> ModelFileError:
    """Return the error for a file with a valid checksum whose contents no winnowgp writes."""
    return ModelFileError(
        f"{path} has contents that winnowgp {__version__} does not understand. Refit the model, or "
        "load the file with the version of winnowgp that wrote it."
    )


def _checked_metadata(file: BinaryIO, path: Path) -> tuple[dict[str, str], bytes]:
    """Return the metadata in the header, and the bytes read so far."""
    foreign = ModelFileError(
        f"{path} is not a winnowgp model; pass a file that `save` or `winnow fit` wrote."
    )
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= _MAX_HEADER_BYTES:
        raise foreign
    header = file.read(length)
    if not header.startswith(b"{"):
        raise foreign
    if len(header) < length:
        raise ModelFileError(f"{path} is truncated; copy it again or refit the model.")
    try:
        metadata: Any = json.loads(header)["__metadata__"]
        ours = metadata["format"] == "winnowgp"
        version = int(metadata["version"]) if ours else 0
        complete = isinstance(metadata["outline"], str) and isinstance(metadata["sha256"], str)
    except (JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        raise foreign from None
    except ValueError:
        raise unreadable(path) from None
    if not ours:
        raise foreign
    if version > FORMAT_VERSION:
        raise ModelFileError(
            f"{path} was written by winnowgp {metadata.get('written_by')} in format {version}; "
            f"winnowgp {__version__} reads formats up to {FORMAT_VERSION}. Install a newer "
            "version of winnowgp."
        )
    if version < 1 or not complete:
        raise unreadable(path)
    return metadata, prefix + header


def _digest(outline: str, tensors: dict[str, Tensor], version: int) -> str:
    """Return the SHA-256 of the outline and of each tensor with its name, dtype and shape.

    Since version 6 it covers the version too: a damaged digit of it may be that of another version.
    """
    digest = hashlib.sha256((f"{version}\n" if version >= 6 else "").encode() + outline.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        # The strides of an empty tensor may not allow a view.
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` at the end, and is removed on any failure.

    A failure or an interruption leaves the previous contents of `path` unchanged. The new file
    takes the permissions of the file it replaces. The target of a symbolic link is replaced.

    Raises:
        InputError: `path` is not a regular file, or a link into a folder that does not exist.
    """
    # Renaming onto the link would replace the link itself.
    target = Path(os.path.realpath(path))
    if target.is_symlink() or (path.exists() and not path.is_file()):
        # A circular link, or a device such as /dev/null.
        raise InputError(f"{path} is not a regular file; pass the path of one, or of a new file.")
    if path.is_symlink() and not target.parent.is_dir():
        raise InputError(f"{path} links to {target}, whose folder does not exist; create it first.")
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=path.suffix)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(_permissions(target))
        # The contents reach the disk before the name does: a power cut leaves a complete file.
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _permissions(target: Path) -> int:
    """Return the permissions of the file, or the default of a new file: mkstemp's are private."""
    if target.exists():
        return S_IMODE(target.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
