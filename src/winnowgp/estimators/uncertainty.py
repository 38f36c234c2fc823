"""Averages over hyper-parameters (`hyper`) and over subsets (`posterior`).

Which fits take them, and which uses of a model allow them.
"""

from typing import Any

from winnowgp.data import Source
from winnowgp.errors import InputError
from winnowgp.estimators.validation import HETEROSCEDASTIC, Parameters
from winnowgp.models import MixturePosterior
from winnowgp.training.laplace import MOST_ROWS

HYPER = ("auto", "point", "laplace")
"""Average over hyper-parameters if rows are few; their most probable values; always average."""

FEW_ROWS = 500
"""Rows up to which `hyper="auto"` averages over hyper-parameters."""


def check_hyper(params: Parameters, likelihood: Any) -> None:
    """Raise an `InputError` if other parameters cannot be used with `hyper="laplace"`.

    With such parameters, and with a limit on the cost of predictions, "auto" becomes "point".

    Args:
        likelihood: the likelihood as it was passed to the estimator.
    """
    if params.hyper == "point":
        return
    others: dict[str, tuple[Any, Any, str]] = {
        "likelihood": (likelihood, "gaussian", "members of the mixture have Gaussian noise"),
        "batch_size": (params.batch_size, None, "all rows are used"),
        "schedule": (params.schedule, "fast", "the paper's ends before the maximum"),
        "log_target": (params.log_target, False, "pass log y instead"),
        "max_predict_us": (params.max_predict_us, None, "set `max_points` instead"),
    }
    for name, (value, allowed, why) in others.items():
        if value == allowed:
            continue
        if params.hyper == "laplace":
            raise InputError(
                f"`{name}` must be {allowed!r} for `hyper='laplace'`: {why}; got {value!r}."
            )
        params.hyper = "point"
        return
    if params.hyper == "auto" and params.max_points is not None:
        params.hyper = "point"


def check_hyper_rows(params: Parameters, data: Source) -> None:
    """Raise an `InputError` if `hyper="laplace"` is not for so many rows.

    "auto" becomes "laplace" with few rows and "point" with many.
    """
    if params.hyper == "point":
        return
    if params.hyper == "auto":
        params.hyper = "laplace" if data.N <= FEW_ROWS else "point"
        return
    if data.N > MOST_ROWS:
        raise InputError(
            f"`hyper='laplace'` is for at most {MOST_ROWS:,} different rows; got {data.N:,}. So "
            "many rows determine the hyper-parameters: leave it out."
        )


def gaussian_posterior(posterior: Any, *, hyper: str, subsets: str, what: str) -> Any:
    """Return a posterior that is Gaussian: of a mixture, that of the most probable values.

    Raises:
        InputError: an average over hyper-parameters or subsets was asked for, which `what` cannot
            represent.
    """
    if not isinstance(posterior, MixturePosterior):
        return posterior
    if subsets == "gibbs":
        raise InputError(
            f"{what} cannot represent predictions that are averaged over subsets; fit with "
            "`posterior='determinantal'` or 'mean-field', or save the model with `save`."
        )
    if hyper == "laplace":
        raise InputError(
            f"{what} cannot represent predictions that are averaged over hyper-parameters; fit "
            "with `hyper='point'`, or save the model with `save`."
        )
    return posterior.mode


def check_subset_posterior(params: Parameters, likelihood: Any) -> None:
    """Raise an `InputError` if other parameters cannot be used with such a posterior.

    "gibbs" averages predictions over subsets, so that `hyper="auto"` becomes "point".

    Args:
        likelihood: the likelihood as it was passed to the estimator; None for classes.
    """
    kind = params.posterior
    if kind == "mean-field":
        return
    none = {
        "schedule": (params.schedule, "fast", "the paper's learns independent inclusion"),
        "inducing_points": (params.inducing_points, None, "there is nothing to select"),
    }
    averaged = {
        "log_target": (getattr(params, "log_target", False), False, "pass log y instead"),
        "max_predict_us": (params.max_predict_us, None, "predictions average over subsets"),
    }
    if kind == "gibbs" and getattr(params, "hyper", "point") == "laplace":
        raise InputError(
            "`hyper` must be 'auto' or 'point' for `posterior='gibbs'`: one average at a time; got "
            "'laplace'."
        )
    if likelihood == HETEROSCEDASTIC:
        raise InputError(
            f"`likelihood` must not be 'heteroscedastic' for `posterior={kind!r}`: function and "
            "noise have candidates of their own. Leave `posterior` out."
        )
    others = none | (averaged if kind == "gibbs" else {})
    for name, (value, allowed, why) in others.items():
        if value is allowed or (isinstance(value, str) and value == allowed):
            continue
        raise InputError(
            f"`{name}` must be {allowed!r} for `posterior={kind!r}`: {why}; got {value!r}."
        )
    if kind == "gibbs" and getattr(params, "hyper", None) == "auto":
        params.hyper = "point"


def refuse_stream(posterior: str) -> None:
    """Raise an `InputError` if `partial_fit` cannot go on with such a posterior."""
    if posterior != "mean-field":
        raise InputError(
            f"`partial_fit` needs posterior='mean-field'; got {posterior!r}: later batches do not "
            "sample subsets. Fit all rows together, or leave it out."
        )
