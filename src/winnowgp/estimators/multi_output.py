"""Regression with several processes, each with inducing points of its own.

Every estimator here is a `winnowgp.models.MultiOutputGP`, and has another mixing matrix: that of
several targets is learnt.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from winnowgp import training
from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.base import check_kernel_columns
from winnowgp.estimators.docstrings import documented
from winnowgp.estimators.kernels import kernel_from
from winnowgp.estimators.numeric_targets import NumericTargets
from winnowgp.models import MultiOutputGP
from winnowgp.models.priors import add_weak_priors
from winnowgp.training.checkpoint import CheckpointLog

# Processes of many targets, if their number is not given.
_PROCESSES = 6
# Initial share of noise in the variance of a target.
_INITIAL_NOISE = 0.1


def _gaussian(name: str, value: Any) -> Likelihood:
    if value != "gaussian":
        raise InputError(
            f"`{name}` must be 'gaussian' where several processes are fitted; got {value!r}. Fit a "
            "`SparseGPRegressor` for each target for other likelihoods."
        )
    return validation.likelihood_from("gaussian")


def _only(choice: Any) -> validation.Constraint:
    """Return the constraint that a parameter of other regressors keeps its default."""

    def check(name: str, value: Any) -> Any:
        if value != choice:
            raise InputError(
                f"`{name}` must be {choice!r} where several processes are fitted; got {value!r}. "
                "Leave it out."
            )
        return value

    return check


@dataclass(kw_only=True, eq=False, repr=False)
class ProcessEstimator(NumericTargets, ABC):
    """The base class of regressors that mix several processes.

    Args:
        kernel: a string such as "rbf", "matern52" or "rbf + linear", with one lengthscale per
            column (see `winnowgp.estimators.kernels`), or a GPyTorch kernel, from which every
            process starts.
        alpha: strength of the paper's prior exp(−alpha · M²) on the M inducing points of all
            processes together; larger values keep fewer. "auto" derives it from `tolerance`.
        tolerance: largest ELBO gap to the largest model, in nats per observed target; 0.01 by
            default, unless another parameter sets the number of inducing points.
        max_points: largest number of inducing points of all processes together; they are allocated
            where they gain most. With a `tolerance` fewer are kept if they are within it.
        n_candidates: largest number of candidates of all processes together; 1,536 by default.
        priors: "weak" adds priors of short lengthscales, kernel variances and noise, as in
            `SparseGPRegressor`; None adds none.
        likelihood: "gaussian".
        noise: "target": every target has a noise variance, which is learnt.
        schedule: "fast".
        batch_size: None; all rows are used at once.

    Attributes:
        n_inducing_: number of inducing points of each process, a tuple.
        inducing_points_: their locations, one array `[M D]` per process.
        kernels_: fitted kernel of each process, for standardised inputs.
        mixing_: mixing matrix `[P Q]`, in the units of the targets.
        inclusion_: inclusion probability of each candidate in the last selection, one array `[K]`
            per process.
        candidates_: locations of these candidates, one array `[K D]` per process.
        alpha_: strength of the prior that the selection implies.
        frontier_: best ELBO known for each number of inducing points of all processes together.
        elbo_: lower bound on the log evidence of standardised targets, in nats.
        elbo_gap_: nats per observed target by which the ELBO is below the best one seen.
        evidence_: log evidence at the fitted hyper-parameters, exact or between two bounds.
    """

    max_points: int | None = None
    priors: str | None = "weak"

    _constraints: ClassVar[Mapping[str, validation.Constraint]] = {
        **validation.PARAMETERS,
        "likelihood": _gaussian,
        "noise": _only("target"),
        "schedule": _only("fast"),
        "batch_size": _only(None),
    }

    def predict(
        self,
        X: Any,
        return_std: bool = False,
        *,
        observed: bool = True,
        noise_variance: Any = None,
    ) -> Any:
        """Return the predictive mean, and on request the standard deviation, of each row.

        Args:
            X: inputs `[N D]`.
            return_std: whether to return the standard deviation as well.
            observed: whether to predict a new observation, noise included, or the function.
            noise_variance: known noise variances of these observations, as in `fit`.

        Returns: the mean `[N]` or `[N P]`; with `return_std` a pair.
        """
        inputs = self._inputs(X)
        known = self._known_noise(noise_variance, len(inputs), observed=observed)
        prediction = self._predict_latent(
            inputs, self.posterior_.predict, observed=observed, noise=known
        )
        mean, sd = self._y_scaler.moments(prediction.mean, prediction.variance)
        return (mean, sd) if return_std else mean

    @abstractmethod
    def _mixing(self, params: validation.Parameters, P: int) -> tuple[Tensor, Tensor]:
        """Return the initial mixing matrix, and which of its entries are learnt, `[P Q]`."""

    def _kernels(self, params: validation.Parameters, D: int, Q: int) -> list[Kernel]:
        """Return the kernels that training begins with, one for each process."""
        kernels = [kernel_from(params.kernel, D) for _ in range(Q)]
        for kernel in kernels if params.priors == "weak" else ():
            add_weak_priors(kernel)
        return kernels

    def _check_combination(self, params: validation.Parameters) -> None:
        """Accept all combinations of parameters."""

    def _check_columns(self, params: validation.Parameters, D: int) -> None:
        check_kernel_columns(kernel_from(params.kernel, D), D)

    def _check_noise(self, params: validation.Parameters, data: Source, *, missing: bool) -> None:
        """Accept known noise and missing targets."""

    def _initial_model(
        self,
        data: Dataset,
        params: validation.Parameters,
        generator: torch.Generator,
        log: CheckpointLog,
    ) -> MultiOutputGP:
        mixing, learnt = self._mixing(params, data.P)
        Q = mixing.shape[1]
        model = MultiOutputGP(
            self._kernels(params, data.D, Q),
            [torch.zeros(0, data.D, dtype=data.dtype)] * Q,
            mixing=mixing.to(data.dtype),
            learnt=learnt,
            noise=torch.full((data.P,), _INITIAL_NOISE, dtype=data.dtype),
        )
        if params.priors == "weak":
            add_weak_priors(model.likelihood)
        return model.to(params.device)

    def _training_schedule(
        self,
        model: MultiOutputGP,
        data: Source,
        params: validation.Parameters,
        log: CheckpointLog,
    ) -> training.Schedule:
        limit = None if params.max_points is None else training.MaxPoints(params.max_points)
        if params.alpha is not None:
            goal = training.FixedAlpha(params.alpha)
        elif params.tolerance is not None:
            goal = training.Tolerance(params.tolerance, limit=limit)
        else:
            assert limit is not None
            goal = limit
        return training.FastSchedule(goal, n_candidates=params.n_candidates)

    def _set_fitted(self, result: training.FitResult[Any], observations: float) -> None:
        self.posterior_ = result.posterior.cpu().double()
        self.elbo_ = result.elbo
        self.elbo_gap_ = result.elbo_gap / result.frontier.N
        self.evidence_, self.frontier_ = result.evidence, result.frontier
        self.alpha_ = result.selections[0].alpha
        self.candidates_ = self._locations(result.candidates)
        self.inclusion_ = tuple(each.inclusion.cpu().numpy() for each in result.selections)
        self._set_processes()

    def _set_processes(self) -> None:
        """Set the attributes that follow from the posterior."""
        self.kernels_ = list(self.posterior_.kernels)
        self.n_inducing_ = self.posterior_.sizes
        self.inducing_points_ = self._locations(self.posterior_.inducing_points)

    def _locations(self, points: tuple[Tensor, ...]) -> tuple[np.ndarray[Any, Any], ...]:
        return tuple(self._x_scaler.inverse(each.cpu().double()).numpy() for each in points)

    @property
    def mixing_(self) -> np.ndarray[Any, Any]:
        """Mixing matrix `[P Q]`, in the units of the targets."""
        return (self._y_scaler.columns.scale[:, None] * self.posterior_.mixing).numpy()


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class MultiOutputGPRegressor(ProcessEstimator):
    """Regression of several targets as combinations of processes with inducing points of their own.

    Target p is Σ_q W_pq f_q(x) plus noise. A smooth process keeps few inducing points and a rough
    one many: one search over the candidates of all processes allocates them. Targets may be missing
    (NaN) in some rows, and are then predicted from the others too. Inputs and targets are
    standardised internally. `SparseGPRegressor` fits several targets with one kernel and one set of
    inducing points for all of them.

    Args:
        n_latents: number of processes Q; by default one per target, at most six. A process that is
            not needed keeps no inducing points.
        mixing: "lmc" learns the mixing matrix (linear model of coregionalisation; ICM of rank one
            with one process). "independent" has one process per target and the identity.

    >>> X = np.linspace(0, 6, 40)[:, None]
    >>> Y = np.column_stack([np.sin(X[:, 0]), 1 - 2 * np.sin(X[:, 0])])
    >>> model = MultiOutputGPRegressor(n_latents=1, random_state=0).fit(X, Y)
    >>> model.mixing_.shape, len(model.n_inducing_)
    ((2, 1), 1)
    """

    n_latents: int | None = None
    mixing: str = "lmc"

    _constraints: ClassVar[Mapping[str, validation.Constraint]] = {
        **ProcessEstimator._constraints,
        "n_latents": validation.optional(validation.integer),
        "mixing": validation.one_of("lmc", "independent"),
    }

    def _check_combination(self, params: validation.Parameters) -> None:
        if params.mixing == "independent" and params.n_latents is not None:
            raise InputError(
                "`n_latents` is for `mixing='lmc'`; independent targets have one process each; got "
                f"{self.n_latents!r}. Leave it out."
            )

    def _mixing(self, params: validation.Parameters, P: int) -> tuple[Tensor, Tensor]:
        if params.mixing == "independent":
            return torch.eye(P), torch.zeros(P, P, dtype=torch.bool)
        Q = params.n_latents or min(P, _PROCESSES)
        return torch.eye(P, Q), torch.ones(P, Q, dtype=torch.bool)

    def _kernels(self, params: validation.Parameters, D: int, Q: int) -> list[Kernel]:
        kernels = super()._kernels(params, D, Q)
        for kernel in kernels if params.mixing == "lmc" else ():
            if isinstance(kernel, ScaleKernel):
                # The mixing matrix has the variances.
                kernel.raw_outputscale.requires_grad_(False)
        return kernels
