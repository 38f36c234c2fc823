"""Different numbers of inducing points for the latent processes of a multitask GPyTorch model.

GPyTorch stores the inducing points of all processes in one tensor `[Q M D]`, so that `winnow` gives
each the same number. `winnow_processes` converts such a model to a `MultiOutputGP`, whose processes
have as many as each needs.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, final

import torch
from gpytorch import kernels, means
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from gpytorch.models import ApproximateGP
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
)
from jaxtyping import Float
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import MultiOutputGP, MultiOutputPosterior
from winnowgp.models.observations import LEAST_NOISE, Prediction
from winnowgp.selection import elimination_frontier
from winnowgp.training import Tolerance


@final
@dataclass(frozen=True, slots=True)
class WinnowedProcesses:
    """A multitask model whose processes have inducing points of their own."""

    posterior: MultiOutputPosterior
    """q(f) of the processes, for targets without their offset."""
    offset: Float[Tensor, " P"]
    """What the constant prior means of the processes add to each target."""
    elbo: float
    """ELBO with the selected inducing points and the optimal q(u), in nats."""
    full_elbo: float
    """ELBO with all inducing points of the model and the optimal q(u), in nats."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of inducing points of each process."""
        return self.posterior.sizes

    def predict(self, X: Float[Tensor, "N D"], *, observed: bool = False) -> Prediction:
        """Return mean and variance of each row and task.

        Args:
            observed: whether to predict an observation rather than the function.
        """
        prediction = self.posterior.predict(X, observed=observed)
        return Prediction(self.offset + prediction.mean, prediction.variance)


def winnow_processes(
    model: ApproximateGP,
    likelihood: Likelihood,
    data: tuple[Float[Tensor, "N D"], Float[Tensor, "N P"]],
    *,
    tolerance: float = 0.01,
) -> WinnowedProcesses:
    """Select inducing points of each latent process of a fitted multitask model.

    One backward elimination over the inducing points of all processes removes those that are not
    needed. Hyper-parameters and locations stay those of the model; q(u) is the optimal one.

    Args:
        model: a model with an `LMCVariationalStrategy` or an
            `IndependentMultitaskVariationalStrategy`, and zero or constant prior means.
        likelihood: a Gaussian likelihood, or a `MultitaskGaussianLikelihood` of rank 0.
        data: inputs, and targets with a column per task; NaN where they are missing.
        tolerance: largest ELBO gap to all inducing points, in nats per observed target.

    Raises:
        InputError: the model has another strategy, mean or likelihood.
    """
    gp, offset = _converted(model, likelihood)
    X, Y = (each.detach().to(gp.mixing) for each in data)
    if Y.dim() != 2 or Y.shape[1] != gp.P:
        raise InputError(
            f"`data` must have targets [N {gp.P}], a column for each task; got {list(Y.shape)}."
        )
    rows = Dataset.of(X, Y - offset, missing=True)
    gp.check(rows)
    frontier = elimination_frontier(gp.subset_statistics(rows))
    count = int((~torch.isnan(Y)).sum())
    reference = frontier.bounds[-1].item()
    # The tolerance of a frontier is per observation of its own count.
    size = Tolerance(tolerance * count / frontier.N).size(frontier, reference=reference)
    pruned = gp.prune(frontier.masks[size].split([len(Z) for Z in gp.candidate_sets]))
    return WinnowedProcesses(
        pruned.posterior(rows), offset, pruned.fixed_bound(rows), gp.fixed_bound(rows)
    )


@torch.no_grad()
def _converted(
    model: ApproximateGP, likelihood: Likelihood
) -> tuple[MultiOutputGP, Float[Tensor, " P"]]:
    """Return the prior of a multitask model, and the offsets of its targets."""
    strategy: Any = model.variational_strategy
    if not isinstance(strategy, LMCVariationalStrategy | IndependentMultitaskVariationalStrategy):
        raise InputError(
            "`model` must have an LMCVariationalStrategy or an "
            f"IndependentMultitaskVariationalStrategy; got {type(strategy).__name__}. Use `winnow` "
            "for models of one process."
        )
    Z: Any = strategy.base_variational_strategy.inducing_points
    if isinstance(strategy, LMCVariationalStrategy):
        coefficients: Any = strategy.lmc_coefficients
        mixing = coefficients.detach().mT
    else:
        tasks = strategy.num_tasks
        mixing = torch.eye(tasks, dtype=Z.dtype, device=Z.device)
    P, Q = mixing.shape
    points = Z.detach().expand(Q, *Z.shape[-2:])
    covariance: Any = getattr(model, "covar_module", None)
    if not isinstance(covariance, kernels.Kernel) or covariance.batch_shape not in ((Q,), ()):
        raise InputError(
            "`model` must have one kernel `covar_module` for all processes or one for each, of "
            f"batch shape [] or [{Q}]; got "
            f"{getattr(covariance, 'batch_shape', type(covariance).__name__)}."
        )
    several = len(covariance.batch_shape) == 1
    own = [covariance[q] if several else deepcopy(covariance) for q in range(Q)]
    gp = MultiOutputGP(own, list(points), mixing=mixing, noise=_noise(likelihood, P, mixing))
    return gp, mixing @ _constants(model, Q, mixing)


def _noise(likelihood: Likelihood, P: int, like: Tensor) -> Float[Tensor, " P"]:
    """Return the noise variance of each task."""
    own: Any = likelihood
    if isinstance(likelihood, MultitaskGaussianLikelihood) and likelihood.rank == 0:
        noise = like.new_zeros(1)
        if likelihood.has_task_noise:
            noise = noise + own.task_noises
        if likelihood.has_global_noise:
            noise = noise + own.noise
    elif isinstance(likelihood, GaussianLikelihood):
        noise = likelihood.noise.to(like)
    else:
        raise InputError(
            "`likelihood` must be Gaussian, or a MultitaskGaussianLikelihood of rank 0; got "
            f"{type(likelihood).__name__}. Use `MultiOutputGPRegressor` for other likelihoods."
        )
    if noise.numel() not in (1, P):
        raise InputError(
            f"`likelihood` must have the {P} tasks of `model`; got {noise.numel()}. Set its "
            f"`num_tasks` to {P}."
        )
    return noise.detach().reshape(-1).expand(P).clamp_min(2 * LEAST_NOISE)


def _constants(model: ApproximateGP, Q: int, like: Tensor) -> Float[Tensor, " Q"]:
    """Return the constant prior mean of each process."""
    mean: Any = getattr(model, "mean_module", None)
    if isinstance(mean, means.ZeroMean):
        return like.new_zeros(Q)
    if isinstance(mean, means.ConstantMean):
        constant: Any = mean.constant
        return constant.detach().to(like).reshape(-1).expand(Q)
    raise InputError(
        "`model` must have a ZeroMean or ConstantMean `mean_module`; got "
        f"{type(mean).__name__}. Subtract other means from the targets."
    )
