"""Model files that are whole and wrong: something was changed before the checksum was made."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from winnowgp.io import read_packed
from winnowgp.io.format import _digest

WRONG: list[Any] = [None, -1, 1e9, "word", [], {}, [1, "a"], True, {"part": "x"}, "os.system", [[]]]


def written(outline: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    """A file that says so, under a checksum that fits."""
    text = json.dumps(outline, sort_keys=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    metadata = {"format": "winnowgp", "version": "1", "written_by": "?", "outline": text}
    return save_tensors(tensors, metadata=metadata | {"sha256": _digest(text, tensors)})


def forged_outline(rng: random.Random, good: Path) -> bytes:
    """A random field of the outline, taken out or made nonsense."""
    packed = read_packed(good)
    outline = packed.outline()
    place: Any = outline
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
            break
        place = inner
    if rng.random() < 0.3:
        del place[key]
    else:
        place[key] = rng.choice([w for w in WRONG if type(w) is not type(inner)])
    return written(outline, packed.all_tensors())


def forged_tensor(rng: random.Random, good: Path) -> tuple[str, bytes]:
    """A random tensor, taken out, of another shape or type, or not finite; and its name."""
    packed = read_packed(good)
    tensors = packed.all_tensors()
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
    return name, written(packed.outline(), others if new is None else {**others, name: new})
