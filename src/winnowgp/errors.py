"""Every exception and warning of the library. A message says which argument, what is required,
what came, and what to do."""


class WinnowError(Exception):
    """Root of everything winnowgp raises on purpose."""


class InputError(WinnowError, ValueError):
    """An argument cannot be used; the message says how to mend it."""


class NotPositiveDefiniteError(WinnowError, ArithmeticError):
    """A covariance matrix could not be factorised, even with the largest jitter of the ladder."""


class TrainingError(WinnowError, RuntimeError):
    """An optimiser could not take a single usable step."""


class DataNotFoundError(WinnowError, FileNotFoundError):
    """A named data set is neither in `$WINNOWGP_DATA` nor in the user's cache."""


class ModelFileError(WinnowError, ValueError):
    """A file is not a model of ours, is damaged, or is from a newer winnowgp."""


class NotSaveableError(WinnowError, TypeError):
    """A thing has a part that a model file has no words for; the message names it."""


class CheckpointError(WinnowError, ValueError):
    """A checkpoint is damaged, cannot be written, or belongs to another fit."""


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; the fit goes on, and the last good one stays."""


class UnsettledWarning(UserWarning):
    """A search for the best q(u) ran out of rounds: what is reported is below the best bound."""


class ToleranceWarning(UserWarning):
    """More nats were given up than the tolerance allows, and no try at keeping it succeeded."""


class NotShardedWarning(UserWarning):
    """Several processes were started, and each does all the work of a fit by itself."""


class LostProcessError(WinnowError, RuntimeError):
    """Another process that shares a fit has ended, or does not answer."""


class MissingExtraError(WinnowError, ImportError):
    """An optional package is needed; the message has the line that installs it."""
