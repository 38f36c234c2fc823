"""The base class of regressors with several processes: training, predictions, further rows."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood
from gpytorch.likelihoods.noise_models import HomoskedasticNoise
from sklearn.utils import Tags
from torch import Tensor

from winnowgp import training
from winnowgp.data import Dataset, Source, Standardiser
from winnowgp.data.distributed import ProcessGroup
from winnowgp.errors import InputError, NoInducingPointsWarning
from winnowgp.estimators import validation
from winnowgp.estimators.base import check_kernel_columns, goal_within, most_points
from winnowgp.estimators.kernels import kernel_from, parse_kernel
from winnowgp.estimators.numeric_targets import NumericTargets
from winnowgp.estimators.rows import check_magnitude
from winnowgp.models import BoxKernel, MultiOutputGP, MultiOutputPosterior, greedy_variance
from winnowgp.models.fidelity_posterior import (
    FidelityModel,
    FidelityPosterior,
    NonlinearFidelityPosterior,
)
from winnowgp.models.likelihoods import copy_likelihood, is_plain
from winnowgp.models.multi_output_posterior import ProcessMixture
from winnowgp.models.priors import WEAK_NOISE, add_weak_priors
from winnowgp.models.process_stream import ProcessStream
from winnowgp.models.target_likelihoods import TargetLikelihoods
from winnowgp.selection import Frontier, SizeFrontier, elimination_frontier

Function: TypeAlias = MultiOutputPosterior | ProcessMixture

# Fresh candidates of a process: at least so many, and as many as it has points.
_FRESH = 32
# Rows of a batch at most; more are several batches.
_ROWS = 4096
# Initial share of noise in the variance of a target.
_INITIAL_NOISE = 0.1
# Likelihoods that a target may have by name.
_KINDS = validation.LIKELIHOODS | {"bernoulli": BernoulliLikelihood}


def _likelihoods(name: str, value: Any) -> Likelihood | list[Likelihood]:
    """Validate a likelihood of all targets, or a list with one for each."""
    if isinstance(value, list | tuple):
        return [_likelihood(name, each) for each in value]
    return _likelihood(name, value)


def _likelihood(_: str, value: Any) -> Likelihood:
    return copy_likelihood(validation.likelihood_from(value, _KINDS))


def _is_learnt_noise(likelihood: Likelihood) -> bool:
    """Return whether a likelihood is Gaussian noise of a variance that is learnt without limits."""
    if not is_plain(likelihood, GaussianLikelihood):
        return False
    noise = likelihood.noise_covar
    if not isinstance(noise, HomoskedasticNoise) or list(noise.named_priors()):
        return False
    limit: Any = noise.raw_noise_constraint
    raw: Any = noise.raw_noise
    # GPyTorch's own limit is 1e-4.
    return raw.requires_grad and type(limit) is GreaterThan and float(limit.lower_bound) <= 1e-4


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
            processes together; larger values select fewer. "auto" derives it from `tolerance`.
        tolerance: largest ELBO gap to the largest model, in nats per observed target; 0.01 by
            default, unless another parameter sets the number of inducing points.
        max_points: largest number of inducing points of all processes together; they are allocated
            where they gain most. With a `tolerance` fewer are selected if they are within it.
        n_candidates: largest number of candidates of all processes together; 1,536 by default.
        widths: columns of `X` that are widths of boxes, by number or name, one for each other
            column and in their order. Targets are then averages over boxes around the other
            columns; a width of zero is a point, also in predictions. None by default. The cost
            is multiplied by 25 for each width; see `winnowgp.models.BoxKernel`.
        priors: "weak" adds priors of short lengthscales, kernel variances and noise, as in
            `SparseGPRegressor`; None adds none.
        likelihood: "gaussian", "student-t", "laplace", "poisson", "negative-binomial", "beta",
            "bernoulli" (classes 0 and 1, probit) or a GPyTorch likelihood with one latent function:
            that of all targets; or a list with one for each target, such as
            ["gaussian", "poisson", "bernoulli"]. Other likelihoods than "gaussian" take several
            times as long.
        noise: "target", the only value: every target has a noise variance, which is learnt.
        schedule: "fast", the only value.
        batch_size: None, the only value: all rows are used at once.

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
        evidence_: log evidence at the fitted hyper-parameters, exact or between two bounds; None
            after `partial_fit`.
    """

    # Whether there may be several targets.
    _several_targets: ClassVar[bool] = False
    # Mode and width of the prior of the noise.
    _noise_prior: ClassVar[tuple[float, float]] = WEAK_NOISE

    likelihood: Any = "gaussian"
    max_points: int | None = None
    widths: Sequence[int | str] | None = None
    priors: str | None = "weak"

    _constraints: ClassVar[Mapping[str, validation.Constraint]] = {
        **validation.PARAMETERS,
        "widths": validation.optional(validation.columns_or_names),
        "likelihood": _likelihoods,
        "noise": _only("target"),
        "schedule": _only("fast"),
        "batch_size": _only(None),
    }

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = self._several_targets
        return tags

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

    def condition_on(self, X: Any, y: Any, *, noise_variance: Any = None) -> Self:
        """Return a copy that has observed more rows.

        Hyper-parameters and inducing points stay as they are, and predictions are those of all rows
        together. Attributes such as `elbo_` are those of the fit. O(M²) per row.

        Args:
            X: inputs `[N D]`.
            y: targets `[N]` or `[N P]`; some of several may be missing.
            noise_variance: known noise variances, as in `fit`.
        """
        inputs = self._inputs(X)
        targets = self._y_scaler.standardise(y, self.likelihood_, inputs=inputs)
        known = self._known_noise(noise_variance, len(inputs), targets=targets)
        conditioned = copy(self)
        rows = Dataset(inputs, targets, None, known)
        conditioned.posterior_ = self.posterior_.condition_on(rows)
        return conditioned

    def partial_fit(self, X: Any, y: Any, *, noise_variance: Any = None) -> Self:
        """Learn from more rows; the first call is a `fit`.

        Earlier rows are not needed. Inducing points of each process are added where the rows need
        them, and dropped where they are no longer needed: both are priced in nats by the streaming
        bound (Bui et al. 2017), and `tolerance` is per target of the new rows. Hyper-parameters,
        mixing, noise and scaling stay those of the first call, and so do `candidates_` and
        `inclusion_`. `elbo_` and `elbo_gap_` are those of the streaming bound of the rows of this
        call, given what the posterior holds of earlier rows; `frontier_` is that of the last 4,096
        of them at most, and `evidence_` is None. O(M² N + M³) for N rows and the
        M inducing points of all processes; O(M² N P) for P targets of other likelihoods than
        Gaussian noise.

        Args:
            X: inputs `[N D]`.
            y: targets `[N]` or `[N P]`; some of several may be missing.
            noise_variance: known noise variances, as in `fit`.
        """
        if not hasattr(self, "posterior_"):
            return self.fit(X, y, noise_variance=noise_variance)
        params = self._validate()
        if params.alpha is not None:
            raise InputError(
                f"`partial_fit` needs `alpha='auto'`; got {self.alpha!r}. Set `tolerance` or "
                "`max_points` instead."
            )
        inputs = self._inputs(X)
        targets = self._y_scaler.standardise(y, self.likelihood_, inputs=inputs)
        known = self._known_noise(noise_variance, len(inputs), targets=targets)
        check_magnitude("X", inputs)
        check_magnitude("y", targets)
        keep = ~torch.isnan(targets).all(1)
        rows = Dataset(inputs, targets, None, known).part(keep.nonzero().flatten())
        goal = training.Tolerance(
            params.tolerance or validation.TOLERANCE, limit=most_points(params)
        )
        posterior = self.posterior_

        searches: dict[Function, tuple[Frontier, int]] = {}

        def update(function: Function, batch: Dataset) -> Function:
            updated, frontier, size = _updated(function, batch, goal)
            searches[function] = frontier, size
            return updated

        batches: list[list[tuple[Frontier, int] | None]] = []
        for batch in rows.chunks(_ROWS):
            searches.clear()
            functions = _functions(posterior)
            if isinstance(posterior, FidelityModel):
                posterior = posterior.updated(batch, update)
            else:
                posterior = update(posterior, batch)
            batches.append([searches.get(each) for each in functions])
        self.posterior_ = posterior
        self._set_searches(batches)
        self._set_processes()
        return self

    def _set_searches(self, batches: Sequence[Sequence[tuple[Frontier, int] | None]]) -> None:
        """Set what the searches of all batches have found; None for functions without rows."""
        found = [search for batch in batches for search in batch if search is not None]
        # Streaming bounds of one batch after another add up.
        self.elbo_ = sum(frontier.bounds[size].item() for frontier, size in found)
        best = sum(frontier.bounds.max().item() for frontier, _ in found)
        self.elbo_gap_ = (best - self.elbo_) / sum(frontier.N for frontier, _ in found)
        self.evidence_ = None
        searches = batches[-1]
        frontiers: Any = self.frontier_
        if isinstance(frontiers, tuple):
            # One for each fidelity of a nonlinear relation.
            frontiers = tuple(
                before if search is None else SizeFrontier.of(search[0], N=search[0].N)
                for before, search in zip(frontiers, searches, strict=True)
            )
        else:
            frontiers = SizeFrontier.of(found[-1][0], N=found[-1][0].N)
        self.frontier_ = frontiers

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
        kernels = [kernel_from(params.kernel, D, scale=params.kernel_scale) for _ in range(Q)]
        for number, kernel in enumerate(kernels if params.priors == "weak" else ()):
            add_weak_priors(kernel, irrelevant=self._may_be_irrelevant(params, number))
        return kernels

    def _may_be_irrelevant(self, params: validation.Parameters, process: int) -> bool:
        """Return whether the prior of a process lets columns be irrelevant at no cost."""
        return True

    def _check_combination(self, params: validation.Parameters) -> None:
        """Accept all combinations of parameters."""

    def _check_columns(self, params: validation.Parameters, D: int) -> None:
        names = [str(name) for name in getattr(self, "feature_names_in_", ())]
        self._check_inputs(params, names, D)

    def _check_inputs(self, params: validation.Parameters, names: Sequence[str], D: int) -> None:
        """Check kernel and widths for the D columns of the processes."""
        params.boxes = [
            validation.column_number("widths", each, names, D) for each in params.widths or ()
        ]
        if len(set(params.boxes)) != len(params.boxes) or 2 * len(params.boxes) not in (0, D):
            raise InputError(
                f"`widths` must be half of the {D} columns, one for each other column; got "
                f"{self.widths!r}."
            )
        centres = [d for d in range(D) if d not in params.boxes]
        if isinstance(params.kernel, str):
            columns = {str(names[d]): [i] for i, d in enumerate(centres)} if names else {}
            params.kernel = parse_kernel(params.kernel, len(centres), columns=columns)
        kernel = kernel_from(params.kernel, len(centres), scale=torch.ones(len(centres)))
        check_kernel_columns(kernel, len(centres))

    def _input_scaler(self, rows: Dataset, params: validation.Parameters) -> Standardiser:
        """Return the scaler of the inputs; a width has the scale of its column, and no shift."""
        scaler = super()._input_scaler(rows, params)
        centres = [d for d in range(rows.D) if d not in params.boxes]
        if params.boxes:
            if bool((rows.X[:, params.boxes] < 0).any()):
                raise InputError("`X` must not have negative widths; take their absolute values.")
            scaler.shift[params.boxes], scaler.scale[params.boxes] = 0.0, scaler.scale[centres]
        params.kernel_scale = scaler.scale[centres]
        return scaler

    def _check_targets(self, params: validation.Parameters, data: Source) -> None:
        if data.P > 1 and not self._several_targets:
            raise InputError(
                f"{type(self).__name__} needs one target; got {data.P}. Fit a model for each."
            )
        parts = params.likelihood
        if isinstance(parts, list) and len(parts) != data.P:
            raise InputError(
                f"`likelihood` must have an entry for each of {data.P} targets; got {len(parts)}."
            )
        parts = parts if isinstance(parts, list) else [parts] * data.P
        if all(map(_is_learnt_noise, parts)):
            # Gaussian noise of all targets needs no sites.
            params.likelihood = validation.likelihood_from("gaussian")
        else:
            params.likelihood = copy_likelihood(TargetLikelihoods(parts))
        super()._check_targets(params, data)

    def _check_noise(self, params: validation.Parameters, data: Source, *, missing: bool) -> None:
        """Accept missing targets, and known noise if all noise is Gaussian."""
        if data.has_noise and isinstance(params.likelihood, TargetLikelihoods):
            raise InputError(
                "`noise_variance` needs `likelihood='gaussian'`; got "
                f"{self.likelihood!r}. Leave the noise out."
            )

    def _initial_model(self, data: Dataset, params: validation.Parameters) -> MultiOutputGP:
        mixing, learnt = self._mixing(params, data.P)
        Q = mixing.shape[1]
        likelihood = params.likelihood
        parts = likelihood.parts if isinstance(likelihood, TargetLikelihoods) else None
        kernels = self._kernels(params, data.D - len(params.boxes), Q)
        if params.boxes:
            kernels = [BoxKernel(kernel, widths=params.boxes) for kernel in kernels]
        model = MultiOutputGP(
            kernels,
            [torch.zeros(0, data.D, dtype=data.dtype)] * Q,
            mixing=mixing.to(data.dtype),
            learnt=learnt,
            noise=None if parts else torch.full((data.P,), _INITIAL_NOISE, dtype=data.dtype),
            likelihoods=parts,
        )
        if params.priors == "weak":
            add_weak_priors(model.likelihood, noise=self._noise_prior)
        return model.to(params.device)

    def _training_schedule(
        self, model: MultiOutputGP, data: Source, params: validation.Parameters
    ) -> training.Schedule:
        goal = goal_within(params, most_points(params))
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

    def _warn_of_limits(self) -> None:
        if (constant := self._constant_targets) and ProcessGroup.from_environment().is_first:
            which = "the target"
            if self.posterior_.P > 1:
                numbers = ", ".join(map(str, constant))
                several = "target" if len(constant) == 1 else "targets"
                which = f"{several} {numbers} (counted from 0)"
            has, it = ("has", "it") if len(constant) == 1 else ("have", "them")
            warnings.warn(
                NoInducingPointsWarning(
                    f"{which} {has} the same value in all training rows: the model predicts {it} "
                    f"for every row. Check {it}, or add rows with other values."
                ),
                stacklevel=3,
            )

    def _set_processes(self) -> None:
        """Set the attributes that follow from the posterior."""
        self.kernels_ = self._processes.kernels
        self.n_inducing_ = self._processes.sizes
        self.inducing_points_ = self._locations(self._processes.inducing_points)

    @property
    def _processes(self) -> MultiOutputPosterior:
        """The posterior of all processes."""
        return self.posterior_

    def _locations(self, points: tuple[Tensor, ...]) -> tuple[np.ndarray[Any, Any], ...]:
        return tuple(self._x_scaler.inverse(each.cpu().double()).numpy() for each in points)

    @property
    def mixing_(self) -> np.ndarray[Any, Any]:
        """Mixing matrix `[P Q]`, in the units of the targets."""
        return (self._y_scaler.columns.scale[:, None] * self._processes.mixing).numpy()


def _functions(posterior: Function | FidelityModel) -> list[Function]:
    """Return the functions that rows update, each with a search of its own."""
    if isinstance(posterior, NonlinearFidelityPosterior):
        return list(posterior.functions)
    if isinstance(posterior, FidelityPosterior):
        return [posterior.function]
    assert not isinstance(posterior, FidelityModel)
    return [posterior]


@torch.no_grad()
def _updated(
    function: Function, rows: Dataset, goal: training.Tolerance
) -> tuple[Function, Frontier, int]:
    """Return a posterior after more rows, the frontier of the search, and the number it selects.

    A mixture has the inducing points that suit its mode.
    """
    mode = function.mode if isinstance(function, ProcessMixture) else function
    fresh = _fresh(mode, rows)
    stream = ProcessStream.of(mode, rows, fresh)
    frontier = elimination_frontier(stream.statistics())
    size = goal.size(frontier, reference=frontier.bounds.max().item())
    mask = frontier.masks[size]
    if not isinstance(function, ProcessMixture):
        return stream.selected(mask), frontier, size
    members = [ProcessStream.of(member, rows, fresh) for member in function.members]
    # All candidates explain the rows to members with any lengthscale.
    nats = torch.stack([member.posterior.log_predictive(rows) for member in members])
    mixture = ProcessMixture(
        stream.selected(mask),
        [member.selected(mask) for member in members],
        member_weights=(function.member_weights.log() + nats).softmax(0),
    )
    return mixture, frontier, size


def _fresh(posterior: MultiOutputPosterior, rows: Dataset) -> list[Tensor]:
    """Return candidates of each process among the rows that observe it."""
    observed = (~torch.isnan(rows.Y)).to(rows.Y)
    seen = (observed @ (posterior.mixing != 0).to(rows.Y)) > 0
    fresh = []
    for q, (kernel, Z) in enumerate(zip(posterior.kernels, posterior.inducing_points, strict=True)):
        own = rows.X[seen[:, q]]
        fresh.append(own[greedy_variance(kernel, own, max(_FRESH, len(Z)), given=Z)])
    return fresh
