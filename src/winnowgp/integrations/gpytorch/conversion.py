"""Conversion of fitted winnowgp models to GPyTorch models, and of multitask models the other way.

GPyTorch stores the inducing points of all latent processes in one tensor `[Q M D]`, so that
`winnow` gives each the same number. `winnow_processes` converts such a model to a `MultiOutputGP`,
whose processes have as many as each needs.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, final

import torch
from gpytorch import kernels, means
from gpytorch.constraints import Positive
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from gpytorch.models import ApproximateGP
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    VariationalStrategy,
)
from jaxtyping import Float
from linear_operator import to_dense
from torch import Tensor

from winnowgp.data import Dataset, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators import SparseGPClassifier, SparseGPRegressor
from winnowgp.integrations.gpytorch.distribution import GaussianQ
from winnowgp.models import MixturePosterior, MultiOutputGP, MultiOutputPosterior, Posterior
from winnowgp.models.observations import LEAST_NOISE, Prediction
from winnowgp.selection import elimination_frontier
from winnowgp.training import FitResult, Tolerance


@final
class ConvertedGP(ApproximateGP):
    """q(f) of a fitted model as an `ApproximateGP`: `model(x)` is in the units of the data.

    Kernel, mean and inducing points are those of standardised inputs if the estimator standardises;
    calls scale inputs and outputs. The model has parameters like any ApproximateGP, can be trained
    further, and can be passed to `winnow`.
    """

    mean_module: Any
    covar_module: Any
    x_shift: Tensor
    x_scale: Tensor
    y_shift: Tensor
    y_scale: Tensor

    def __init__(
        self, posterior: Posterior, x_scaler: Standardiser, y_scaler: Standardiser
    ) -> None:
        P, Z = posterior.P, posterior.Z
        q = CholeskyVariationalDistribution(
            posterior.M, batch_shape=torch.Size([P] if P > 1 else [])
        ).to(Z)
        super().__init__(VariationalStrategy(self, Z, q, jitter_val=_jitter(posterior)))
        self.mean_module = deepcopy(posterior.mean).requires_grad_()
        self.covar_module = deepcopy(posterior.kernel).requires_grad_()
        GaussianQ(posterior.q_mean.mT, posterior.q_factor.expand(P, -1, -1)).write_to(q)
        self.variational_strategy.variational_params_initialized.fill_(1)
        for name, scaler in (("x", x_scaler), ("y", y_scaler)):
            self.register_buffer(f"{name}_shift", scaler.shift.to(Z))
            self.register_buffer(f"{name}_scale", scaler.scale.to(Z))

    def forward(self, x: Float[Tensor, "*batch N D"]) -> MultivariateNormal:
        """Return the prior at standardised inputs, in standardised units."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def __call__(
        self, inputs: Float[Tensor, "*batch N D"] | None, prior: bool = False, **arguments: Any
    ) -> MultivariateNormal:
        """Return q(f) at some rows; several targets are tasks."""
        if inputs is None:
            raise InputError("`inputs` must be rows [N D]; got None.")
        f = super().__call__((inputs - self.x_shift) / self.x_scale, prior=prior, **arguments)
        if len(self.y_scale) == 1:
            scale = self.y_scale[0]
            covariance = f.lazy_covariance_matrix * scale.square()
            return MultivariateNormal(self.y_shift[0] + scale * f.mean, covariance)
        shift, scale = self.y_shift[:, None], self.y_scale[:, None]
        # Dense: a lazy sum with a constant diagonal cannot be scaled by a batch.
        covariance = f.covariance_matrix * scale[..., None].square()
        batch = MultivariateNormal(shift + scale * f.mean, covariance)
        return MultitaskMultivariateNormal.from_batch_mvn(batch, task_dim=-1)


def to_gpytorch(
    fitted: Posterior | FitResult[Any] | SparseGPRegressor | SparseGPClassifier,
) -> tuple[ConvertedGP, Likelihood]:
    """Return a GPyTorch model and likelihood, in eval mode, with the same predictions.

    `model(x)` is the function and `likelihood(model(x))` an observation, in the units of the data
    that an estimator was fitted to, or in those of a `Posterior`.

    Args:
        fitted: a fitted `SparseGPRegressor` or `SparseGPClassifier` (whose classes are numbers 0,
            1, ... in the order of `classes_`), the result of `winnowgp.fit`, or its posterior.

    >>> from gpytorch.kernels import RBFKernel
    >>> from winnowgp import Dataset, SparseGP
    >>> x = torch.linspace(0, 6, 40, dtype=torch.float64)[:, None]
    >>> data = Dataset.of(x, torch.sin(x[:, 0]))
    >>> posterior = SparseGP(RBFKernel(), x[::5], noise=0.01).posterior(data)
    >>> model, likelihood = to_gpytorch(posterior)
    >>> bool((model(x).mean - posterior.predict(x).mean[:, 0]).abs().max() < 1e-6)
    True
    """
    if isinstance(fitted, FitResult):
        fitted = fitted.posterior
    if isinstance(fitted, Posterior):
        return _converted(fitted, Standardiser.none(fitted.Z), Standardiser.none(fitted.q_mean))
    if isinstance(fitted, MixturePosterior):
        raise InputError(
            "`fitted` must be Gaussian; got a posterior that averages over hyper-parameters. Pass "
            "its `mode`, or the regressor."
        )
    if isinstance(fitted, SparseGPRegressor):
        fitted._refuse_logarithm("GPyTorch's Gaussian predictions")
        posterior = fitted._gaussian_posterior("GPyTorch's Gaussian predictions")
        return _converted(posterior, fitted._x_scaler, fitted._y_scaler.columns)
    if isinstance(fitted, SparseGPClassifier):
        posterior = fitted.posterior_
        return _converted(posterior, fitted._x_scaler, Standardiser.none(posterior.q_mean))
    raise InputError(
        "`fitted` must be a Posterior, a FitResult, or a fitted SparseGPRegressor or "
        f"SparseGPClassifier; got {type(fitted).__name__}. Deep and latent-variable models have no "
        "equivalent in GPyTorch; save and load them with winnowgp."
    )


def _converted(
    posterior: Posterior, x_scaler: Standardiser, y_scaler: Standardiser
) -> tuple[ConvertedGP, Likelihood]:
    model = ConvertedGP(posterior, x_scaler, y_scaler)
    return model.eval(), _likelihood(posterior, y_scaler.scale).to(posterior.Z).eval()


def _likelihood(posterior: Posterior, scale: Float[Tensor, " P"]) -> Likelihood:
    """Return the likelihood of targets in their own units."""
    own = posterior.likelihood
    if isinstance(own, GaussianLikelihood):
        noise = own.noise.detach() * scale.square()
        if posterior.P == 1:
            single = GaussianLikelihood(noise_constraint=Positive()).to(noise)
            single.noise = noise
            return single
        several = MultitaskGaussianLikelihood(
            posterior.P, has_global_noise=False, noise_constraint=Positive()
        ).to(noise)
        several.task_noises = noise
        return several
    copy: Any = deepcopy(own).requires_grad_()
    if bool((scale == 1).all()):
        return copy
    if posterior.P > 1:
        raise InputError(
            f"`fitted` has {posterior.P} targets of different units and a {type(own).__name__}, "
            "which has one noise for all; pass `fitted.posterior_`, which is in standardised units."
        )
    # Student-t and Laplace: noise is a squared scale.
    copy.noise = copy.noise.detach() * scale.square()
    return copy


def _jitter(posterior: Posterior) -> float:
    """Return the jitter that was added to the diagonal of K_uu before it was factorised."""
    prior = to_dense(posterior.kernel(posterior.Z, diag=True))
    return (posterior.L.square().sum(1) - prior).mean().clamp_min(0).item()


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
    gp, offset = _converted_prior(model, likelihood)
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
def _converted_prior(
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
