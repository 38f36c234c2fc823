"""The model file: tensors and JSON in one checked file, written atomically."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from json import JSONDecodeError
from math import isfinite
from pathlib import Path
from stat import S_IMODE
from typing import Any, BinaryIO, TypeAlias, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from winnowgp import __version__
from winnowgp.errors import InputError, ModelFileError, NotSaveableError

# A thing taken apart: what JSON can say, tensors, and smaller things inside it.


_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class Packed:
    """All that a file holds of a thing.

    >>> inner = Packed("Kernel", {"name": "RBFKernel"})
    >>> Packed("Posterior", parts={"kernel": inner}).outline()["parts"]["kernel"]["kind"]
    'Kernel'
    """

    kind: str
    """The name under which a `Packing` is known."""
    about: dict[str, Any] = field(default_factory=dict)
    """Anything that JSON can say: no NaN and no infinity."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    parts: "dict[str, Packed]" = field(default_factory=dict)

    def numbers(self, name: str, *shape: int | None, finite: bool = True) -> Tensor:
        """A tensor of floating-point numbers, checked; None in the shape is any size.

        Args:
            finite: whether infinity is refused; NaN always is.
        """
        found = self.tensors.get(name)
        if found is None:
            raise ModelFileError(f"lacks the numbers {name!r} of a {self.kind}")
        if len(found.shape) != len(shape) or any(
            want is not None and want != have for want, have in zip(shape, found.shape, strict=True)
        ):
            wanted = [("any" if size is None else size) for size in shape]
            raise ModelFileError(
                f"{name!r} of a {self.kind} has shape {list(found.shape)} where {wanted} belongs"
            )
        odd = ~torch.isfinite(found) if finite else torch.isnan(found)
        if not found.dtype.is_floating_point or bool(odd.any()):
            raise ModelFileError(f"{name!r} of a {self.kind} holds something other than numbers")
        return found

    def said(self, name: str, kind: type[_Kind]) -> _Kind:
        """What is said under a name, checked: a bool is no int."""
        found = self.about.get(name)
        if type(found) is not kind:
            raise ModelFileError(f"says {found!r:.40} for {name!r} of a {self.kind}")
        return found

    def outline(self) -> dict[str, Any]:
        """Everything but the tensors, for JSON."""
        parts = {name: part.outline() for name, part in self.parts.items()}
        return {"kind": self.kind, "about": self.about, "parts": parts}

    def all_tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Every tensor here and below, by its path."""
        found = {f"{prefix}{name}": tensor for name, tensor in self.tensors.items()}
        for name, part in self.parts.items():
            found |= part.all_tensors(f"{prefix}{name}/")
        return found

    @classmethod
    def of(cls, outline: dict[str, Any], tensors: dict[str, Tensor], prefix: str = "") -> "Packed":
        """From an outline and tensors by path; the way back."""
        parts = {
            name: cls.of(part, tensors, f"{prefix}{name}/")
            for name, part in outline["parts"].items()
        }
        own = {
            path.removeprefix(prefix): tensor
            for path, tensor in tensors.items()
            if path.startswith(prefix) and "/" not in path.removeprefix(prefix)
        }
        return cls(outline["kind"], outline["about"], own, parts)


# How a kind of thing goes into a file and comes out again.


@dataclass(frozen=True, slots=True)
class Packing:
    """Two functions that undo each other.

    A new model becomes saveable by a pair of these and a line in `winnowgp.io.save`.
    """

    pack: Callable[[Any], Packed]
    unpack: Callable[[Packed], Any]


# Nested states, as `state_dict` gives them, in words and tensors.


State: TypeAlias = Any

"""None, a truth value, number, string or tensor, or lists, tuples and dictionaries of these.

A scalar of NumPy's comes back as the plain number that it is, a tensor of no dimensions as itself.
"""


def packed_state(kind: str, state: State) -> Packed:
    """A state taken apart.

    >>> state_from(packed_state("State", {"bound": float("-inf"), "sizes": (3, [4, None])}))
    {'bound': -inf, 'sizes': (3, [4, None])}

    Raises:
        NotSaveableError: it holds something else than a `State` may.
    """
    tensors: dict[str, Tensor] = {}
    return Packed(kind, {"state": _outline(state, tensors, "")}, tensors)


def state_from(packed: Packed) -> State:
    """The way back.

    Raises:
        KeyError: it says something that `packed_state` does not, or asks for a tensor twice, which
            would let a small file fill memory.
    """
    return _filled(packed.about["state"], dict(packed.tensors))


def _outline(state: State, tensors: dict[str, Tensor], at: str) -> Any:
    """What JSON can say of the part of a state that is found at a path."""
    if isinstance(state, np.generic):
        state = state.item()
    if isinstance(state, float) and not isfinite(state):
        return {"float": str(state)}
    if state is None or type(state) in (bool, int, float, str):
        return state
    if isinstance(state, Tensor):
        name = str(len(tensors))
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, Mapping):
        if all(type(key) is str for key in state):
            parts = {key: _outline(value, tensors, f"{at}.{key}") for key, value in state.items()}
            return {"dict": parts}
        # JSON would turn 0 into "0", and optimisers count their parameters.
        pairs = [(f"{at}.{key}", (key, value)) for key, value in state.items()]
        return {"pairs": [[_outline(part, tensors, p) for part in pair] for p, pair in pairs]}
    if isinstance(state, list | tuple):
        kind = "list" if isinstance(state, list) else "tuple"
        return {kind: [_outline(v, tensors, f"{at}.{i}") for i, v in enumerate(state)]}
    where = f" for `{at.removeprefix('.')}`" if at else ""
    raise NotSaveableError(
        f"a state may hold numbers, strings, tensors, and lists, tuples and dictionaries of these; "
        f"got {type(state).__name__}{where}. Turn it into one of them in `state_dict`."
    )


def _filled(outline: Any, tensors: dict[str, Tensor]) -> State:
    if not isinstance(outline, dict):
        return outline
    ((kind, value),) = outline.items()
    if kind == "float":
        return float(value)
    if kind == "tensor":
        # A copy: where in a file a tensor lay must not decide how it is aligned, and so rounded.
        return tensors.pop(value).clone()
    if kind == "dict":
        return {key: _filled(part, tensors) for key, part in value.items()}
    if kind == "pairs":
        return {_filled(key, tensors): _filled(part, tensors) for key, part in value}
    made = {"list": list, "tuple": tuple}[kind]
    return made(_filled(part, tensors) for part in value)


# Files that appear whole or not at all.


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A neighbouring file to write to, renamed to `path` at the end; removed if anything fails.

    An interruption counts as a failure too: what stood at `path` before is untouched. The new file
    has the permissions of the one it replaces. A symbolic link stays one: what it leads to is
    replaced.
    """
    # A rename would put a file in the place of the link itself.
    place = Path(os.path.realpath(path))
    if place.is_symlink() or (path.exists() and not path.is_file()):
        # Or in the place of a device such as /dev/null; links that lead in a circle lead nowhere.
        raise InputError(f"{path} is not a plain file; give the path of one, or a new one.")
    if path.is_symlink() and not place.parent.is_dir():
        raise InputError(f"{path} leads to {place}, whose folder does not exist; make it first.")
    descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=".", suffix=path.suffix)
    os.close(descriptor)
    part = Path(name)
    try:
        yield part
        part.chmod(_permissions(place))
        _settle(part)
        part.replace(place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _permissions(place: Path) -> int:
    """Those of the file that is there, else those of any new file: mkstemp's are private."""
    if place.exists():
        return S_IMODE(place.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _settle(part: Path) -> None:
    """On the disk itself, before the name is: a power cut leaves the old file or the new one."""
    with part.open("rb") as file:
        os.fsync(file.fileno())


# The file itself: a safetensors file whose metadata holds an outline in JSON and a digest.
#
#     8 bytes      length of the header, little-endian
#     header       JSON: where each tensor lies, and under `__metadata__`
#                      format   "winnowgp"
#                      version  of this layout, a whole number
#                      outline  JSON of everything that is not a tensor
#                      sha256   of the outline and all tensors
#     the rest     tensors
#
# Any safetensors reader opens it. Reading executes nothing: names in the outline are looked up in
# fixed tables.


FORMAT_VERSION = 1

_LONGEST_HEADER = 100_000_000  # safetensors' own limit


def write_packed(packed: Packed, path: Path) -> Path:
    """Write the file whole or not at all."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"`path` must be a file in a folder that exists; got {path}.")
    tensors = {
        name: tensor.detach().cpu().contiguous().clone()
        for name, tensor in packed.all_tensors().items()
    }
    outline = json.dumps(packed.outline(), allow_nan=False, sort_keys=True)
    metadata = {
        "format": "winnowgp",
        "version": str(FORMAT_VERSION),
        "written_by": __version__,
        "outline": outline,
        "sha256": _digest(outline, tensors),
    }
    content = save_tensors(tensors, metadata=metadata)
    with written_whole(path) as part:
        part.write_bytes(content)
    return path


def read_packed(path: Path) -> Packed:
    """Read and check a file; a clear error if it is not whole and ours."""
    with path.open("rb") as file:
        metadata, start = _checked_metadata(file, path)
        content = start + file.read()
    try:
        tensors = load_tensors(content)
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise ModelFileError(
            f"{path} is cut short or damaged; copy it again or fit anew."
        ) from error
    if _digest(metadata["outline"], tensors) != metadata["sha256"]:
        raise ModelFileError(
            f"{path} is damaged: its contents do not match its checksum; copy it again or fit anew."
        )
    try:
        return Packed.of(json.loads(metadata["outline"]), tensors)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise unreadable(path) from error


def unreadable(path: Path) -> ModelFileError:
    """For a file that is whole but says something no winnowgp wrote."""
    return ModelFileError(
        f"{path} says something this winnowgp does not understand; was it edited by hand? "
        "Fit anew, or load it with the version that wrote it."
    )


def _checked_metadata(file: BinaryIO, path: Path) -> tuple[dict[str, str], bytes]:
    """What the header says about the file, and the bytes read so far."""
    foreign = ModelFileError(
        f"{path} is not a winnowgp model; give a file that `save` or `winnow fit` wrote."
    )
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not 2 <= length <= _LONGEST_HEADER:
        raise foreign
    header = file.read(length)
    if not header.startswith(b"{"):
        raise foreign
    if len(header) < length:
        raise ModelFileError(f"{path} is cut short; copy it again or fit anew.")
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
            f"this is winnowgp {__version__}, which reads formats up to {FORMAT_VERSION}. "
            "Upgrade: pip install --upgrade winnowgp."
        )
    if version < 1 or not complete:
        raise unreadable(path)
    return metadata, head + header


def _digest(outline: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the outline, and of every tensor with its name, type and shape."""
    digest = hashlib.sha256(outline.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
