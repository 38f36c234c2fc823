"""Validation of models, likelihoods and data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood, SoftmaxLikelihood
from gpytorch.models.gplvm import BayesianGPLVM
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.integrations.gpytorch.distribution import Frame
from winnowgp.integrations.gpytorch.strategies import Call, InducingStrategy

# A user's data, checked.


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs and targets as GPyTorch's bound takes them, in float64 where they are numbers."""

    x: Tensor | None
    """`[N D]`, or None where the model has latent inputs."""
    y: Tensor
    """`[N]`, `[N T]` of several tasks, or `[batch N]` of a batch of functions."""

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.y.shape[-1] if self.x is None else len(self.x)

    @classmethod
    def of(cls, model: Any, data: tuple[Tensor, Tensor] | Tensor) -> "Rows":
        """Check what was given."""
        if isinstance(model, BayesianGPLVM):
            if not isinstance(data, Tensor) or data.dim() != 2:
                raise InputError(
                    "`data` of a BayesianGPLVM must be its table, a tensor [N P]; got "
                    f"{_described(data)}."
                )
            # Its functions are the columns: their batch comes first.
            return cls(None, _checked("data", data).mT)
        pair = isinstance(data, tuple | list) and len(data) == 2
        if not pair or not all(isinstance(part, Tensor) for part in data):
            raise InputError(
                f"`data` must be two tensors, (train_x, train_y); got {_described(data)}. Those of "
                "a DataLoader of a TensorDataset are `loader.dataset.tensors`."
            )
        x, y = _checked("train_x", data[0]), _checked("train_y", data[1])
        x = x[:, None] if x.dim() == 1 else x
        if x.dim() != 2 or y.dim() == 0 or len(x) not in (y.shape[0], y.shape[-1]):
            raise InputError(
                "`train_x` must be [N D] and `train_y` have as many rows; got shapes "
                f"{list(data[0].shape)} and {list(data[1].shape)}."
            )
        return cls(x, y)


def _checked(name: str, values: Tensor) -> Tensor:
    if values.numel() == 0:
        raise InputError(f"`{name}` has no rows; choosing needs at least one.")
    # Sites are gradients, which tensors of inference mode can take no part in.
    values = values.clone() if values.is_inference() else values
    if not values.dtype.is_floating_point:
        return values if name != "train_x" else values.double()
    if not bool(torch.isfinite(values).all()):
        raise InputError(f"`{name}` has entries that are NaN or infinite; drop those rows.")
    return values.double()


def _described(data: object) -> str:
    if isinstance(data, Tensor):
        return f"a tensor of shape {list(data.shape)}"
    if isinstance(data, tuple | list):
        return f"a {type(data).__name__} of [{', '.join(type(part).__name__ for part in data)}]"
    return f"a {type(data).__name__}"


# What a model, its likelihood and its data must be to one another, else a refusal by name.


def check_likelihood(likelihood: object, rows: Rows) -> None:
    """It is one, and knows as many rows as there are."""
    if not isinstance(likelihood, Likelihood):
        raise InputError(
            "`likelihood` must be a Likelihood of GPyTorch, the one that `model` was trained "
            f"with; got {type(likelihood).__name__}."
        )
    if isinstance(likelihood, FixedNoiseGaussianLikelihood):
        known: Any = likelihood.noise_covar
        if known.noise.shape[-1] != rows.N:
            raise InputError(
                f"`likelihood` must have a noise for each of the {rows.N} rows; got "
                f"{known.noise.shape[-1]}. Pass the rows that it was made for, in their order."
            )


def check_prior(found: InducingStrategy) -> None:
    """Each function has a prior by itself, and a q(u)."""
    prior = found.strategy.model.forward(found.strategy.inducing_points)
    if not isinstance(prior, MultivariateNormal) or isinstance(prior, MultitaskMultivariateNormal):
        raise InputError(
            f"`forward` of the model that has `{_users_name(found)}` must return a "
            f"MultivariateNormal; got {type(prior).__name__}. Tasks that are correlated have an "
            "LMCVariationalStrategy around their strategy, others an "
            "IndependentMultitaskVariationalStrategy."
        )
    Frame.of(found)


def check_output(output: object, likelihood: Likelihood) -> None:
    """What the model returns is Gaussian, with tasks where the likelihood has features."""
    if not isinstance(output, MultivariateNormal):
        raise InputError(
            "`model` must return a MultivariateNormal or a MultitaskMultivariateNormal; "
            f"got {type(output).__name__}."
        )
    tasks = output.event_shape[-1] if isinstance(output, MultitaskMultivariateNormal) else None
    if isinstance(likelihood, SoftmaxLikelihood) and tasks != likelihood.num_features:
        came = f"a {type(output).__name__}" if tasks is None else f"{tasks} tasks"
        raise InputError(
            f"`model` must return a task for each of the {likelihood.num_features} features of its "
            f"SoftmaxLikelihood; got {came}. Put an IndependentMultitaskVariationalStrategy around "
            "its strategy, with that many functions in the batch of q(u)."
        )


def check_samples(found: InducingStrategy, calls: Sequence[Call]) -> None:
    """As many functions come out of a strategy as it has q(u)."""
    for call in calls:
        batch = call.mean.shape[:-1]
        if batch.numel() != found.F:
            raise InputError(
                f"`{_users_name(found)}` must see one sample of every row; got a batch of shape "
                f"{list(batch)} for {found.F} q(u). Where `forward` of `model` draws samples, let "
                "`gpytorch.settings.num_likelihood_samples` alone say how many: it is one here, "
                "and the model is evaluated several times."
            )


def check_targets(y: Tensor, output: MultivariateNormal, N: int) -> None:
    """GPyTorch would broadcast [N 1] against [N] to [N N], and sum."""
    tasks = isinstance(output, MultitaskMultivariateNormal)
    axis, batch = (0, torch.Size()) if tasks else (-1, y.shape[:-1])
    widened = torch.broadcast_shapes(batch, output.batch_shape) != output.batch_shape
    if y.shape[axis] != N or widened:
        need = f"[{N} T], a column a task" if tasks else f"[{N}]"
        if not tasks and output.batch_shape.numel() > 1:
            need = f"{[*output.batch_shape, N]}, a row of targets for each function"
        raise InputError(
            f"`train_y` must be {need}, as the bound of `model` takes it; got {list(y.shape)}."
        )


def _users_name(found: InducingStrategy) -> str:
    """Where it is in the user's own model, which has no recorder in it."""
    return found.name.removesuffix(".base_variational_strategy")
