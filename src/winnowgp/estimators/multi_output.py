"""Regression with several processes, each with inducing points of its own.

Every estimator here is a `winnowgp.models.MultiOutputGP`, and has another mixing matrix: that of
several targets is learnt, that of several fidelities is a triangle, and a sum of effects has ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, final

import numpy as np
import torch
from gpytorch.kernels import AdditiveKernel, Kernel, ScaleKernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from winnowgp import training
from winnowgp.data import Dataset, Source, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.base import check_kernel_columns, documented
from winnowgp.estimators.kernels import ComposedKernel, kernel_from, parse_kernel
from winnowgp.estimators.numeric_targets import NumericTargets
from winnowgp.models import FidelityPosterior, MultiOutputGP, MultiOutputPosterior
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

    def predict_processes(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of each process, `[N Q]`, and on request its standard deviation.

        Predictions of the targets are `mixing_` times the processes, plus the mean of the training
        targets.

        Args:
            X: inputs `[N D]`.
            return_std: whether to return the standard deviations as well.
        """
        mean, covariance = self._processes.processes(self._process_inputs(X))
        variance = covariance.diagonal(dim1=1, dim2=2)
        return (mean.numpy(), variance.sqrt().numpy()) if return_std else mean.numpy()

    def _process_inputs(self, X: Any) -> Tensor:
        """Validate inputs; return those of the processes, standardised."""
        return self._inputs(X)

    @abstractmethod
    def _mixing(self, params: validation.Parameters, P: int) -> tuple[Tensor, Tensor]:
        """Return the initial mixing matrix, and which of its entries are learnt, `[P Q]`."""

    def _kernels(self, params: validation.Parameters, D: int, Q: int) -> list[Kernel]:
        """Return the kernels that training begins with, one for each process."""
        kernels = [kernel_from(params.kernel, D, scale=params.x_scaler.scale) for _ in range(Q)]
        for kernel in kernels if params.priors == "weak" else ():
            add_weak_priors(kernel)
        return kernels

    def _check_combination(self, params: validation.Parameters) -> None:
        """Accept all combinations of parameters."""

    def _check_columns(self, params: validation.Parameters, D: int) -> None:
        self._parse_kernel(
            params, [str(name) for name in getattr(self, "feature_names_in_", ())], D
        )

    def _parse_kernel(self, params: validation.Parameters, names: Sequence[str], D: int) -> None:
        if isinstance(params.kernel, str):
            columns = {name: [number] for number, name in enumerate(names)}
            params.kernel = parse_kernel(params.kernel, D, columns=columns)
        check_kernel_columns(kernel_from(params.kernel, D, scale=torch.ones(D)), D)

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
        assert result.frontier is not None
        self.elbo_, self.elbo_gap_ = result.elbo, result.elbo_gap / result.frontier.N
        self.evidence_, self.frontier_ = result.evidence, result.frontier
        self.alpha_ = result.selections[0].alpha
        self.candidates_ = self._locations(result.candidates)
        self.inclusion_ = tuple(each.inclusion.cpu().numpy() for each in result.selections)
        self._set_processes()

    def _set_processes(self) -> None:
        """Set the attributes that follow from the posterior."""
        self.kernels_ = self._processes.kernels
        self.n_inducing_ = self._processes.sizes
        self.inducing_points_ = self._locations(self._processes.inducing_points)

    @property
    def _processes(self) -> MultiOutputPosterior:
        """The posterior of all processes."""
        posterior = self.posterior_
        return posterior.function if isinstance(posterior, FidelityPosterior) else posterior

    def _locations(self, points: tuple[Tensor, ...]) -> tuple[np.ndarray[Any, Any], ...]:
        return tuple(self._x_scaler.inverse(each.cpu().double()).numpy() for each in points)

    @property
    def mixing_(self) -> np.ndarray[Any, Any]:
        """Mixing matrix `[P Q]`, in the units of the targets."""
        return (self._y_scaler.columns.scale[:, None] * self._processes.mixing).numpy()


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


def _column(name: str, value: Any) -> int | str:
    """Validate a column by number or name."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"`{name}` must be a column of `X`, by number or name; got {value!r}.")
    return int(value)


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class MultiFidelityGPRegressor(ProcessEstimator):
    """Regression of observations of several fidelities, the lower of which are cheaper.

    The function of a fidelity is a multiple of the lower ones plus a discrepancy (Kennedy and
    O'Hagan 2000): f_0 = δ_0, f_1 = ρ_10 δ_0 + δ_1, f_2 = ρ_20 δ_0 + ρ_21 δ_1 + δ_2. Each δ is a
    process with a kernel and inducing points of its own, and each fidelity has its noise. A column
    of `X` says which fidelity a row was observed at; in predictions, which one is predicted.

    Args:
        fidelity: the column of `X` that is the fidelity, by number or name; the last by default.
            Its values may be any numbers, larger ones are higher fidelities.

    Attributes:
        fidelities_: values of the column of fidelities, in ascending order.
        rho_: the mixing of the discrepancies `[F F]`, a lower triangle with ones on its diagonal.

    >>> x = np.linspace(0, 1, 30)
    >>> low, high = np.column_stack([x, 0 * x]), np.column_stack([x[::6], 0 * x[::6] + 1])
    >>> y = np.concatenate([np.sin(8 * x), 2 * np.sin(8 * x[::6]) + x[::6]])
    >>> model = MultiFidelityGPRegressor(random_state=0).fit(np.concatenate([low, high]), y)
    >>> model.predict([[0.5, 1.0]]).round(1)
    array([-1.])
    """

    fidelity: int | str = -1

    _constraints: ClassVar[Mapping[str, validation.Constraint]] = {
        **ProcessEstimator._constraints,
        "fidelity": _column,
    }

    @property
    def fidelities_(self) -> np.ndarray[Any, Any]:
        """Values of the column of fidelities, in ascending order."""
        return self.posterior_.levels.numpy()

    @property
    def rho_(self) -> np.ndarray[Any, Any]:
        """The mixing of the discrepancies `[F F]`."""
        return self._processes.mixing.numpy()

    def _check_columns(self, params: validation.Parameters, D: int) -> None:
        names = [str(name) for name in getattr(self, "feature_names_in_", ())]
        column = params.fidelity
        if isinstance(column, str):
            if column not in names:
                raise InputError(
                    f"`fidelity` must be a column of `X`; got {column!r}. Pass a data frame for "
                    "columns with names, or the number of the column."
                )
            column = names.index(column)
        if not -D <= column < D or D < 2:
            raise InputError(
                f"`fidelity` must be one of at least two columns; got {self.fidelity!r} for {D}."
            )
        params.column = column % D
        self._parse_kernel(params, [n for d, n in enumerate(names) if d != params.column], D - 1)

    def _fit(self, rows: Source, params: validation.Parameters) -> None:
        """Give each fidelity a target of its own, and train a model of these."""
        data, column = rows.require_dataset("several fidelities"), params.column
        levels, level = data.X[:, column].unique(return_inverse=True)
        Y = torch.full((data.N, len(levels)), torch.nan, dtype=data.dtype)
        Y.scatter_(1, level[:, None], data.Y)
        noise = None if data.noise is None else data.noise.expand(Y.shape)
        others = [d for d in range(data.D) if d != column]
        super()._fit(Dataset(data.X[:, others], Y, data.weights, noise), params)
        self.posterior_ = FidelityPosterior(self.posterior_, column=column, levels=levels)
        shift, scale = torch.zeros(data.D).double(), torch.ones(data.D).double()
        shift[others], scale[others] = self._x_scaler.shift, self._x_scaler.scale
        self._x_scaler = Standardiser(shift, scale)

    def _mixing(self, params: validation.Parameters, P: int) -> tuple[Tensor, Tensor]:
        return torch.ones(P, P).tril(), torch.ones(P, P, dtype=torch.bool).tril(-1)

    def _process_inputs(self, X: Any) -> Tensor:
        return self._inputs(X)[:, self._others()]

    def _others(self) -> list[int]:
        """Return the columns other than that of the fidelity."""
        return [d for d in range(self.n_features_in_) if d != self.posterior_.column]

    def _locations(self, points: tuple[Tensor, ...]) -> tuple[np.ndarray[Any, Any], ...]:
        scaler = self._x_scaler
        if isinstance(self.posterior_, FidelityPosterior):
            scaler = Standardiser(scaler.shift[self._others()], scaler.scale[self._others()])
        return tuple(scaler.inverse(each.cpu().double()).numpy() for each in points)


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class AdditiveGPRegressor(ProcessEstimator):
    """Regression by a sum of effects, each with a band and inducing points of its own.

    Every term of the kernel is a process. A sum of kernels in `SparseGPRegressor` is the same prior
    with one set of inducing points, which must resolve all terms together; here an effect of one
    column has points along this column only.

    Args:
        kernel: a sum such as "rbf[0] + periodic[1]" or "rbf[size] + rbf[age] + linear" (see
            `winnowgp.estimators.kernels`), or a GPyTorch `AdditiveKernel`.

    Attributes:
        terms_: the terms of the kernel, strings if it is one.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(size=(60, 2))
    >>> y = np.sin(6 * X[:, 0]) + X[:, 1]
    >>> model = AdditiveGPRegressor(kernel="rbf[0] + rbf[1]", random_state=0).fit(X, y)
    >>> model.predict_terms(X).shape, len(model.n_inducing_)
    ((60, 2), 2)
    """

    kernel: Any = "rbf + linear"

    def predict_terms(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of each effect, `[N Q]`, and on request its standard deviation.

        The mean of `predict` is their sum plus the mean of the training targets. A constant may be
        part of any effect, so that the band of an effect includes the uncertainty of its level.

        Args:
            X: inputs `[N D]`.
            return_std: whether to return the standard deviations as well.
        """
        mean, sd = self.predict_processes(X, return_std=True)
        scale = self._y_scaler.columns.scale.numpy()
        return (scale * mean, scale * sd) if return_std else scale * mean

    @property
    def terms_(self) -> list[Any]:
        """The terms of the kernel."""
        if isinstance(self.kernel, str):
            names = [str(name) for name in getattr(self, "feature_names_in_", ())]
            columns = {name: [number] for number, name in enumerate(names)}
            parsed = parse_kernel(self.kernel, self.n_features_in_, columns=columns)
            assert isinstance(parsed, ComposedKernel)
            return [term.text(columns) for term in parsed.operands]
        return list(self.kernels_)

    def _check_columns(self, params: validation.Parameters, D: int) -> None:
        super()._check_columns(params, D)
        expression = params.kernel
        is_sum = isinstance(expression, ComposedKernel) and expression.is_sum
        if not is_sum and not isinstance(expression, AdditiveKernel):
            raise InputError(
                "`kernel` must be a sum, each term of which is an effect, such as "
                f"'rbf[0] + rbf[1]'; got {self.kernel!r}. Use `SparseGPRegressor` for one term."
            )

    def _check_targets(self, params: validation.Parameters, data: Source) -> None:
        super()._check_targets(params, data)
        if data.P > 1:
            raise InputError(
                f"a sum of effects needs one target; got {data.P}. Fit a model for each target."
            )

    def _mixing(self, params: validation.Parameters, P: int) -> tuple[Tensor, Tensor]:
        whole = params.kernel
        Q = len(whole.operands if isinstance(whole, ComposedKernel) else whole.kernels)
        return torch.ones(1, Q), torch.zeros(1, Q, dtype=torch.bool)

    def _kernels(self, params: validation.Parameters, D: int, Q: int) -> list[Kernel]:
        (whole,) = super()._kernels(params, D, 1)
        assert isinstance(whole, AdditiveKernel)
        return [kernel for kernel in whole.kernels if isinstance(kernel, Kernel)]
