"""A thing taken apart: what JSON can say, tensors, and smaller things inside it."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


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
