"""`hyper`: which fits average over hyper-parameters, and which uses of a model allow it."""

from typing import Any

from winnowgp.data import Source
from winnowgp.errors import InputError
from winnowgp.estimators.validation import Parameters
from winnowgp.models import MixturePosterior
from winnowgp.training.laplace import MOST_ROWS

HYPER = ("auto", "point", "laplace")
"""Hyper-parameters averaged over where rows are few, at their most probable values, or averaged."""

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
