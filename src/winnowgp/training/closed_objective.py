"""The objective of L-BFGS and its gradient in its coordinates, without autograd.

With few rows, autograd of constraints, kernels and priors takes longer than the bound. Here the
chain rule is written out: a positive parameter has the value v = l + eˣ, so that dv/dx = v − l, and
the log densities of log-normal priors are one expression,

    log p(v) = −z²/2 − log v − log(s √2π),   z = (log v − m)/s,   d log p/dv = −(z/s + 1)/v.
"""

from collections.abc import Callable
from math import inf, log, pi
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.models import SparseGP
from winnowgp.models.closed_forms import ClosedForm, ParametricBound
from winnowgp.models.priors import log_normal_priors
from winnowgp.training.coordinates import Coordinates
from winnowgp.typing import Scalar


def closed_objective(
    model: Any, objective: Callable[[], Scalar], coordinates: Coordinates
) -> "ClosedObjective | None":
    """Return the objective with the priors as a function of coordinates; None if autograd must do.

    Args:
        model: the model of the coordinates.
        objective: nats as a function of the model's parameters.
    """
    if not isinstance(objective, ParametricBound) or not isinstance(model, SparseGP):
        return None
    entries = coordinates.entries
    positive = [entry for entry in entries if entry.constraint is not None]
    others = [entry.parameter for entry in entries if entry.constraint is None]
    if objective.model is not model or not positive:
        return None
    # Locations come last, and are the only parameters without a constraint.
    if [id(other) for other in others] not in ([], [id(model.candidates)]):
        return None
    form, priors = ClosedForm.of(objective), log_normal_priors(model)
    if form is None or priors is None:
        return None
    return ClosedObjective(form, coordinates, priors)


@final
class ClosedObjective:
    """A bound of a `SparseGP` and the priors of its parameters, at coordinates of L-BFGS.

    Args:
        form: the bound.
        coordinates: those of its model.
        priors: the priors of its parameters.
    """

    def __init__(self, form: ClosedForm, coordinates: Coordinates, priors: "Priors") -> None:
        self._form = form
        learnt = [entry for entry in coordinates.entries if entry.constraint is not None]
        self._learnt = [(id(entry.parameter), len(entry.scale)) for entry in learnt]
        self._sizes = [size for _, size in self._learnt]
        self._lower = torch.cat([entry.lower() for entry in learnt])
        self._scale = coordinates.scale[len(self._lower) :]
        # Values of parameters that are not learnt.
        self._values = form.values()
        self._constant, start = 0.0, 0
        one = torch.ones_like(self._lower)
        self._mean, self._width, self._cap, self._has = 0 * one, inf * one, inf * one, 0 * one
        for name, size in self._learnt:
            place = slice(start, start + size)
            if name in priors:
                self._mean[place], self._width[place], self._cap[place] = priors[name]
                self._has[place] = 1.0
            start += size
        names = [name for name, _ in self._learnt]
        for name, (mean, width, cap) in priors.items():
            # Also of parameters that are not learnt.
            value = self._lower.new_zeros(1)
            if name not in names:
                value = self._values[name].log().clamp_max(cap)
                self._constant -= (0.5 * ((value - mean) / width).square() + value).sum().item()
            count = dict(self._learnt).get(name, len(value))
            self._constant -= count * (log(width) + 0.5 * log(2 * pi))

    @property
    def has_information(self) -> bool:
        """Whether this is the evidence of targets with one noise variance, and its parameters."""
        return self._form.has_information and not len(self._scale)

    def __call__(self, x: Float[Tensor, " n"]) -> tuple[float, Float[Tensor, " n"]]:
        """Return nats and their gradient; locations must be those of the model.

        Raises:
            NotPositiveDefiniteError: the bound cannot be computed there.
        """
        value, gradient, _ = self.informed(x)
        return value, gradient

    def informed(
        self, x: Float[Tensor, " n"]
    ) -> tuple[float, Float[Tensor, " n"], Float[Tensor, "q q"] | None]:
        """Return nats, their gradient, and the average information of the exact evidence.

        The information includes the curvature of the priors; with it a Newton step approaches the
        maximum. It is None for the bound of inducing points.

        Raises:
            NotPositiveDefiniteError: the bound cannot be computed there.
        """
        # L-BFGS and Newton steps of few parameters are computed on the CPU.
        device, x = x.device, x.to(self._lower.device)
        slope = x[: len(self._lower)].exp()
        value = self._lower + slope
        parts = zip(self._learnt, value.split(self._sizes), strict=True)
        values = {**self._values, **{name: part for (name, _), part in parts}}
        bound = self._form.gradient(values)
        log_value = torch.minimum(value.log(), self._cap)
        z = (log_value - self._mean) / self._width
        prior = (0.5 * z.square() + log_value) @ self._has
        below = self._has * (log_value < self._cap)
        gradient = torch.cat([bound.parameters[name] for name, _ in self._learnt])
        gradient = (gradient - below * (z / self._width + 1) / value) * slope
        if len(self._scale):
            gradient = torch.cat([gradient, bound.locations.flatten() * self._scale])
        information = bound.information
        if information is not None:
            positions, count = {}, 0
            for name, part in bound.parameters.items():
                positions[name] = torch.arange(count, count + len(part), device=part.device)
                count += len(part)
            index = torch.cat([positions[name] for name, _ in self._learnt])
            information = information[index[:, None], index] * torch.outer(slope, slope)
            information.diagonal().add_(below * (slope / (self._width * value)).square())
            information = information.to(device)
        return (bound.value - prior).item() + self._constant, gradient.to(device), information


Priors = dict[int, tuple[float, float, float]]
