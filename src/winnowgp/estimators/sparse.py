"""The base class of estimators with one set of inducing points: candidates, schedule, results."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, nan
from typing import Any, ClassVar, Self

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.means import Mean, ZeroMean
from gpytorch.priors import Prior
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from winnowgp import training
from winnowgp.bounds.evidence import Evidence
from winnowgp.data import Source
from winnowgp.data.distributed import ProcessGroup
from winnowgp.errors import InputError
from winnowgp.estimators.base import BaseGP, check_kernel_columns
from winnowgp.estimators.kernels import (
    AUTO,
    AUTO_KERNELS,
    KernelExpression,
    kernel_from,
    kernel_name,
    parse_kernel,
)
from winnowgp.estimators.rows import tensor
from winnowgp.estimators.selection import (
    candidate_locations,
    check_subset_posterior,
    growth_alarms,
    selection_alarms,
    selection_goal,
)
from winnowgp.estimators.validation import (
    PARAMETERS,
    Constraint,
    Parameters,
    check_mean_columns,
    locations,
    mean_from,
    mean_or_name,
    one_of,
    optional,
    refuse_count_of_given,
    refuse_other_schedule,
    step_counts,
)
from winnowgp.linalg import on_cpu
from winnowgp.models import MixturePosterior, Posterior
from winnowgp.models.base import InducingModel
from winnowgp.models.heteroscedastic import HeteroscedasticGP, HeteroscedasticPosterior
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.priors import add_weak_priors
from winnowgp.point_processes import Bernoulli, SquaredCardinality
from winnowgp.selection import SizeFrontier, SubsetPosterior
from winnowgp.selection.subset_samples import KINDS
from winnowgp.training.schedules import SizedModel
from winnowgp.training.subset_posterior import with_subset_posterior

PAPER_CANDIDATES = 100
"""Number of candidates of the paper's schedule, if the user does not give one."""

PAPER_STEPS = (200, 600, 200)
"""Numbers of steps of the paper's three phases, if the user does not give them."""

_CANDIDATES = partial(locations, options=("auto", "greedy", "kmeans", "random"))
_INDUCING_POINTS = partial(locations, options=())
_PHASES = ("all candidates", "learning inclusion", "selected points")


@dataclass(kw_only=True, eq=False, repr=False)
class SparseEstimator(BaseGP, ABC):
    """The base class of estimators with one set of inducing points.

    Args:
        kernel: "auto" compares RBF, Matérn-5/2 and Matérn-3/2 by their evidence, with a linear term
            where that pays and does not predict rows that are left out clearly worse (the paper's
            schedule uses RBF). Or a string such as "rbf", "matern52",
            "rbf + periodic" or "rbf[0, 1] * linear", with one lengthscale per column (see
            `winnowgp.estimators.kernels`), or a GPyTorch kernel for standardised inputs.
        mean: prior mean of the function of standardised inputs, which is learnt with the kernel:
            "zero", "constant", "linear", or a GPyTorch mean. "auto" is "zero" for Gaussian noise,
            whose targets are standardised, and "constant" for other likelihoods. Several latent
            functions (targets, or more than two classes) have one mean: pass "auto" or "zero".
        alpha: strength of the paper's prior exp(−alpha · M²) on M inducing points; larger values
            select fewer. "auto" derives it from `tolerance`.
        tolerance: largest gap to the largest model or the exact GP, in nats per observation; at
            most 2 % of what that model gains over a constant prediction, a share that grows with a
            larger tolerance. 0.01 by default, unless another parameter sets the number of points.
        criterion: what `tolerance` limits: "elbo", the gap of the ELBO; or "predictive", that of
            the held-out log density.
        max_points: largest number of inducing points. With a `tolerance` fewer are selected if
            they are within it; without, only if more candidates add no information.
        max_predict_us: largest time for mean and variance of a row, in microseconds, measured on
            this machine in batches of 1,000 rows.
        max_fit_seconds: time in seconds that the fast schedule is to take: first searches have two
            fifths of it, and quantities that are only reported are left out after it. A step that
            has begun ends, so that a fit may take somewhat longer. By default a number of
            operations limits it, so that a seed determines the result.
        candidates: "greedy" (the rows of largest conditional variance), "kmeans" (cluster centres),
            "random" (random rows), or locations `[K D]`. "auto" is "greedy" for the fast schedule
            and "random" for the paper's.
        n_candidates: largest number of candidates, hence of inducing points. By default it grows
            until more candidates gain less than the tolerance; it is 512 for "kmeans" and "random",
            and 100 for the paper's schedule.
        inducing_points: locations `[M D]` that are used as they are: none is removed, added or
            moved, and only the other parameters are learnt. By default they are selected.
        warm_start: whether to begin from the earlier fit of this estimator, if there is one: its
            kernel, hyper-parameters and inducing points replace the search for a start, unless a
            single fresh start is better. Meant for rows that changed little, such as a few more of
            them; `winnowgp.load` returns an estimator that can be fitted again in this way.
        posterior: what `inclusion_` and `subset_posterior_` are, at the fitted hyper-parameters.
            "mean-field": independent inclusion, as in the paper. "determinantal": similar
            candidates exclude each other. "gibbs": samples of the optimal posterior; if noise is
            Gaussian, predictions average over 16 of them, and take as much longer. Both are for
            fits that end with at most 1,000 candidates, and do not change the selected points.
            Other likelihoods than Gaussian have that of their Gaussian approximation (sites).
        schedule: "fast", or "paper" for the three phases of the paper (needs a number for `alpha`).
        epochs: numbers of steps of the paper's three phases: all candidates, learning inclusion,
            selected points; (200, 600, 200) by default.
        batch_size: rows per step of the paper's schedule; all rows by default.

    Attributes:
        n_inducing_: number of inducing points M.
        inducing_points_: their locations `[M D]`.
        inclusion_: inclusion probability of each candidate in the last selection, `[K]`: marginals
            of `subset_posterior_`.
        subset_posterior_: a `winnowgp.selection.SubsetPosterior`, with probabilities of pairs of
            candidates (`pairwise_inclusion`), of sizes (`credible_size`), and R-hat if sampled.
        candidates_: locations of these candidates `[K D]`; with the fast schedule the inducing
            points come first, then candidates that were not needed.
        alpha_: strength of the prior that selects this number of inducing points.
        elbo_: lower bound on the log evidence, in nats; that of standardised targets in regression.
        evidence_: an `Evidence`, the log evidence at the fitted hyper-parameters in nats: exact, or
            between two bounds. None unless noise is Gaussian: no upper bound is known otherwise.
        kl_bounds_: lower and upper bound on KL[q ‖ exact posterior] in nats, the evidence minus
            `elbo_`; equal where the evidence is exact, (0, ∞) where there is none.
        elbo_gap_: nats per observation by which the ELBO is below that of the largest model, or the
            exact evidence where that was maximised. With `max_points` at least twice as many points
            are tried, and at least 256 at the hyper-parameters of the search.
        predictive_gap_: nats per observation by which the held-out log density is below that
            of the largest model; NaN if it was not computed.
        predictive_gap_se_: its standard error.
        frontier_: a `SizeFrontier`, the best model known for each number of inducing points, and
            the exact GP where it is affordable; None with the paper's schedule.
        available_sizes_: numbers of inducing points that `resized` accepts.
        growth_limit_: the limit that ended the growth of the candidates: "work", "memory",
            "max_fit_seconds", "n_candidates", "max_points" or "precision" (rounding errors exceed
            what more of them add). Or why none are selected: "chance" (they gain no more than by
            chance) or "held_out" (they predict held-out rows no better than a constant). None if
            more of them gain less than the tolerance.
        last_doubling_gain_: nats per observation that the last doubling of the candidates gained.
        kernel_name_: name of the fitted kernel, such as "matern32" or "rbf + linear".
        kernel_evidence_: evidence of each kernel that "auto" compared, in nats per observation
            relative to the best; otherwise empty. A given number of points may suit another kernel.
        kernel_: the fitted kernel, for standardised inputs and targets.
    """

    kernel: str | Kernel | KernelExpression = field(default=AUTO, kw_only=False)
    mean: str | Mean = "auto"
    alpha: str | float = "auto"
    criterion: str = "elbo"
    max_points: int | None = None
    max_predict_us: float | None = None
    max_fit_seconds: float | None = None
    candidates: str | ArrayLike = "auto"
    inducing_points: ArrayLike | None = None
    warm_start: bool = False
    posterior: str = "mean-field"
    epochs: tuple[int, int, int] | None = None

    _constraints: ClassVar[Mapping[str, Constraint]] = {
        **PARAMETERS,
        "candidates": partial(_CANDIDATES, shape=("K", "D")),
        "epochs": optional(partial(step_counts, phases=_PHASES)),
        "inducing_points": optional(partial(_INDUCING_POINTS, shape=("M", "D"))),
        "mean": mean_or_name,
        "posterior": one_of(*KINDS),
    }
    # Set by a fit; not arguments.
    frontier_: SizeFrontier | None = field(init=False)
    _sized: tuple[SizedModel, ...] = field(init=False)
    _subset_posterior: SubsetPosterior | None = field(init=False)

    @property
    def kl_bounds_(self) -> tuple[float, float]:
        """Bounds on KL[q ‖ exact posterior] in nats; equal where the evidence is exact.

        It is the log evidence at the fitted hyper-parameters minus the ELBO.
        """
        if self.evidence_ is None:
            return 0.0, inf
        lower, upper = self.evidence_.lower - self.elbo_, self.evidence_.upper - self.elbo_
        return max(lower, 0.0), max(upper, 0.0)

    @property
    def subset_posterior_(self) -> SubsetPosterior:
        """The posterior over subsets of `candidates_`, of the kind that `posterior` names."""
        check_is_fitted(self)
        if self._subset_posterior is not None:
            return self._subset_posterior
        return SubsetPosterior(Bernoulli.from_inclusion(tensor(self.inclusion_)))

    @property
    def available_sizes_(self) -> tuple[int, ...]:
        """Numbers of inducing points that `resized` accepts, in ascending order."""
        return (*(sized.posterior.M for sized in self._sized), self.n_inducing_)

    def resized(self, points: int) -> Self:
        """Return a copy of the fitted estimator with fewer inducing points.

        The fit has optimised hyper-parameters and locations for this number already; no training
        data are needed. Attributes of the model are those of the smaller one, and `elbo_gap_` and
        `predictive_gap_` refer to the same larger model as before. The evidence at its
        hyper-parameters and inclusion probabilities were not computed: `evidence_` and `alpha_` are
        None, `candidates_` and `inclusion_` empty.

        Args:
            points: number of inducing points, one of `available_sizes_`.
        """
        check_is_fitted(self)
        models = {sized.posterior.M: sized for sized in self._sized}
        if points not in self.available_sizes_:
            sizes = ", ".join(map(str, self.available_sizes_))
            raise InputError(
                f"`points` must be one of the sizes that the fit kept, {sizes}; got {points!r}. "
                "For another size, fit again with `max_points`."
            )
        resized = copy(self)
        if points in models:
            resized._set_sized(models[points])
        return resized

    @abstractmethod
    def _model(
        self, kernel: Kernel, candidates: Tensor, data: Source, params: Parameters
    ) -> InducingModel | HeteroscedasticGP:
        """Return a model for standardised inputs, on the device of the data."""

    def _check_combination(self, params: Parameters) -> None:
        refuse_other_schedule(
            params,
            fast={"max_fit_seconds": None, "criterion": "elbo", "warm_start": False},
            paper={"batch_size": None, "epochs": None},
        )
        if params.schedule == "paper":
            refuse_count_of_given(params)
            params.n_candidates = params.n_candidates or PAPER_CANDIDATES
        if isinstance(params.kernel, str) and params.kernel == AUTO:
            params.kernel = "rbf"
            if params.schedule == "fast":
                params.kernel, *params.other_kernels = AUTO_KERNELS
        check_subset_posterior(params, getattr(self, "likelihood", None))
        self._check_warm_start(params)

    def _after_training(
        self, result: training.FitResult[Any], data: Source, params: Parameters
    ) -> training.FitResult[Any]:
        if params.posterior == "mean-field":
            return result
        return with_subset_posterior(
            result, data, kind=params.posterior, generator=params.generator
        )

    def _check_warm_start(self, params: Parameters) -> None:
        """Remember the earlier fit, if it is the start of this one."""
        params.earlier = getattr(self, "posterior_", None) if params.warm_start else None
        if isinstance(params.earlier, MixturePosterior):
            params.earlier = params.earlier.mode
        if params.earlier is None or params.earlier.M == 0:
            # A constant function is no start: its kernel has hardly any variance.
            params.earlier = None
            return
        if isinstance(params.candidates, Tensor) or params.candidates not in ("auto", "greedy"):
            raise InputError(
                "`warm_start` begins with the inducing points of the earlier fit; got "
                f"candidates={self.candidates!r} as well. Leave one of them out."
            )
        params.earlier_points = tensor(self.inducing_points_)
        if params.other_kernels:
            params.kernel, params.other_kernels = deepcopy(self.kernel_).requires_grad_(True), ()

    def _check_columns(self, params: Parameters, D: int) -> None:
        if isinstance(params.kernel, str):
            names = getattr(self, "feature_names_in_", ())
            columns = {str(name): [number] for number, name in enumerate(names)}
            params.kernel = parse_kernel(params.kernel, D, columns=columns)
        if params.earlier is not None and (before := params.earlier.Z.shape[1]) != D:
            raise InputError(
                f"`warm_start` needs as many columns as the earlier fit, {before}; got {D}. Fit a "
                "new estimator instead."
            )
        check_mean_columns(params.mean, D)
        if isinstance(params.kernel, Kernel) or params.earlier is not None:
            # The parser has checked the columns of an expression.
            kernel = self._kernel(params.kernel, params, D, scale=torch.ones(D))
            check_kernel_columns(kernel, D)
            if params.earlier is not None:
                check_same_structure("kernel", kernel, params.earlier.kernel)
        _CANDIDATES("candidates", params.candidates, shape=("K", D))
        if params.inducing_points is not None:
            _INDUCING_POINTS("inducing_points", params.inducing_points, shape=("M", D))

    def _initial_model(self, data: Source, params: Parameters) -> InducingModel | HeteroscedasticGP:
        kernel = self._kernel(params.kernel, params, data.D, scale=params.x_scaler.scale)
        candidates = candidate_locations(data, params, kernel)
        params.prior_mean = mean_from(params.mean, data.D)
        model = self._model(kernel, candidates, data, params)
        if params.earlier is not None:
            for name in ("kernel", "mean", "likelihood"):
                if name == "likelihood" and getattr(self, "noise", None) == "known":
                    continue  # Its variance is fixed, and not that of the earlier fit.
                own, earlier = getattr(model, name), getattr(params.earlier, name)
                copy_parameters(name, own, earlier)
        model.candidates.requires_grad_(params.inducing_points is None)
        return model

    def _check_targets(self, params: Parameters, data: Source) -> None:
        super()._check_targets(params, data)
        latents = observation_model(params.likelihood).num_latents(data.P)
        zero = params.mean in ("auto", "zero") or type(params.mean) is ZeroMean
        if latents > 1 and not zero:
            raise InputError(
                f"`mean` must be 'auto' or 'zero' for a model of {latents} functions (several "
                "targets, several classes, or noise that depends on the inputs); got "
                f"{self.mean!r}. Leave it out, or fit one model per target."
            )

    def _kernel(
        self, kernel: Any, params: Parameters, D: int, *, scale: Tensor | None = None
    ) -> Kernel:
        """Return the kernel that training begins with, and its priors."""
        initial = kernel_from(kernel, D, scale=scale)
        if params.weak_priors:
            add_weak_priors(initial)
        return initial

    def _training_schedule(
        self, model: InducingModel | HeteroscedasticGP, data: Source, params: Parameters
    ) -> training.Schedule:
        if params.schedule == "fast":
            schedule = training.FastSchedule(
                selection_goal(model, data, params, params.log),
                n_candidates=params.n_candidates,
                kernels=tuple(self._kernel(name, params, data.D) for name in params.other_kernels),
                linear_term=bool(params.other_kernels),
                max_seconds=params.max_fit_seconds,
                criterion=params.criterion,
                warm_start=params.earlier is not None,
                reported=params.reported,
                averaged=params.averaged,
            )
            if not params.streamed:
                return schedule
            # A kernel object has hyper-parameters that the user may have set: they are a start.
            starts = 3 if isinstance(self.kernel, Kernel) else 2
            return replace(schedule, max_starts=starts, inclusion_steps=1)
        pre, joint, post = params.epochs or PAPER_STEPS
        prior = SquaredCardinality(len(model.candidates), params.alpha)
        return training.PaperSchedule(
            prior, pre=pre, joint=joint, post=post, batch_size=params.batch_size
        )

    def _set_fitted(self, result: training.FitResult[Any], observations: float) -> None:
        """Set the attributes of the inducing points, in the user's units."""
        selection, gap, growth = result.selections[0], result.predictive_gap, result.growth
        self._set_posterior(result.posterior)
        self.kernel_name_ = kernel_name(self.kernel, self.kernel_)
        self.kernel_evidence_ = self._compared_kernels(result)
        self.elbo_ = result.elbo
        self.elbo_gap_ = result.elbo_gap / observations
        self.evidence_ = _known(result.evidence)
        self.predictive_gap_ = nan if gap is None else gap.nats
        self.predictive_gap_se_ = nan if gap is None else gap.standard_error
        self.growth_limit_ = None if growth is None else growth.limit
        self.last_doubling_gain_ = nan if growth is None else growth.last_gain
        self.alpha_ = selection.alpha
        self.frontier_ = result.frontier
        self._sized = tuple(
            SizedModel(sized.posterior.cpu().double(), sized.elbo, sized.log_density)
            for sized in result.sized
        )
        self.candidates_ = self._x_scaler.inverse(result.candidates[0].cpu().double()).numpy()
        self.inclusion_ = selection.inclusion.cpu().numpy()
        self._subset_posterior = result.subset_posterior

    def _set_posterior(
        self, posterior: Posterior | HeteroscedasticPosterior | MixturePosterior
    ) -> None:
        self.posterior_ = on_cpu(posterior).double()
        self.kernel_ = self.posterior_.kernel
        self.n_inducing_ = self.posterior_.M
        self.inducing_points_ = self._x_scaler.inverse(self.posterior_.Z).numpy()

    def _set_sized(self, sized: SizedModel) -> None:
        """Set the attributes to those of a smaller model."""
        frontier = self.frontier_
        assert frontier is not None
        # The frontier has the density of this model unless another one of its size is better.
        own = frontier.elbos[self.n_inducing_].item() == self.elbo_
        density = frontier.log_densities[self.n_inducing_].item() if own else nan
        self.elbo_gap_ = max(self.elbo_gap_ + (self.elbo_ - sized.elbo) / frontier.N, 0.0)
        self.predictive_gap_ += density - sized.log_density
        self.predictive_gap_se_ = nan
        self.elbo_, self.evidence_, self.alpha_ = sized.elbo, None, None
        self._sized = tuple(m for m in self._sized if m.posterior.M < sized.posterior.M)
        self._set_posterior(sized.posterior)
        self.candidates_, self.inclusion_ = self.inducing_points_[:0], np.zeros(0)
        self._subset_posterior = None

    def _compared_kernels(self, result: training.FitResult[Any]) -> dict[str, float]:
        """Return the evidence of each kernel of "auto", relative to the best."""
        evidence = result.kernel_evidence
        best = max(evidence, default=-inf)
        if self.kernel != AUTO or len(evidence) < len(AUTO_KERNELS) or best == -inf:
            return {}
        compared: dict[str, float] = dict(zip(AUTO_KERNELS, evidence, strict=True))
        if result.linear_gain is not None:
            best += result.linear_gain
            compared[f"{AUTO_KERNELS[result.linear_kernel]} + linear"] = best
        # Kernels that the time did not suffice for are not compared.
        return {name: nats - best for name, nats in compared.items() if nats > -inf}

    def _warn_of_limits(self) -> None:
        if ProcessGroup.from_environment().is_first:
            for alarm in (*selection_alarms(self), *growth_alarms(self)):
                warnings.warn(alarm, stacklevel=3)


def copy_parameters(
    name: str, new: torch.nn.Module, earlier: torch.nn.Module, *, user: str = "warm_start"
) -> None:
    """Set the parameters of a module to those of an earlier fit; their priors may differ."""
    check_same_structure(name, new, earlier, user=user)
    values = dict(earlier.named_parameters())
    with torch.no_grad():
        for key, parameter in new.named_parameters():
            parameter.copy_(values[key])


def check_same_structure(
    name: str, new: torch.nn.Module, earlier: torch.nn.Module, *, user: str = "warm_start"
) -> None:
    """Raise an error if `user` cannot begin from the parameters of an earlier fit."""
    shapes = [{k: v.shape for k, v in part.named_parameters()} for part in (new, earlier)]
    # By name: a loaded module has its parts in another order.
    kinds = [
        {n: type(part) for n, part in each.named_modules() if not isinstance(part, Prior)}
        for each in (new, earlier)
    ]
    if shapes[0] != shapes[1] or kinds[0] != kinds[1]:
        raise InputError(
            f"`{user}` needs the {name} of the earlier fit, {type(earlier).__name__}, for as "
            f"many columns, targets or classes; got {type(new).__name__} with other parameters. "
            "Set the parameters of the estimator back, or fit a new one."
        )


def _known(evidence: Evidence | None) -> Evidence | None:
    """Return the evidence, or None if no upper bound on it is known."""
    return None if evidence is None or evidence.upper == inf else evidence
