"""The trainable parameters of a model as one scaled vector, in which L-BFGS works."""

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
from torch.nn import Softplus
from torch.nn.functional import softplus

from winnowgp.models.base import InducingModel
from winnowgp.models.gplvm import LatentModel
from winnowgp.models.multi_output import MultiOutputGP

_FARTHEST, _CPU = 30.0, torch.device("cpu")
# Shortest lengthscale relative to an input's standard deviation. Rows are then independent, and
# squared distances so large that rounding would turn them into covariances.
_SHORTEST = 1e-4


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter; `constraint` is None where the parameter is not transformed."""

    parameter: Tensor
    constraint: Positive | GreaterThan | None
    scale: Float[Tensor, " n"]
    origin: Float[Tensor, " n"]
    """Value of the parameter at coordinate zero."""
    least: float = -_FARTHEST
    """Lowest coordinate of a positive parameter."""
    is_softplus: bool = False
    """Whether the transform is GPyTorch's default, whose inverse and slope are known."""

    def read(self) -> Float[Tensor, " n"]:
        raw = self.parameter.detach()
        if self.constraint is None:
            return raw.flatten() - self.origin
        return self.transformed(raw).log().flatten()

    def lower(self) -> Float[Tensor, " n"]:
        """Return the lower limit of a positive parameter, once for each of its numbers."""
        assert self.constraint is not None
        return (0 * self.scale + self.constraint.lower_bound).to(self.scale)

    def transformed(self, raw: Tensor) -> Tensor:
        """Return the value above its lower limit."""
        assert self.constraint is not None
        return self.constraint.transform(raw) - self.constraint.lower_bound

    def limit(self, value: float) -> Float[Tensor, " n"]:
        """Return a limit of the coordinates; infinite where the parameter is not transformed."""
        return torch.full_like(self.scale, value if self.constraint else copysign(inf, value))

    def write(self, x: Float[Tensor, " n"]) -> None:
        values = (x + self.origin).reshape(self.parameter.shape)
        if self.constraint is not None:
            values = self.constraint.inverse_transform(self.constraint.lower_bound + values.exp())
        self.parameter.detach().copy_(values)

    def slope(self) -> Float[Tensor, " n"]:
        """Return ∂raw/∂x = (t − lower) / (∂t/∂raw), t = lower + eˣ."""
        raw = self.parameter.detach().requires_grad_(True)
        with torch.enable_grad():
            value = self.transformed(raw)
            (slope,) = torch.autograd.grad(value.sum(), raw)
        return (value.detach() / slope).flatten()


@final
class Coordinates:
    """The trainable parameters of a model as a vector.

    A parameter with a lower limit l is log(value − l), whatever transform GPyTorch uses, so that
    L-BFGS does not depend on units. Locations are measured from the mean of the inputs in √D
    standard deviations; in lengthscales, kin8nm took two to three times as many iterations. Latent
    means are measured in their own standard deviations, in which the bound has about the same
    curvature for every row.

    Args:
        X: the inputs; the means of the latents for a GP-LVM.
    """

    def __init__(
        self, model: InducingModel | LatentModel | MultiOutputGP, X: Float[Tensor, "N D"]
    ) -> None:
        self.model = model
        self.entries = tuple(_entries(model, X))
        """The parameters, in the order of the vector."""
        nothing = X.new_ones(0)
        self.scale = torch.cat([nothing, *(e.scale for e in self.entries)])
        least = torch.cat([nothing, *(e.limit(e.least) for e in self.entries)])
        most = torch.cat([nothing, *(e.limit(_FARTHEST) for e in self.entries)])
        # On the CPU as well, where L-BFGS may compute its steps.
        self._limits = {least.device: (least, most), _CPU: (least.cpu(), most.cpu())}

    def read(self) -> Float[Tensor, " n"]:
        """Return the model's current coordinates."""
        return torch.cat([self.scale[:0], *(e.read() for e in self.entries)]) / self.scale

    def write(self, x: Float[Tensor, " n"]) -> None:
        """Set the model's parameters."""
        parts = (x * self.scale).split([len(e.scale) for e in self.entries])
        usual = [part for e, part in zip(self.entries, parts, strict=True) if e.is_softplus]
        # The inverse of t = log(1 + e^raw); one call for all parameters, of which most are small.
        t = torch.cat([x[:0], *usual]).exp()
        raws = iter((t + (-torch.expm1(-t)).log()).split([len(part) for part in usual]))
        for entry, part in zip(self.entries, parts, strict=True):
            if entry.is_softplus:
                entry.parameter.detach().copy_(next(raws).reshape(entry.parameter.shape))
            else:
                entry.write(part)

    def in_range(self, x: Float[Tensor, " n"]) -> bool:
        """Return whether all positive parameters are in range.

        That is within e^±30, and for lengthscales at least 1e-4 of the smallest standard deviation
        of an input.
        """
        least, most = self._limits[x.device]
        return bool(((x >= least) & (x <= most)).all())

    def clear_gradient(self) -> None:
        """Remove the gradients of the parameters."""
        for entry in self.entries:
            entry.parameter.grad = None

    def gradient(self) -> Float[Tensor, " n"]:
        """Return the gradient in these coordinates."""
        slopes = iter(self._slopes())
        parts = [self.scale[:0]]
        for entry in self.entries:
            given = entry.parameter.grad
            part = torch.zeros_like(entry.parameter) if given is None else given
            parts.append(part.flatten() * (1.0 if entry.constraint is None else next(slopes)))
        return torch.cat(parts) * self.scale

    def _slopes(self) -> Iterator[Float[Tensor, " n"]]:
        """Iterate over ∂raw/∂x of constrained parameters."""
        usual = [e.parameter.detach().flatten() for e in self.entries if e.is_softplus]
        raw = torch.cat([self.scale[:0], *usual])
        known = iter((softplus(raw) / raw.sigmoid()).split([len(part) for part in usual]))
        for entry in self.entries:
            if entry.constraint is not None:
                yield next(known) if entry.is_softplus else entry.slope()


def _entries(
    model: InducingModel | LatentModel | MultiOutputGP, X: Float[Tensor, "N D"]
) -> Iterator[Entry]:
    spread = X.std(0, correction=0)
    means = (model.mean,) if isinstance(model, InducingModel) else ()
    kernels = model.kernels if isinstance(model, MultiOutputGP) else (model.kernel,)
    for module in (*kernels, *means, model.likelihood):
        for name, parameter, constraint in module.named_parameters_and_constraints():
            if parameter.requires_grad:
                logarithmic = isinstance(constraint, Positive | GreaterThan)
                scale = X.new_ones(parameter.numel())
                entry = Entry(
                    parameter,
                    constraint if logarithmic else None,
                    scale,
                    0 * scale,
                    is_softplus=logarithmic and _is_softplus(constraint),
                )
                if logarithmic and _is_distance(module, name):
                    entry = replace(entry, least=_shortest(spread, entry))
                yield entry
    for candidates in model.candidate_sets:
        if candidates.requires_grad and len(candidates):
            scale = torch.where(spread > 0, spread * sqrt(X.shape[1]), 1.0)
            origin = X.mean(0).repeat(len(candidates))
            yield Entry(candidates, None, scale.repeat(len(candidates)), origin)
    if isinstance(model, MultiOutputGP) and model.raw_mixing.numel():
        one = X.new_ones(model.raw_mixing.numel())
        yield Entry(model.raw_mixing, None, one, 0 * one)
    if isinstance(model, LatentModel):
        mean, log_variance = model.latents.mean, model.latents.log_variance
        if mean.requires_grad:
            zero = torch.zeros_like(mean.detach()).flatten()
            yield Entry(mean, None, (0.5 * log_variance.detach()).exp().flatten(), zero)
        if log_variance.requires_grad:
            zero = torch.zeros_like(mean.detach()).flatten()
            yield Entry(log_variance, None, torch.ones_like(zero), zero)


def _is_softplus(constraint: Positive | GreaterThan) -> bool:
    transform = constraint._transform
    usual = isinstance(transform, Softplus) and transform.beta == 1.0
    return constraint.enforced and (usual or transform is softplus)


def _is_distance(module: Module, name: str) -> bool:
    """Return whether a parameter is a lengthscale in the units of the inputs."""
    owner, _, last = name.rpartition(".")
    known = isinstance(module.get_submodule(owner), RBFKernel | MaternKernel | RQKernel)
    return known and last == "raw_lengthscale"


def _shortest(spread: Float[Tensor, " D"], entry: Entry) -> float:
    """Return the lowest coordinate of a lengthscale; one that starts below it may stay there."""
    assert entry.constraint is not None
    narrowest = spread[spread > 0].amin().item() if (spread > 0).any() else 1.0
    # Coordinates are logarithms of the value above the user's own limit, which may be larger.
    above = _SHORTEST * narrowest - entry.constraint.lower_bound.max().item()
    return min(log(above) if above > 0 else -_FARTHEST, entry.read().min().item())
