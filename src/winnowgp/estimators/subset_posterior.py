"""`posterior`: which fits have another posterior over subsets than independent inclusion."""

from typing import Any

from winnowgp.errors import InputError
from winnowgp.estimators.validation import HETEROSCEDASTIC, Parameters
from winnowgp.selection.subset_posterior import KINDS

__all__ = ["KINDS", "check_subset_posterior", "refuse_stream"]


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
        "hyper": (getattr(params, "hyper", "point"), None, "one average at a time"),
        "log_target": (getattr(params, "log_target", False), False, "pass log y instead"),
        "max_predict_us": (params.max_predict_us, None, "predictions average over subsets"),
    }
    if kind == "gibbs" and getattr(params, "hyper", "point") in ("auto", "point"):
        averaged.pop("hyper")
    if likelihood == HETEROSCEDASTIC:
        raise InputError(
            f"`likelihood` must not be 'heteroscedastic' for `posterior={kind!r}`: function and "
            "noise have candidates of their own. Leave `posterior` out."
        )
    others = none | (averaged if kind == "gibbs" else {})
    for name, (value, allowed, why) in others.items():
        if value is allowed or (isinstance(value, str) and value == allowed):
            continue
        allowed = "'auto' or 'point'" if name == "hyper" else repr(allowed)
        raise InputError(
            f"`{name}` must be {allowed} for `posterior={kind!r}`: {why}; got {value!r}."
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
