"""A fit watched in TensorBoard."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from winnowgp.errors import InputError, MissingExtraError
from winnowgp.training import DeepProgress, Progress, inclusions, readings

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@final
class TensorBoard:
    """A watcher that writes every step where `tensorboard --logdir FOLDER` reads it.

    Scalars: the objective of each phase, the number of points, and the expected number where that
    is learnt; histograms of inclusion. Steps are counted over all phases. A fit that goes on from a
    checkpoint goes on with its curves.

    >>> watcher = TensorBoard("runs/energy")  # doctest: +SKIP
    >>> SparseGPRegressor(on_progress=watcher).fit(X, y)  # doctest: +SKIP

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

    def __call__(self, progress: Progress | DeepProgress) -> None:
        """Write a step."""
        self._step += 1
        if self._writer is None:
            # Whatever a killed fit wrote of this step and later ones will be written again.
            self._writer = _summary_writer()(os.fspath(self.folder), purge_step=self._step)
        for name, value in readings(progress).items():
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
