"""L-BFGS on a model: hyper-parameters, noise and locations at once."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.models import InducingModel, LatentModel
from winnowgp.training.coordinates import Coordinates
from winnowgp.training.journal import UNKEPT, Journal
from winnowgp.training.lbfgs import Maximum, Stop, maximise
from winnowgp.training.stateful import Stateful
from winnowgp.typing import Scalar


def climb(
    model: InducingModel | LatentModel,
    X: Float[Tensor, "N D"],
    *,
    objective: Callable[[], Scalar],
    stop: Stop,
    on_step: Callable[[int, float], None] = lambda step, value: None,
    journal: Journal = UNKEPT,
) -> Maximum:
    """Maximise `objective`, nats as a function of the model's parameters; leave the model there.

    A parameter setting at which the objective cannot be computed is a step too long, never an
    error.

    Args:
        objective: if it remembers something from call to call, it should be `Stateful`.
        on_step: told the number of each iteration and the nats after it; may raise `EndPhase`.
        journal: where this is a stage of.
    """
    coordinates = Coordinates(model, X)

    def evaluate(x: Tensor) -> tuple[float, Tensor] | None:
        if not coordinates.sensible(x):
            return None
        coordinates.write(x)
        model.zero_grad(set_to_none=True)
        try:
            value = objective()
            if value.requires_grad:
                value.backward()
        except NotPositiveDefiniteError:
            return None
        return value.item(), coordinates.gradient()

    with torch.enable_grad():
        found = maximise(
            evaluate,
            coordinates.read(),
            stop=stop,
            on_step=on_step,
            journal=journal,
            scratch={"objective": objective} if isinstance(objective, Stateful) else None,
        )
    coordinates.write(found.x)
    model.zero_grad(set_to_none=True)
    return found
