"""Model files with a valid checksum and invalid contents."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from winnowgp.io.format import FORMAT_VERSION, _digest, read_archive

WRONG: list[Any] = [None, -1, 1e9, "word", [], {}, [1, "a"], True, {"part": "x"}, "os.system", [[]]]


def file_content(outline: Any, tensors: dict[str, torch.Tensor], **metadata: str) -> bytes:
    """Return a file with an outline, tensors and a checksum that fits."""
    text = json.dumps(outline)
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    entries = {"format": "winnowgp", "version": str(FORMAT_VERSION), "written_by": "9.9"}
    given = metadata.get("version", "")
    version = int(given) if given.isdigit() else FORMAT_VERSION
    entries |= {"outline": text, "sha256": _digest(text, tensors, version)} | metadata
    return save_tensors(tensors, metadata=entries)


def contents(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the outline of a file, with its kind, and its tensors."""
    archive = read_archive(path)
    return {"kind": archive.kind, "value": archive.outline}, archive.tensors


def forged_outline(rng: random.Random, good: Path) -> bytes:
    """Return a file with a random field of the outline deleted or replaced."""
    outline, tensors = contents(good)
    container: Any = outline
    while True:
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        key = rng.choice(keys)
        if "value" in container and rng.random() < 0.9:
            key = "value"
        elif "$object" in container and rng.random() < 0.8:
            key = "state"
        inner = container[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.1:
            break
        container = inner
    if rng.random() < 0.3:
        del container[key]
    else:
        container[key] = rng.choice([w for w in WRONG if type(w) is not type(inner)])
    return file_content(outline, tensors)


def forged_tensor(rng: random.Random, good: Path) -> tuple[str, bytes]:
    """Return a file with a random tensor deleted or changed, and the name of the tensor."""
    outline, tensors = contents(good)
    name = rng.choice([n for n, t in tensors.items() if t.numel() > 1])
    tensor = tensors[name]
    changed = [
        None,
        tensor[:-1] if tensor.dim() < 3 else tensor[:, :-1],
        torch.cat([tensor] * 5),
        tensor[None],
        tensor.flatten()[0],
        tensor.to(torch.int16),
    ]
    if tensor.dtype.is_floating_point:
        changed.append(torch.full_like(tensor, torch.nan))
    new = rng.choice(changed)
    others = {n: t for n, t in tensors.items() if n != name}
    return name, file_content(outline, others if new is None else {**others, name: new})
