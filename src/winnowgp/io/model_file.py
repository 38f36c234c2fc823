"""The file itself: a safetensors file whose metadata holds an outline in JSON and a digest.

    8 bytes      length of the header, little-endian
    header       JSON: where each tensor lies, and under `__metadata__`
                     format   "winnowgp"
                     version  of this layout, a whole number
                     outline  JSON of everything that is not a tensor
                     sha256   of the outline and all tensors
    the rest     tensors

Any safetensors reader opens it. Reading executes nothing: names in the outline are looked up in
fixed tables.
"""

import hashlib
import json
from json import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from winnowgp import __version__
from winnowgp.errors import InputError, ModelFileError
from winnowgp.io.packed import Packed
from winnowgp.io.written_whole import written_whole

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
