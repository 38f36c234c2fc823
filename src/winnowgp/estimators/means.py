"""Prior means of the estimators: by name, or as GPyTorch modules."""

from copy import deepcopy
from typing import Any

import torch
from gpytorch.means import ConstantMean, LinearMean, Mean, ZeroMean

from winnowgp.errors import InputError
from winnowgp.models.kernels import prior_mean

MEANS = ("auto", "zero", "constant", "linear")
"""Names of prior means."""


def mean_from(mean: str | Mean, D: int) -> Mean | None:
    """Return a prior mean of D columns by name, or the one given; None for "auto"."""
    if isinstance(mean, Mean):
        return mean
    if mean == "linear":
        linear: Any = LinearMean(D)
        # GPyTorch draws them at random.
        return linear.initialize(weights=torch.zeros(D, 1), bias=torch.zeros(1))
    return {"zero": ZeroMean(), "constant": ConstantMean()}.get(mean)


def check_mean_columns(mean: str | Mean, D: int) -> None:
    """Raise an error if a mean cannot be evaluated on D columns."""
    if not isinstance(mean, Mean):
        return
    row = torch.zeros(1, D, dtype=torch.float64)
    try:
        shape = prior_mean(deepcopy(mean).to(row), row).shape
    except (RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"`mean` cannot be evaluated on {D} columns ({error}); make it one of as many."
        ) from error
    if shape != (1, 1):
        raise InputError(
            f"`mean` must give one number per row; {type(mean).__name__} gives "
            f"{list(shape[1:])}. Remove its `batch_shape`."
        )


def mean_or_name(name: str, value: Any) -> str | Mean:
    """Return a GPyTorch mean, or the name of one, if it is valid."""
    if isinstance(value, Mean):
        return value
    if not isinstance(value, str) or value not in MEANS:
        raise InputError(
            f"`{name}` must be one of {', '.join(map(repr, MEANS))} or a GPyTorch mean; got "
            f"{value!r}."
        )
    return value
