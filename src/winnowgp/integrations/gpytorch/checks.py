"""Validation of a GPyTorch model, its likelihood and data, and of the arguments of `winnow`."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, final

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood, SoftmaxLikelihood
from gpytorch.models.gplvm import BayesianGPLVM
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.integrations.gpytorch.distribution import Whitening
from winnowgp.integrations.gpytorch.strategies import Call, InducingStrategy
from winnowgp.training import FixedAlpha, Goal, MaxPoints, Tolerance


@final
@dataclass(frozen=True, slots=True)
class TrainingData:
    """Inputs and targets as GPyTorch's ELBO takes them; floating-point ones in float64."""

    x: Tensor | None
    """`[N D]`, or None if the model has latent inputs."""
    y: Tensor
    """`[N]`, `[N T]` of several tasks, or `[batch N]` of a batch of functions."""

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.y.shape[-1] if self.x is None else len(self.x)

    @classmethod
    def of(cls, model: Any, data: tuple[Tensor, Tensor] | Tensor) -> "TrainingData":
        """Check the `data` argument of `winnow`."""
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
        raise InputError(f"`{name}` has no rows; selection needs at least one.")
    # Sites are gradients, which inference tensors do not support.
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


def check_likelihood(likelihood: object, data: TrainingData) -> None:
    """Check that it is a likelihood, with a noise for each row if the noise is fixed."""
    if not isinstance(likelihood, Likelihood):
        raise InputError(
            "`likelihood` must be a Likelihood of GPyTorch, the one that `model` was trained "
            f"with; got {type(likelihood).__name__}."
        )
    if isinstance(likelihood, FixedNoiseGaussianLikelihood):
        known: Any = likelihood.noise_covar
        if known.noise.shape[-1] != data.N:
            raise InputError(
                f"`likelihood` must have a noise for each of the {data.N} rows; got "
                f"{known.noise.shape[-1]}. Pass the rows that it was made for, in their order."
            )


def check_prior(inducing: InducingStrategy) -> None:
    """Check that each function has a prior and a q(u) of its own."""
    prior = inducing.strategy.model.forward(inducing.strategy.inducing_points)
    if not isinstance(prior, MultivariateNormal) or isinstance(prior, MultitaskMultivariateNormal):
        raise InputError(
            f"`forward` of the model that has `{_users_name(inducing)}` must return a "
            f"MultivariateNormal; got {type(prior).__name__}. Wrap the strategy in an "
            "LMCVariationalStrategy for correlated tasks, or in an "
            "IndependentMultitaskVariationalStrategy."
        )
    Whitening.of(inducing)


def check_output(output: object, likelihood: Likelihood) -> None:
    """Check that the model returns a Gaussian, with a task for each feature of softmax."""
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


def check_samples(inducing: InducingStrategy, calls: Sequence[Call]) -> None:
    """Check that a strategy returns as many functions as it has q(u)."""
    for call in calls:
        batch = call.mean.shape[:-1]
        if batch.numel() != inducing.F:
            raise InputError(
                f"`{_users_name(inducing)}` must be evaluated at one sample of every row; got a "
                f"batch of shape {list(batch)} for {inducing.F} q(u). If `forward` of `model` "
                "draws samples, take their number from `gpytorch.settings.num_likelihood_samples` "
                "alone: it is one here, and the model is evaluated several times."
            )


def check_targets(y: Tensor, output: MultivariateNormal, N: int) -> None:
    """Check shapes: GPyTorch would broadcast [N 1] against [N] to [N N], and sum."""
    tasks = isinstance(output, MultitaskMultivariateNormal)
    axis, batch = (0, torch.Size()) if tasks else (-1, y.shape[:-1])
    widened = torch.broadcast_shapes(batch, output.batch_shape) != output.batch_shape
    if y.shape[axis] != N or widened:
        need = f"[{N} T], one column per task" if tasks else f"[{N}]"
        if not tasks and output.batch_shape.numel() > 1:
            need = f"{[*output.batch_shape, N]}, a row of targets for each function"
        raise InputError(
            f"`train_y` must be {need}, as the ELBO of `model` takes it; got {list(y.shape)}."
        )


def _users_name(inducing: InducingStrategy) -> str:
    """Return the name in the user's model, which has no `Recorder`."""
    return inducing.name.removesuffix(".base_variational_strategy")


def drawn_seed(generator: object) -> int:
    """Return a seed drawn from the `generator` argument of `winnow`."""
    draws = _checked_generator(generator)
    return int(torch.randint(2**31, (), generator=draws, device=draws.device))


def _checked_generator(generator: object) -> torch.Generator:
    if generator is None:
        return torch.Generator().manual_seed(0)
    if not isinstance(generator, torch.Generator):
        raise InputError(
            f"`generator` must be a torch.Generator or None; got {generator!r}. Pass "
            "`torch.Generator().manual_seed(seed)` for a seed."
        )
    return generator


def checked_goal(alpha: float | str, tolerance: float, max_points: int | None) -> Goal:
    """Return the goal that the arguments of `winnow` specify."""
    for name, value, kind, need in (
        ("alpha", alpha, Real | str, "positive or 'auto'"),
        ("tolerance", tolerance, Real, "positive nats per observation"),
        ("max_points", max_points, Integral | None, "a whole number, at least 1"),
    ):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f"`{name}` must be {need}; got {value!r}.")
    if isinstance(alpha, str) and alpha != "auto":
        raise InputError(
            f"`alpha` must be positive or 'auto'; got {alpha!r}. Larger values select fewer points."
        )
    if not isinstance(alpha, str) and max_points is not None:
        raise InputError(
            "`alpha` and `max_points` exclude each other; pass a number for one of them only."
        )
    if max_points is not None:
        return MaxPoints(max_points)
    return Tolerance(tolerance) if isinstance(alpha, str) else FixedAlpha(alpha)
