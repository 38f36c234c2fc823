"""The base class of estimators that learn from a stream: `partial_fit`, one batch at a time.

The posterior is the memory: it says what the inducing points have learnt from all rows so far
(`models.online`), so that any fitted estimator, also one that was loaded from a file, can go on.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from math import isnan, nan
from time import perf_counter
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.means import ZeroMean

from winnowgp import training
from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError
from winnowgp.estimators.sparse import SparseEstimator, mean_from, selection_goal
from winnowgp.estimators.validation import Constraint, Parameters, flag, optional, positive_number
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.online import OnlineGP
from winnowgp.models.priors import add_weak_priors
from winnowgp.selection import SizeFrontier, alpha_at
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG
from winnowgp.training.schedules import SizedModel
from winnowgp.training.streaming import FRESH, StreamUpdate, update

BATCH_ROWS = 4096
"""Rows of a batch that are learnt from at once; a longer batch is several ones."""

# Share of the rows that a constant explained, from which a batch may replace it by a function.
_LARGE = 0.2

KEPT_BATCHES = 1000
"""Number of the latest batches that `batches_` has."""


@final
@dataclass(frozen=True, slots=True)
class BatchRecord:
    """What one batch of a stream did to a model."""

    rows: float
    """Number of observations."""
    points: int
    """Number of inducing points after the batch."""
    added: int
    """Rows of the batch that became inducing points."""
    dropped: int
    """Old inducing points that were given up."""
    moved: int
    elbo: float
    """ELBO of all rows that are remembered, in nats."""
    gap: float
    """Nats per observation of the batch that the selection gave up."""
    log_density: float
    """Mean log density of the targets before the batch was learnt; NaN for the first batch."""
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What an estimator has seen of a stream."""

    seen: float
    """Number of observations in all batches."""
    remembered: float
    """Number of observations, each multiplied by what forgetting has left of it; NaN if they had
    known noise or missing targets."""
    count: int
    """Number of batches."""
    given_up: float
    """Nats that all selections have given up."""
    batches: tuple[BatchRecord, ...]
    """The latest batches."""

    def plus(self, batch: BatchRecord, *, factor: float, given_up: float) -> "StreamRecord":
        """Return the record after another batch."""
        return StreamRecord(
            seen=self.seen + batch.rows,
            remembered=factor * self.remembered + batch.rows,
            count=self.count + 1,
            given_up=given_up,
            batches=(*self.batches, batch)[-KEPT_BATCHES:],
        )


def _factor(name: str, value: Any) -> float:
    number = positive_number(name, value, hint="0.99 forgets a hundredth per batch.")
    if number > 1:
        raise InputError(
            f"`{name}` must be at most 1, which forgets nothing; got {value!r}. 0.99 forgets a "
            "hundredth of what was learnt with each batch."
        )
    return number


@dataclass(kw_only=True, eq=False, repr=False)
class StreamingEstimator(SparseEstimator, ABC):
    """The base class of estimators with `partial_fit`.

    Args:
        forgetting: factor between 0 and 1 by which `partial_fit` multiplies the log-likelihood of
            all earlier rows with each batch (a power posterior): an observation that is k batches
            old counts as forgetting^k observations. For data that drift; None forgets nothing.
        move_points: whether `partial_fit` moves the inducing points to where they raise the bound.

    Attributes:
        n_rows_seen_: number of observations of all batches; a row of weight two counts as two.
        n_batches_: number of batches, the first `fit` included.
        batches_: a record of each of the latest 1,000 batches: inducing points, those added,
            dropped and moved, ELBO, gap, log density of the batch before it was learnt, seconds.
    """

    forgetting: float | None = None
    move_points: bool = False

    _constraints: ClassVar[Mapping[str, Constraint]] = {
        **SparseEstimator._constraints,
        "forgetting": optional(_factor),
        "move_points": flag,
    }
    # Set by a fit; not an argument.
    _stream: StreamRecord | None = field(init=False)

    @property
    def n_rows_seen_(self) -> float:
        """Number of observations of all batches."""
        return self._record().seen

    @property
    def n_batches_(self) -> int:
        """Number of batches, the first fit included."""
        return self._record().count

    @property
    def batches_(self) -> tuple[BatchRecord, ...]:
        """Records of the latest batches."""
        return self._record().batches

    @abstractmethod
    def _mean_log_density(self, data: Dataset) -> float:
        """Return the mean log density of standardised rows, in the units of the targets."""

    def _set_fitted(self, result: training.FitResult[Any], observations: float) -> None:
        super()._set_fitted(result, observations)
        gap = max(self.elbo_gap_, 0.0)
        first = BatchRecord(
            float(observations), self.n_inducing_, self.n_inducing_, 0, 0, self.elbo_, gap, nan, nan
        )
        given_up, N = gap * observations, float(observations)
        self._stream = StreamRecord(N, N, 1, given_up, (first,))

    def _set_sized(self, sized: SizedModel) -> None:
        super()._set_sized(sized)
        if self._stream is not None and not isnan(self._stream.remembered):
            given_up = self.elbo_gap_ * self._stream.remembered
            self._stream = replace(self._stream, given_up=given_up)

    def _record(self) -> StreamRecord:
        """Return what the estimator has seen; files of earlier versions have it in the frontier."""
        if self._stream is not None:
            return self._stream
        if self.frontier_ is None:
            raise InputError(
                "this model does not say how many rows it has seen: its file was written by an "
                "earlier version of winnowgp, after the paper's schedule. Fit it again."
            )
        N, gap = float(self.frontier_.N), max(self.elbo_gap_, 0.0)
        return StreamRecord(N, N, 1, gap * N, ())

    def _validate_stream(self) -> Parameters:
        """Return the parameters of an update; raise an error for those that only `fit` has."""
        params = self._validate()
        if isnan(self._record().remembered):
            raise InputError(
                "this model was fitted to rows with known noise or missing targets, which "
                "`partial_fit` would mistake for others. Fit all rows together."
            )
        unsupported = {
            "criterion": ("elbo", "earlier rows cannot be held out"),
            "checkpoint": (None, "save the model after a batch instead, `model.save(path)`"),
        }
        for name, (only, why) in unsupported.items():
            if getattr(params, name) != only:
                raise InputError(
                    f"`partial_fit` needs {name}={only!r}; got {getattr(self, name)!r}: {why}."
                )
        return params

    def _update(self, batches: Iterable[Dataset], params: Parameters) -> Self:
        """Learn from batches of standardised rows; after an error nothing has changed."""
        updated = copy(self)
        params.x_scaler = self._x_scaler
        for data in batches:
            updated._update_once(data, params)
        vars(self).update(vars(updated))
        return self

    def _update_once(self, data: Dataset, params: Parameters) -> None:
        start, record, before = perf_counter(), self._record(), self._mean_log_density(data)
        factor = 1.0 if params.forgetting is None else params.forgetting
        online = self._online(data, params, record)
        online = replace(online, memory=online.memory.forget(factor))
        given_up = factor * record.given_up
        N = factor * record.remembered + data.observations
        data = data.to(params.device)
        if online.memory.M == 0:
            change = (self._search(online, data, params, N=N), 0, 0)
            total = given_up + max(self.elbo_gap_, 0.0) * data.observations
        else:
            result = update(
                online,
                data,
                goal=selection_goal(online.model, data, params, NO_CHECKPOINT_LOG),
                given_up=given_up,
                fresh=params.n_candidates or FRESH,
                move=params.move_points and params.inducing_points is None,
            )
            self._set_updated(result, params, N=N)
            change = (result.added, result.dropped, result.moved)
            total = result.given_up
        self.elbo_gap_ = total / N
        batch = BatchRecord(
            float(data.observations),
            self.n_inducing_,
            *change,
            elbo=self.elbo_,
            gap=(total - given_up) / data.observations,
            log_density=before,
            seconds=perf_counter() - start,
        )
        self._stream = record.plus(batch, factor=factor, given_up=total)

    def _online(self, data: Dataset, params: Parameters, record: StreamRecord) -> OnlineGP:
        """Return a model with the parameters and the memory of the posterior."""
        posterior = self.posterior_
        kernel = deepcopy(posterior.kernel).requires_grad_(True)
        if isinstance(self.kernel, Kernel):
            frozen = {n for n, p in self.kernel.named_parameters() if not p.requires_grad}
            for name, parameter in kernel.named_parameters():
                parameter.requires_grad_(name not in frozen)
        if params.weak_priors:
            add_weak_priors(kernel)
        params.prior_mean = mean_from(params.mean, data.D)
        model = self._model(kernel, posterior.Z, data, params)
        assert isinstance(model, SparseGP | VariationalGP)
        for name in ("mean", "likelihood"):
            getattr(model, name).load_state_dict(getattr(posterior, name).state_dict())
        model.candidates.requires_grad_(False)
        placed = deepcopy(posterior).to(params.device)
        return OnlineGP.of(model, placed, elbo=self.elbo_, N=record.remembered)

    def _search(self, online: OnlineGP, data: Dataset, params: Parameters, *, N: float) -> int:
        """Learn from a batch after rows that a constant explains; return the number of points.

        A constant function has no hyper-parameters to go on with, and the memory without inducing
        points does not know where its rows were: they are noise to any other function. So the batch
        is fitted afresh, and its function replaces the constant if the batch is large enough or the
        ELBO of all rows is higher. Otherwise the constant stays, and with it a mean that it learnt.
        """
        level = isinstance(online.model.mean, ZeroMean)
        held = update(online, data, goal=training.AllCandidates(), fresh=0, learn=level)
        result, _ = self._train(data, params, identity={})
        nothing = replace(online, model=result.model).with_candidates(online.memory.Z)
        earlier = nothing.remembered_bound()
        large = data.observations >= _LARGE * (N - data.observations)
        if result.posterior.M == 0 or not (large or result.elbo + earlier > held.elbo):
            self._set_updated(held, params, N=N)
            self.elbo_gap_ = 0.0
            return 0
        self._set_fitted(result, data.observations)
        self.elbo_ += earlier
        self.evidence_, self._sized = None, ()
        if self.frontier_ is not None:
            self.frontier_ = SizeFrontier(
                self.frontier_.elbos + earlier, torch.full_like(self.frontier_.elbos, nan), N
            )
        return self.n_inducing_

    def _set_updated(self, result: StreamUpdate, params: Parameters, *, N: float) -> None:
        """Set the fitted attributes; those that need all rows are not known."""
        self._set_posterior(result.posterior)
        frontier = replace(result.frontier, bounds=result.frontier.bounds.cpu())
        self.elbo_, self.evidence_ = result.elbo, None
        self.alpha_ = alpha_at(frontier, self.n_inducing_) if params.alpha is None else params.alpha
        self.frontier_ = SizeFrontier.of(frontier, N=N).with_model(
            self.n_inducing_, elbo=result.elbo
        )
        self.predictive_gap_ = self.predictive_gap_se_ = self.last_doubling_gain_ = nan
        self.growth_limit_: str | None = None
        self.kernel_evidence_, self._sized = {}, ()
        self.candidates_, self.inclusion_ = self.inducing_points_[:0], np.zeros(0)


def batches_of(source: Source) -> Iterator[Dataset]:
    """Yield the rows of a source in batches of at most `BATCH_ROWS`, in double precision."""
    if source.process_group.world_size > 1:
        raise InputError(
            "`partial_fit` learns in one process; got rows that several processes share. Pass the "
            "source itself, without `shard`."
        )
    for rows in source.chunks(BATCH_ROWS):
        yield rows.to(torch.device("cpu")).double().merged()
