"""Exceptions and warnings of the library.

A message says which argument is wrong, what is required, what was given, and what to do.
"""


class WinnowError(Exception):
    """Base class of all exceptions that winnowgp raises."""


class InputError(WinnowError, ValueError):
    """An argument is invalid; the message says what is required."""


class UnavailableAttributeError(InputError, AttributeError):
    """A fitted estimator lacks an attribute that others of its class have; `hasattr` is false."""


class NotPositiveDefiniteError(WinnowError, ArithmeticError):
    """A covariance matrix could not be factorised, or a bound or its gradient is not finite."""


class TrainingError(WinnowError, RuntimeError):
    """An optimiser cannot evaluate its objective, or a process of a run was killed."""


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


class MissingTargetsWarning(UserWarning):
    """Rows without any target were left out of a fit."""


class RowIndexWarning(UserWarning):
    """The first column of a file has no name and was left out as a row index."""


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; the fit continues, and the previous one is kept."""


class FitWarning(UserWarning):
    """Base class of the warnings that the result of a fit may be worse than it looks.

    Each message says what was seen and what to try. `warnings.simplefilter("error", FitWarning)`
    makes exceptions of all of them.
    """


class ConvergenceWarning(FitWarning):
    """A search ended before its tolerance, or a sampler before its chains agreed."""


class GrowthLimitWarning(FitWarning):
    """A limit ended the growth of the candidates, and more inducing points may still pay."""


class NoInducingPointsWarning(FitWarning):
    """The model predicts the same for every row: no inducing points, or a constant target."""


class AllCandidatesWarning(FitWarning):
    """All candidates were selected: more may pay, or the model is no smaller than the data."""


class WorseThanConstantWarning(FitWarning):
    """The held-out log density is not above that of a constant prediction."""


class CoverageWarning(FitWarning):
    """Intervals of 95 % hold far fewer or far more than 95 % of the held-out rows."""


class LeakageWarning(FitWarning):
    """Predictions are nearly perfect because one column determines the target."""


class DependentResidualsWarning(FitWarning):
    """Residuals of held-out rows, or their spread, depend on an input or on the order of rows."""


class PeriodicResidualsWarning(FitWarning):
    """Residuals of held-out rows repeat with a period."""


class HeavyTailsWarning(FitWarning):
    """Residuals of held-out rows have heavier tails than the likelihood."""


class UnseenGroupsWarning(FitWarning):
    """Whole groups were held out, and the group itself is an input of the model."""


class CopiedRowsWarning(FitWarning):
    """Held-out rows are copies of training rows, so that their quality is too good."""


class ExtrapolationWarning(FitWarning):
    """Rows to predict, or to learn from, lie far outside the training rows."""


class NotShardedWarning(UserWarning):
    """Several processes were started, and each of them repeats the work of the whole fit."""


class FewRowsWarning(FitWarning):
    """So few rows were fitted that the priors decide what the model predicts."""


class LikelihoodWarning(FitWarning):
    """The target has counts or outliers, for which another likelihood may be better."""


class RandomSplitWarning(FitWarning):
    """Rows of a series were held out at random, between the rows that the model was fitted to."""


class MissingGlyphWarning(UserWarning):
    """No installed font has a character of a label; the figure shows its code instead."""
