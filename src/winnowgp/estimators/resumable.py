"""What an estimator needs to be stopped and go on: a folder, and what chance decided."""

import os
from typing import Any, TypeAlias

from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state

from winnowgp.data import Ranks
from winnowgp.errors import InputError
from winnowgp.training import Checkpoint, Journal, opened, warn_unshared

Folder: TypeAlias = str | os.PathLike[str] | Checkpoint
"""What users may say for a checkpoint."""
_ALONE = Ranks.alone()


def checkpoint_of(folder: Folder | None) -> Checkpoint | None:
    """The checkpoint that a user asked for, if any."""
    if folder is None or isinstance(folder, Checkpoint):
        return folder
    if not isinstance(folder, str | os.PathLike):
        raise InputError(f"`checkpoint` must be a folder or a `Checkpoint`; got {folder!r}.")
    return Checkpoint(folder)


def journal_of(
    estimator: BaseEstimator,
    checkpoint: Checkpoint | None,
    *,
    ranks: Ranks = _ALONE,
    **rows: Any,
) -> Journal:
    """What is drawn or measured once for a fit to these rows, of an estimator with this request.

    Warns where `torchrun` has started several processes, and the rows are not shared among them.

    Raises:
        CheckpointError: the folder belongs to a fit of other rows or another request.
    """
    if ranks.of == 1:
        warn_unshared(
            Ranks.launched(),
            "rows are shared as a source, `fit(shared(source))`, for regression with Gaussian "
            "noise and for minibatches of classes and of layers",
        )
    watching = ("on_progress", "checkpoint")
    asked = {k: v for k, v in estimator.get_params(deep=False).items() if k not in watching}
    kind = type(estimator).__name__
    return opened(checkpoint, "estimator", ranks=ranks, **rows, estimator=kind, **asked)


def drawn_seed(random_state: Any, journal: Journal) -> int:
    """A seed; without a `random_state` the one that the fit began with."""
    seed = int(check_random_state(random_state).randint(2**31))
    return journal.once(lambda: seed)
