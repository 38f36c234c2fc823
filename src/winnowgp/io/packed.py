"""A thing taken apart: what JSON can say, tensors, and smaller things inside it."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from winnowgp.errors import ModelFileError

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
