"""Callbacks that write to TensorBoard and MLflow."""

import os
from collections.abc import Mapping
from importlib import import_module
from time import time
from typing import TYPE_CHECKING, Any, final

from winnowgp.errors import InputError, MissingExtraError
from winnowgp.training import Progress
from winnowgp.training.callbacks import inclusions, step_metrics

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


# A fit watched in TensorBoard.


@final
class TensorBoard:
    """A watcher that writes every step where `tensorboard --logdir FOLDER` reads it.

    Scalars: the objective of each phase, the number of points, and the expected number where that
    is learnt; histograms of inclusion. Steps are counted over all phases. A fit that goes on from a
    checkpoint goes on with its curves.

    >>> watcher = TensorBoard("runs/energy")  # doctest: +SKIP
    >>> SparseGPRegressor(callbacks=watcher).fit(X, y)  # doctest: +SKIP

    Args:
        folder: where to write.
        histogram_every: steps between two histograms.
    """

    def __init__(self, folder: str | os.PathLike[str], *, histogram_every: int = 10) -> None:
        if histogram_every < 1:
            raise InputError(f"`histogram_every` must be at least 1; got {histogram_every}.")
        _summary_writer()
        self.folder, self.histogram_every = folder, histogram_every
        self._step = 0
        self._writer: SummaryWriter | None = None

    def __call__(self, progress: Progress) -> None:
        """Write a step."""
        self._step += 1
        if self._writer is None:
            # Whatever a killed fit wrote of this step and later ones will be written again.
            self._writer = _summary_writer()(os.fspath(self.folder), purge_step=self._step)
        for name, value in step_metrics(progress).items():
            self._writer.add_scalar(name, value, self._step)
        if progress.step % self.histogram_every == 0 or progress.step == progress.steps:
            for name, inclusion in inclusions(progress).items():
                self._writer.add_histogram(name, inclusion.detach().cpu(), self._step)

    def close(self) -> None:
        """Write out what is left; a later step opens the folder again."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        """How many steps there were."""
        if self._writer is not None:
            self._writer.flush()
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from there."""
        if self._step != state["step"]:
            self.close()
        self._step = state["step"]

    def __getstate__(self) -> dict[str, Any]:
        """Without the open file: copies open it for themselves."""
        return {**vars(self), "_writer": None}


def _summary_writer() -> "type[SummaryWriter]":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(
            "`TensorBoard` needs the package tensorboard: pip install 'winnowgp[tensorboard]'."
        ) from error
    return SummaryWriter


# A fit recorded by MLflow.


# What one request to a server may hold, by MLflow's own limit.
_MOST_METRICS = 1000


@final
class MLflow:
    """A watcher that records every step in a run of MLflow's.

    Metrics: the objective of each phase, the number of points, and the expected number where that
    is learnt. Steps are counted over all phases. The run is made at the first step; a fit that goes
    on from a checkpoint goes on with its run. `close`, or leaving a `with` block, ends the run.

    >>> with MLflow("energy", params={"alpha": 0.05}) as watcher:  # doctest: +SKIP
    ...     SparseGPRegressor(callbacks=watcher).fit(X, y)

    Args:
        experiment: its name; made if there is none.
        run_name: of the run; MLflow's own choice if None.
        tracking_uri: where runs are kept; as MLflow is configured if None.
        params: further words to keep with the run.
    """

    def __init__(
        self,
        experiment: str = "winnowgp",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        params: Mapping[str, object] | None = None,
    ) -> None:
        _module("tracking")
        self.experiment, self.run_name, self.tracking_uri = experiment, run_name, tracking_uri
        self.params = dict(params or {})
        self.run_id: str | None = None
        """Of MLflow's run, once there is one."""
        self._step = 0
        self._client: Any = None
        self._waiting: list[Any] = []

    def __call__(self, progress: Progress) -> None:
        """Record a step; sent with others, a few hundred at a time."""
        if self.run_id is None:
            self.run_id = self._new_run()
        self._step += 1
        metric, now = _module("entities").Metric, int(1000 * time())
        self._waiting += [
            metric(name, value, now, self._step) for name, value in step_metrics(progress).items()
        ]
        if len(self._waiting) > _MOST_METRICS // 2:
            self.flush()

    def flush(self) -> None:
        """Send what is waiting."""
        if self.run_id is not None and self._waiting:
            self._connected().log_batch(self.run_id, metrics=self._waiting)
            self._waiting = []

    def close(self) -> None:
        """Send what is waiting, and end the run."""
        self._end("FINISHED")

    def state_dict(self) -> dict[str, Any]:
        """Which run it is, and how many steps there were."""
        self.flush()
        return {"run_id": self.run_id, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that run."""
        self.run_id, self._step, self._waiting = state["run_id"], state["step"], []

    def __enter__(self) -> "MLflow":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end("FINISHED" if kind is None else "FAILED")

    def __getstate__(self) -> dict[str, Any]:
        """Without the connection: copies make one for themselves."""
        return {**vars(self), "_client": None}

    def _end(self, status: str) -> None:
        self.flush()
        if self.run_id is not None:
            self._connected().set_terminated(self.run_id, status)

    def _connected(self) -> Any:
        if self._client is None:
            self._client = _module("tracking").MlflowClient(self.tracking_uri)
        return self._client

    def _new_run(self) -> str:
        client = self._connected()
        known = client.get_experiment_by_name(self.experiment)
        number = client.create_experiment(self.experiment) if known is None else known.experiment_id
        run = client.create_run(number, run_name=self.run_name)
        for name, value in self.params.items():
            client.log_param(run.info.run_id, name, value)
        return run.info.run_id


def _module(name: str) -> Any:
    try:
        return import_module(f"mlflow.{name}")
    except ImportError as error:
        raise MissingExtraError(
            "`MLflow` needs the package mlflow, or mlflow-skinny: pip install 'winnowgp[mlflow]'."
        ) from error
