"""Exceptions and warnings of the library.

A message says which argument is wrong, what is required, what was given, and what to do.
"""


class WinnowError(Exception):
    """Base class of all exceptions that winnowgp raises."""


class InputError(WinnowError, ValueError):
    """An argument is invalid; the message says what is required."""


class NotPositiveDefiniteError(WinnowError, ArithmeticError):
    """A covariance matrix could not be factorised, even with the largest jitter."""


class TrainingError(WinnowError, RuntimeError):
    """An optimiser could not evaluate its objective at the starting point."""


class DataNotFoundError(WinnowError, FileNotFoundError):
    """A named data set is neither in `$WINNOWGP_DATA` nor in the user's cache."""


class ModelFileError(WinnowError, ValueError):
    """A file is not a winnowgp model, is damaged, or was written by a newer version."""


class NotSaveableError(WinnowError, TypeError):
    """An object contains a component that cannot be serialised; the message names it."""


class CheckpointError(WinnowError, ValueError):
    """A checkpoint is damaged, cannot be written, or belongs to another fit."""


class LostProcessError(WinnowError, RuntimeError):
    """Another process of a distributed fit has ended or does not respond."""


class MissingExtraError(WinnowError, ImportError):
    """An optional dependency is not installed; the message has the command that installs it."""


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; the fit continues, and the previous one is kept."""


class ConvergenceWarning(UserWarning):
    """A search ended before it reached its tolerance; the result is the best one found."""


class GrowthLimitWarning(UserWarning):
    """A limit ended the growth of the candidates, and more inducing points may still pay."""


class MissingGlyphWarning(UserWarning):
    """No installed font has a character of a label; the figure shows its code instead."""


class NotShardedWarning(UserWarning):
    """Several processes were started, and each of them repeats the work of the whole fit."""


class LikelihoodWarning(UserWarning):
    """The target has counts or outliers, for which another likelihood may be better."""


class RandomSplitWarning(UserWarning):
    """Rows of a series were held out at random, between the rows that the model was fitted to."""
