"""A model's parameters as one vector in which steps of equal length mean about the same."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import copysign, inf, log, sqrt
from typing import final

import torch
from gpytorch import Module
from gpytorch.constraints import GreaterThan, Positive
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel
from jaxtyping import Float
from torch import Tensor

from winnowgp.models.base import InducingModel
from winnowgp.models.gplvm import LatentModel

_FARTHEST = 30.0
# In spreads of an input. All rows are then independent of each other, and squared distances in
# lengthscales are so large that their rounding is about to make covariances of them.
_SHORTEST = 1e-4


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter; `constraint` is None where the parameter is its own coordinate."""

    parameter: Tensor
    constraint: Positive | GreaterThan | None
    scale: Float[Tensor, " n"]
    origin: Float[Tensor, " n"]
    """What a coordinate of zero stands for."""
    least: float = -_FARTHEST
    """Below it lies no sensible scale of a positive parameter."""

    def read(self) -> Float[Tensor, " n"]:
        raw = self.parameter.detach()
        if self.constraint is None:
            return raw.flatten() - self.origin
        return self.transformed(raw).log().flatten()

    def transformed(self, raw: Tensor) -> Tensor:
        """Value − limit."""
        assert self.constraint is not None
        return self.constraint.transform(raw) - self.constraint.lower_bound

    def limit(self, value: float) -> Float[Tensor, " n"]:
        """Of the coordinates; none where the parameter is its own."""
        return torch.full_like(self.scale, value if self.constraint else copysign(inf, value))

    def write(self, x: Float[Tensor, " n"]) -> None:
        values = (x + self.origin).reshape(self.parameter.shape)
        if self.constraint is not None:
            values = self.constraint.inverse_transform(self.constraint.lower_bound + values.exp())
        self.parameter.detach().copy_(values)


@final
class Coordinates:
    """The trainable parameters of a model as a vector.

    A parameter that GPyTorch keeps above a limit l is seen as log(value − l), whatever transform
    GPyTorch uses: L-BFGS then needs no notion of units. Locations are measured from the mean of
    the inputs in units of √D spreads; in units of a lengthscale two to three times as many
    iterations were needed on kin8nm. Latent means are measured in their own standard deviations,
    in which the bound is about equally curved for every row.

    Args:
        X: the inputs; those of a latent model are the means of its latents.
    """

    def __init__(self, model: InducingModel | LatentModel, X: Float[Tensor, "N D"]) -> None:
        self.model = model
        self._entries = tuple(_entries(model, X))
        nothing = X.new_ones(0)
        self.scale = torch.cat([nothing, *(e.scale for e in self._entries)])
        self._least = torch.cat([nothing, *(e.limit(e.least) for e in self._entries)])
        self._most = torch.cat([nothing, *(e.limit(_FARTHEST) for e in self._entries)])

    def read(self) -> Float[Tensor, " n"]:
        """Where the model stands."""
        return torch.cat([self.scale[:0], *(e.read() for e in self._entries)]) / self.scale

    def write(self, x: Float[Tensor, " n"]) -> None:
        """Move the model."""
        sizes = [len(e.scale) for e in self._entries]
        for entry, part in zip(self._entries, (x * self.scale).split(sizes), strict=True):
            entry.write(part)

    def sensible(self, x: Float[Tensor, " n"]) -> bool:
        """Whether every positive parameter has a sensible scale: within e^±30, and lengthscales
        not below a ten-thousandth of the narrowest input's spread.
        """
        return bool(((x >= self._least) & (x <= self._most)).all())

    def gradient(self) -> Float[Tensor, " n"]:
        """The parameters' gradients in these coordinates."""
        slopes = iter(self._slopes())
        parts = [self.scale[:0]]
        for entry in self._entries:
            given = entry.parameter.grad
            part = torch.zeros_like(entry.parameter) if given is None else given
            parts.append((part if entry.constraint is None else part * next(slopes)).flatten())
        return torch.cat(parts) * self.scale

    def _slopes(self) -> list[Tensor]:
        """∂raw/∂x = (t − lower) / (∂t/∂raw) of each constrained parameter, t = lower + eˣ."""
        constrained = [e for e in self._entries if e.constraint is not None]
        raws = [e.parameter.detach().requires_grad_(True) for e in constrained]
        with torch.enable_grad():
            values = [e.transformed(raw) for e, raw in zip(constrained, raws, strict=True)]
            slopes = torch.autograd.grad([value.sum() for value in values], raws) if raws else ()
        return [value.detach() / slope for value, slope in zip(values, slopes, strict=True)]


def _entries(model: InducingModel | LatentModel, X: Float[Tensor, "N D"]) -> Iterator[_Entry]:
    spread = X.std(0, correction=0)
    means = (model.mean,) if isinstance(model, InducingModel) else ()
    for module in (model.kernel, *means, model.likelihood):
        for name, parameter, constraint in module.named_parameters_and_constraints():
            if parameter.requires_grad:
                logarithmic = isinstance(constraint, Positive | GreaterThan)
                scale = X.new_ones(parameter.numel())
                entry = _Entry(parameter, constraint if logarithmic else None, scale, 0 * scale)
                if logarithmic and _is_distance(module, name):
                    entry = replace(entry, least=_shortest(spread, entry))
                yield entry
    if model.candidates.requires_grad and model.K:
        scale = torch.where(spread > 0, spread * sqrt(X.shape[1]), 1.0).repeat(model.K)
        yield _Entry(model.candidates, None, scale, X.mean(0).repeat(model.K))
    if isinstance(model, LatentModel):
        mean, log_variance = model.latents.mean, model.latents.log_variance
        if mean.requires_grad:
            zero = torch.zeros_like(mean.detach()).flatten()
            yield _Entry(mean, None, (0.5 * log_variance.detach()).exp().flatten(), zero)
        if log_variance.requires_grad:
            zero = torch.zeros_like(mean.detach()).flatten()
            yield _Entry(log_variance, None, torch.ones_like(zero), zero)


def _is_distance(module: Module, name: str) -> bool:
    """Whether a parameter is a lengthscale in the units of the inputs."""
    owner, _, last = name.rpartition(".")
    known = isinstance(module.get_submodule(owner), RBFKernel | MaternKernel | RQKernel)
    return known and last == "raw_lengthscale"


def _shortest(spread: Float[Tensor, " D"], entry: _Entry) -> float:
    """Least coordinate of a lengthscale; one that starts below it may stay there."""
    assert entry.constraint is not None
    narrowest = spread[spread > 0].amin().item() if (spread > 0).any() else 1.0
    # Coordinates are logarithms of what is above the user's own limit, which may be longer.
    above = _SHORTEST * narrowest - entry.constraint.lower_bound.max().item()
    return min(log(above) if above > 0 else -_FARTHEST, entry.read().min().item())
