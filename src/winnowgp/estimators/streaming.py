"""The base class of estimators that learn from a stream: `partial_fit`, one batch at a time.

The posterior of any fitted or loaded estimator is a memory of its rows (`models.online`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isnan, nan
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.means import ZeroMean
from numpy.typing import NDArray

from winnowgp import training
from winnowgp.bounds.streaming import Memory, joined
from winnowgp.data import Dataset, Source
from winnowgp.data.sharding import ShardedSource
from winnowgp.errors import InputError
from winnowgp.estimators.selection import selection_goal
from winnowgp.estimators.sparse import SparseEstimator, copy_parameters
from winnowgp.estimators.stream_records import (
    CONSTANT_ROWS,
    BatchRecord,
    FirstRows,
    StreamRecord,
)
from winnowgp.estimators.validation import (
    Constraint,
    Parameters,
    flag,
    integer,
    mean_from,
    optional,
    positive_number,
)
from winnowgp.io.registry import deserialise, serialise
from winnowgp.models import MixturePosterior, Posterior, SparseGP, VariationalGP
from winnowgp.models.kernels import copy_module
from winnowgp.models.online import OnlineGP, scale_noise
from winnowgp.models.priors import add_weak_priors, remove_priors
from winnowgp.selection import SizeFrontier, alpha_at
from winnowgp.training.checkpoint import (
    NO_CHECKPOINT_LOG,
    CheckpointLog,
    open_checkpoint,
)
from winnowgp.training.fingerprint import row_identity
from winnowgp.training.schedules import SizedModel
from winnowgp.training.streaming import FRESH, StreamUpdate, update

BATCH_ROWS = 4096
"""Rows of a batch that are learnt from at once; a longer batch is several ones."""

# Share of the rows of a constant from which a batch may replace it by a function, and share of the
# observations that must be new to optimise the hyper-parameters again.
_LARGE, _NEW = 0.2, 0.1
_KIND = "Stream"  # of the archive in which the first process sends a model to the others


def _factor(name: str, value: Any) -> float:
    number = positive_number(name, value, hint="0.99 forgets a hundredth per batch.")
    if number > 1:
        raise InputError(
            f"`{name}` must be at most 1, which forgets nothing; got {value!r}. 0.99 forgets a "
            "hundredth of what was learnt with each batch."
        )
    return number


def _window(name: str, value: Any) -> int:
    number = integer(name, value)
    if number < 2:
        raise InputError(
            f"`{name}` must be at least 2 batches, the new one included; got {value!r}. To learn "
            "from one batch alone, fit a new model."
        )
    return number


@dataclass(kw_only=True, eq=False, repr=False)
class StreamingEstimator(SparseEstimator, ABC):
    """The base class of estimators with `partial_fit`.

    Args:
        forgetting: factor between 0 and 1 by which `partial_fit` multiplies the log-likelihood of
            all earlier rows with each batch (a power posterior): an observation that is k batches
            old counts as forgetting^k observations. For data that drift; None forgets nothing.
        window: number of the latest batches that `partial_fit` remembers, the new one included: the
            rows of an older batch leave the bound exactly. All rows from before the first batch
            with a window count as one batch. Takes `window` times the memory; None for all batches.
        move_points: whether `partial_fit` moves the inducing points to where they raise the bound.

    Attributes:
        n_rows_seen_: number of observations of all batches; a row of weight two counts as two.
        n_batches_: number of batches, the first `fit` included.
        batches_: a record of each of the latest 1,000 batches: inducing points, those added,
            dropped and moved, ELBO, gap, log density of the batch before it was learnt, seconds.
        point_ids_: number of each inducing point, in the order in which they were added; a point
            that moves keeps its number, and no number is used twice.
    """

    forgetting: float | None = None
    window: int | None = None
    move_points: bool = False

    _constraints: ClassVar[Mapping[str, Constraint]] = {
        **SparseEstimator._constraints,
        "forgetting": optional(_factor),
        "window": optional(_window),
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

    @property
    def point_ids_(self) -> NDArray[np.int64]:
        """Number of each inducing point, in the order in which they were added."""
        return np.array(self._record().points, dtype=np.int64)

    @abstractmethod
    def _mean_log_density(self, data: Dataset) -> float:
        """Return the mean log density of standardised rows, in the units of the targets."""

    def _set_fitted(self, result: training.FitResult[Any], observations: float) -> None:
        super()._set_fitted(result, observations)
        gap = max(self.elbo_gap_, 0.0)
        first = BatchRecord(
            float(observations), self.n_inducing_, self.n_inducing_, 0, 0, self.elbo_, gap, nan, nan
        )
        self._stream = StreamRecord.of_fit(
            float(observations), gap=gap, batches=(first,), M=self.n_inducing_
        )

    def _set_sized(self, sized: SizedModel) -> None:
        super()._set_sized(sized)
        record = self._stream
        if record is not None and not isnan(record.remembered):
            given_up = self.elbo_gap_ * record.remembered
            self._stream = record.renumbered(self.n_inducing_, given_up=given_up)
            if any(m.fixed is not None or m.residual.dim() for m in record.memories):
                self._stream = replace(self._stream, remembered=nan)

    def _record(self) -> StreamRecord:
        """Return what the estimator has seen; files of earlier versions have it in the frontier."""
        record = self._stream
        if record is not None and len(record.points) == self.n_inducing_:
            return record
        if record is not None:  # files of version 6 do not number their inducing points
            return record.renumbered(self.n_inducing_, given_up=record.given_up)
        if self.frontier_ is None:
            raise InputError(
                "this model does not say how many rows it has seen: its file was written by an "
                "earlier version of winnowgp, after the paper's schedule. Fit it again."
            )
        gap = max(self.elbo_gap_, 0.0)
        return StreamRecord.of_fit(float(self.frontier_.N), gap=gap, batches=(), M=self.n_inducing_)

    def _validate_stream(self) -> Parameters:
        """Return the parameters of `partial_fit`; raise an error for those that only `fit` has."""
        params = self._validate()
        params.reported, params.streamed = False, True
        if params.criterion != "elbo":
            raise InputError(
                "`criterion` must be 'elbo' to learn from further batches; got "
                f"{self.criterion!r}: earlier rows cannot be held out. Fit all rows together."
            )
        if hasattr(self, "posterior_") and isnan(self._record().remembered):
            raise InputError(
                "this model was fitted to rows with missing targets, or resized after a fit with "
                "known noise or noise per target: what it remembers of them is not enough to "
                "learn from further rows. Fit all rows together."
            )
        return params

    def _update(self, batches: Iterable[Dataset], params: Parameters, *, source: Source) -> Self:
        """Learn from batches of standardised rows; after an error nothing has changed.

        The first of several processes learns, and the others get its result. With a checkpoint the
        batches are a resumable stage, which is saved between two of them.

        Args:
            source: the rows of all batches, in the user's units.
        """
        updated, group = copy(self), source.process_group
        if params.checkpoint is not None or group.world_size > 1:
            # An estimator that cannot be written is an error now, not after the first batch.
            serialise(_KIND, updated)
        params.x_scaler = self._x_scaler
        log = self._opened(params, source)
        # A batch that is fitted afresh, after a constant, has no checkpoint of its own.
        params.checkpoint = None
        progress = _StreamProgress(updated)
        stage = log.stage({"stream": progress})
        if not stage.ended:
            for data in islice(batches, progress.batches, None):
                group.broadcast_result(lambda data=data: updated._update_once(data, params))
                progress.batches += 1
                stage.save()
            stage.end()
        log.finish()
        if group.world_size > 1:
            updated = deserialise(group.broadcast_result(lambda: serialise(_KIND, updated)))
        vars(self).update(fitted_attributes(updated))
        return self

    def _opened(self, params: Parameters, source: Source) -> CheckpointLog:
        """Return the log of an update, in a folder of its own beside that of a fit."""
        checkpoint = params.checkpoint
        if checkpoint is None and source.process_group.world_size == 1:
            return NO_CHECKPOINT_LOG
        if checkpoint is not None:
            checkpoint = replace(checkpoint, folder=Path(checkpoint.folder) / "stream")
        identity = {"rows": source.N} if checkpoint is None else row_identity(source, saved=True)
        parameters = self.get_params(deep=False)
        del parameters["callbacks"], parameters["checkpoint"]
        return open_checkpoint(
            checkpoint,
            process_group=source.process_group,
            **identity,
            batch_rows=BATCH_ROWS,
            rows_seen=self.n_rows_seen_,
            earlier_posterior=self.posterior_,
            estimator=type(self).__name__,
            **parameters,
        )

    def _update_once(self, data: Dataset, params: Parameters) -> None:
        start, record, before = perf_counter(), self._record(), self._mean_log_density(data)
        model = self._online_model(data, params)
        memories = self._memories(model, params, record)
        online = OnlineGP(model, joined(memories)).at_memory()
        share = online.memory.observations / record.remembered
        given_up = share * record.given_up
        data, N = data.to(params.device), online.memory.observations + data.observations
        first = None if params.window is not None else record.first
        if first is not None:
            first = first.to(params.device).forget(params.forgetting or 1.0).plus(data)
        waiting = share * record.waiting
        learn = first is not None or waiting + data.observations >= _NEW * N
        if online.memory.M == 0:
            if first is None and params.window is None:
                first = FirstRows(data, float(data.observations))
            first, result = self._search(online, data, first, params, N=N)
        else:
            rows, earlier = data, 0.0
            if first is not None:
                # All rows are there, so that nothing needs to be remembered.
                online, given_up = OnlineGP.start(online.model, outputs=data.P), 0.0
                rows, earlier = first.rows.merged(), N - data.observations
            result = update(
                online,
                rows,
                earlier=earlier,
                goal=selection_goal(online.model, data, params, NO_CHECKPOINT_LOG),
                given_up=given_up,
                fresh=params.n_candidates or FRESH,
                learn=learn,
                waiting=waiting,
                steps=record.steps,
                move=params.move_points and params.inducing_points is None,
            )
            self._set_updated(result, params, N=N)
        if result is None:  # a function of the latest rows, which has replaced a constant
            given_up = self.elbo_gap_ * N
            kept, selected, memories = [], [True] * self.n_inducing_, ()
        else:
            given_up = result.given_up
            kept, selected = result.kept.tolist(), result.selected.tolist()
            memories = self._remembered(result.online, memories, data, params)
        batch = BatchRecord(
            float(data.observations),
            self.n_inducing_,
            added=0,
            dropped=0,
            moved=0 if result is None else result.moved,
            elbo=self.elbo_,
            gap=self.elbo_gap_,
            log_density=before,
            seconds=perf_counter() - start,
        )
        if first is not None:
            first = first.to(torch.device("cpu")).kept(N, constant=self.n_inducing_ == 0)
        self._stream = record.plus(
            batch,
            share=share,
            given_up=given_up,
            kept=kept,
            selected=selected,
            memories=memories,
            first=first,
            waiting=0.0 if learn else waiting + data.observations,
            steps=None if result is None else result.steps,
            noise_share=None if result is None else result.noise_share,
        )

    def _keep_first(self, batches: Iterable[Dataset]) -> Self:
        """Keep the standardised rows of the first call of `partial_fit`, if they are few."""
        record, constant = self._record(), self.n_inducing_ == 0
        if self.window is None and record.seen <= CONSTANT_ROWS:
            rows = FirstRows.of(list(batches))
            self._stream = replace(record, first=rows.kept(record.seen, constant=constant))
        return self

    @property
    def _mode(self) -> Posterior:
        """The posterior at the most probable hyper-parameters."""
        posterior = self.posterior_
        return posterior.mode if isinstance(posterior, MixturePosterior) else posterior

    def _memories(
        self, model: SparseGP | VariationalGP, params: Parameters, record: StreamRecord
    ) -> tuple[Memory, ...]:
        """Return what is left of earlier rows: one memory, or those of the batches of a window."""
        memories = tuple(memory.to(params.device) for memory in record.memories)
        if not memories:
            posterior, N = deepcopy(self._mode).to(params.device), record.remembered
            memories = (OnlineGP.of(model, posterior, elbo=self.elbo_, N=N).memory,)
        if params.window is not None:
            memories = memories[1 - params.window :]
        return tuple(memory.forget(params.forgetting or 1.0) for memory in memories)

    def _remembered(
        self, online: OnlineGP, memories: tuple[Memory, ...], data: Dataset, params: Parameters
    ) -> tuple[Memory, ...]:
        """Return the memory after a batch; with a window, that of each of its batches.

        Args:
            online: the model after the batch.
            memories: what was remembered before.
        """
        after: tuple[Memory, ...] = (online.memory,)
        if params.window is not None:
            earlier = tuple(online.projected(memory) for memory in memories)
            after = (*earlier, replace(online, memory=joined(earlier)).batch_memory(data))
        return tuple(memory.to(torch.device("cpu")) for memory in after)

    def _online_model(self, data: Dataset, params: Parameters) -> SparseGP | VariationalGP:
        """Return a model with the parameters of the posterior, and no candidates."""
        posterior = self._mode
        kernel = copy_module(posterior.kernel)
        given = dict(self.kernel.named_parameters()) if isinstance(self.kernel, Kernel) else {}
        for name, parameter in kernel.named_parameters():
            parameter.requires_grad_(name not in given or given[name].requires_grad)
        if not (isinstance(self.kernel, Kernel) or params.weak_priors):
            remove_priors(kernel)
        if params.weak_priors:
            add_weak_priors(kernel)
        params.prior_mean = mean_from(params.mean, data.D)
        model = self._model(kernel, posterior.Z[:0], data, params)
        assert isinstance(model, SparseGP | VariationalGP)
        for name in ("mean", "likelihood"):
            own, fitted = getattr(model, name), getattr(posterior, name)
            copy_parameters(name, own, fitted, user="partial_fit")
        if (share := self._record().noise_share) is not None:
            scale_noise(model.likelihood, 1 / share.to(params.device))
        model.candidates.requires_grad_(False)
        return model

    def _search(
        self,
        online: OnlineGP,
        data: Dataset,
        first: FirstRows | None,
        params: Parameters,
        *,
        N: float,
    ) -> tuple[FirstRows | None, StreamUpdate | None]:
        """Learn from a batch after rows that a constant explains.

        A constant function has no hyper-parameters to go on with, and the memory without inducing
        points does not know where its rows were: they are noise to any other function. So the rows
        that are kept are fitted afresh whenever enough of them are new, and their function
        replaces the constant if they are enough of all rows or the ELBO of all rows is higher.

        Args:
            first: the rows that are kept, those of the batch included; None keeps no rows.

        Returns: the rows to keep, and the constant; None if a function has replaced it.
        """
        level = isinstance(online.model.mean, ZeroMean)
        held = update(online, data, goal=training.AllCandidates(), fresh=0, learn=level)
        if first is None or first.is_search_due(N):
            rows = data if first is None else first.rows.merged()
            first = None if first is None else replace(first, waiting=0.0)
            result = self._train(rows, params, identity={})
            earlier = _bound_of_others(held, result.model, rows)
            large = rows.observations >= _LARGE * (N - rows.observations)
            if result.posterior.M and (large or result.elbo + earlier > held.elbo):
                self._set_found(result, rows, earlier, N=N)
                return first, None
        held = replace(held, gap=0.0, given_up=0.0)
        self._set_updated(held, params, N=N)
        return first, held

    def _set_found(
        self, result: training.FitResult[Any], rows: Dataset, earlier: float, *, N: float
    ) -> None:
        """Set the fitted attributes to those of a function of the latest rows.

        Args:
            earlier: bound of the other rows in nats, which are noise to this function.
        """
        self._set_fitted(result, rows.observations)
        self.elbo_ += earlier
        self.elbo_gap_ *= rows.observations / N
        self.evidence_, self._sized = None, ()
        if self.frontier_ is not None:
            elbos = self.frontier_.elbos + earlier
            sizes = SizeFrontier(elbos, torch.full_like(elbos, nan), N)
            self.frontier_ = self._with_reference(sizes)

    def _set_updated(self, result: StreamUpdate, params: Parameters, *, N: float) -> None:
        """Set the fitted attributes; those that need all rows are not known."""
        self._set_posterior(result.posterior)
        frontier = replace(result.frontier, bounds=result.frontier.bounds.cpu())
        self.elbo_, self.elbo_gap_, self.evidence_ = result.elbo, result.gap / N, None
        self.alpha_ = alpha_at(frontier, self.n_inducing_) if params.alpha is None else params.alpha
        sizes = SizeFrontier.of(frontier, N=N).with_model(self.n_inducing_, elbo=result.elbo)
        self.frontier_ = self._with_reference(sizes)
        self.predictive_gap_ = self.predictive_gap_se_ = self.last_doubling_gain_ = nan
        self.growth_limit_: str | None = None
        self.kernel_evidence_, self._sized = {}, ()
        self.candidates_, self.inclusion_ = self.inducing_points_[:0], np.zeros(0)

    def _with_reference(self, frontier: SizeFrontier) -> SizeFrontier:
        """Return a frontier whose gaps are measured from where `elbo_gap_` is."""
        reference = self.elbo_ + self.elbo_gap_ * frontier.N
        return replace(frontier, earlier_gap=max(reference - frontier.best, 0.0))


def _bound_of_others(held: StreamUpdate, model: SparseGP | VariationalGP, rows: Dataset) -> float:
    """Return the bound of remembered rows as noise to a model, in nats.

    Without inducing points the bound is a sum over rows, and so is what is remembered of them.

    Args:
        held: a constant.
        model: another model of the rows.
        rows: rows that do not count, which the constant has seen.
    """
    memory = held.online.memory
    if memory.observations - rows.observations <= 1e-9 * memory.observations:
        return 0.0
    own = OnlineGP.start(held.online.model, outputs=rows.P).after(rows).memory
    return OnlineGP(model, memory.without(own)).at_memory().remembered_bound()


def batches_of(source: Source) -> Iterator[Dataset]:
    """Yield all rows of a source in batches of at most `BATCH_ROWS`, in double precision."""
    shared = isinstance(source, ShardedSource)
    for rows in source.all_chunks(BATCH_ROWS) if shared else source.chunks(BATCH_ROWS):
        yield rows.to(torch.device("cpu")).double().merged()


def fitted_attributes(estimator: StreamingEstimator) -> dict[str, Any]:
    """Return all attributes of an estimator but its parameters."""
    parameters = estimator.get_params(deep=False)
    return {name: value for name, value in vars(estimator).items() if name not in parameters}


@final
@dataclass(slots=True)
class _StreamProgress:
    """The state of an update between two batches: the fitted attributes of an estimator."""

    estimator: StreamingEstimator
    batches: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "estimator": copy(self.estimator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches, saved = state["batches"], state["estimator"]
        if type(saved) is not type(self.estimator):
            raise TypeError(f"holds a {type(saved).__name__}")
        vars(self.estimator).update(fitted_attributes(saved))
