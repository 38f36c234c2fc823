"""Validation of the parameters and the inputs of estimators.

`PARAMETERS` maps the name of a constructor argument to the function that validates it. Such a
function takes the name and the value, and returns the value in the form in which a fit uses it, or
raises `InputError`: which argument, what is required, what was passed, what to do. All parameters
are validated before anything else happens, so that a wrong one neither opens a checkpoint nor
reads a row.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from math import inf
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from gpytorch import likelihoods
from gpytorch.constraints import GreaterThan
from gpytorch.means import ConstantMean, LinearMean, Mean, ZeroMean
from sklearn.utils import check_random_state
from torch import Tensor

from winnowgp.data import Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators.rows import tensor
from winnowgp.models.deep_layer import HIDDEN_MEANS
from winnowgp.models.kernels import prior_mean
from winnowgp.models.likelihoods import WITH_NOISE, HeteroscedasticLikelihood
from winnowgp.models.observations import LEAST_NOISE
from winnowgp.training import Callback, Checkpoint
from winnowgp.training.callbacks import as_callbacks
from winnowgp.training.checkpoint import CheckpointLog

Constraint: TypeAlias = Callable[[str, Any], Any]
"""Validates the value of a named parameter and returns it converted."""

CheckpointLike: TypeAlias = str | os.PathLike[str] | Checkpoint
"""A folder for a checkpoint, or a `Checkpoint` that also sets how often it is written."""

LIKELIHOODS = {
    "gaussian": likelihoods.GaussianLikelihood,
    "student-t": likelihoods.StudentTLikelihood,
    "laplace": likelihoods.LaplaceLikelihood,
    "poisson": likelihoods.PoissonLikelihood,
    "negative-binomial": likelihoods.NegativeBinomialLikelihood,
    "beta": likelihoods.BetaLikelihood,
}
HETEROSCEDASTIC = "heteroscedastic"
"""Gaussian noise whose variance depends on the inputs, for `SparseGPRegressor`."""

MEANS = ("auto", "zero", "constant", "linear")
"""Names of prior means."""

TOLERANCE = 0.01
"""Nats per observation, if no parameter sets the number of inducing points."""


class Parameters(SimpleNamespace):
    """The validated parameters of an estimator, by name, and what a fit derives from them."""

    x_scaler: Standardiser
    """Scaler of the inputs."""
    generator: torch.Generator
    """Source of randomness of the fit, on its device."""
    log: CheckpointLog
    """Open checkpoint of the fit."""
    prior_mean: Mean | None
    """The prior mean that `mean` names or is; None for the default of the model."""
    other_kernels: Sequence[str] = ()
    """Kernels that are compared with `kernel`."""
    weak_priors: bool = False
    """Whether hyper-parameters have priors that few rows need."""
    reported: bool = True
    """Whether smaller models and held-out densities are computed for the report."""
    streamed: bool = False
    """Whether further batches follow, which continue the search for hyper-parameters."""
    averaged: bool = False
    """Whether predictions are averaged over hyper-parameters and a constant."""
    robust: bool = False
    """Whether predictions are averaged with a constant if held-out rows gain by it."""
    earlier: Any = None
    """Posterior of the fit that this one continues, if it does."""
    earlier_points: Tensor | None = None
    """Inducing points of that fit, in the units of the inputs."""
    named_kernel: bool
    """Whether `kernel` was given by name, of a latent-variable model."""
    named_likelihood: bool
    """Whether `likelihood` was given by name, of a latent-variable model."""
    boxes: list[int]
    """Columns that are widths of boxes, of a model of several processes."""
    kernel_scale: Tensor
    """Scales of the other columns, of such a model."""
    column: int
    """The column of the fidelity, of a model of several fidelities."""
    common_scaler: Standardiser
    """Scaler of the inputs of all fidelities, of a nonlinear relation."""
    chained: bool
    """Whether the model that is fitted has the fidelity below as an input."""


def validated(constraints: Mapping[str, Constraint], values: Mapping[str, Any]) -> Parameters:
    """Return the validated parameters of an estimator.

    `alpha="auto"` becomes None. A `tolerance` of None becomes 0.01, unless another parameter sets
    the number of inducing points.

    Raises:
        InputError: a value is not allowed; the number of inducing points is specified twice; or a
            parameter would have no effect.
    """
    params = Parameters(**{name: constraints[name](name, v) for name, v in values.items()})
    limits = [name for name in ("max_points", "max_predict_us", "max_cost") if name in values]
    given = [name for name in ("alpha", *limits) if getattr(params, name) is not None]
    if values.get("inducing_points") is not None:
        _refuse_selection(params, values)
        return params
    if len(given) > 1:
        limits = [f"`{name}`" for name in limits]
        raise InputError(
            "specify the number of inducing points in one way only: a number for `alpha`, "
            f"{' or '.join(limits)}; got {' and '.join(f'`{n}` {values[n]!r}' for n in given)}."
        )
    if params.tolerance is None and not given:
        params.tolerance = TOLERANCE
    elif params.tolerance is not None and given == ["alpha"]:
        raise InputError(
            "`alpha` and `tolerance` set the number of inducing points in two ways; got "
            f"{values['alpha']!r} and {values['tolerance']!r}. Leave one of them out."
        )
    predictive = params.schedule == "fast" and values.get("criterion", "elbo") != "elbo"
    if predictive and params.tolerance is None:
        raise InputError(
            f"`criterion` is what `tolerance` limits; got {values['criterion']!r} with "
            f"`{given[0]}` {values[given[0]]!r} and no tolerance. Leave `criterion` out"
            f"{'' if given == ['alpha'] else ', or give a `tolerance` as well'}."
        )
    if params.schedule == "paper" and params.alpha is None:
        raise InputError(
            "`schedule='paper'` needs a number for `alpha`, such as 0.05; the paper has no other "
            "way to specify the number of inducing points."
        )
    return params


def _refuse_selection(params: Parameters, values: Mapping[str, Any]) -> None:
    """Raise an error if a parameter of the selection was given beside fixed inducing points."""
    defaults = {"schedule": "fast", "criterion": "elbo", "candidates": "auto"}
    names = ("tolerance", "alpha", "max_points", "max_predict_us", "n_candidates")
    for name, default in (defaults | dict.fromkeys(names)).items():
        value = getattr(params, name)
        if isinstance(value, Tensor) or value != default:
            raise InputError(
                "`inducing_points` are used as given, and nothing is selected; got "
                f"{name}={values[name]!r} as well. Leave one of them out."
            )


def refuse_other_schedule(
    params: Parameters, *, fast: Mapping[str, Any], paper: Mapping[str, Any]
) -> None:
    """Raise an error if a parameter of the other schedule was given.

    Args:
        fast: parameters that only the fast schedule uses, with their defaults.
        paper: those that only the paper's schedule uses.
    """
    owner, others = ("paper", paper) if params.schedule == "fast" else ("fast", fast)
    current = "the fast" if params.schedule == "fast" else "the paper's"
    for name, default in others.items():
        if (value := getattr(params, name)) != default:
            raise InputError(
                f"`{name}` is for `schedule={owner!r}`; got {value!r} with {current} schedule. "
                "Leave it out."
            )


def refuse_count_of_given(params: Parameters) -> None:
    """Raise an error if `n_candidates` was given together with the candidates themselves."""
    if isinstance(params.candidates, Tensor) and params.n_candidates is not None:
        raise InputError(
            "`candidates` are locations, all of which `schedule='paper'` uses; got "
            f"n_candidates={params.n_candidates} as well. Leave `n_candidates` out."
        )


def positive_number(name: str, value: Any, *, hint: str = "") -> float:
    """Validate a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < inf:
        raise InputError(f"`{name}` must be a positive number; got {value!r}. {hint}".strip())
    return float(value)


def integer(name: str, value: Any, *, least: int = 1) -> int:
    """Validate an integer that is not too small."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise InputError(f"`{name}` must be an integer of at least {least}; got {value!r}.")
    return int(value)


def step_counts(name: str, value: Any, *, phases: Sequence[str]) -> tuple[int, ...]:
    """Validate the numbers of steps of some phases."""
    steps = tuple(value) if isinstance(value, tuple | list) else ()
    if len(steps) != len(phases) or not all(isinstance(n, Integral) and int(n) >= 0 for n in steps):
        raise InputError(
            f"`{name}` must be {len(phases)} integers, the numbers of steps of the phases "
            f"({', '.join(phases)}); got {value!r}."
        )
    return tuple(map(int, steps))


def one_of(*choices: str) -> Constraint:
    """Return the constraint that a parameter is one of some strings."""
    *first, last = map(repr, choices)

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise InputError(f"`{name}` must be {', '.join(first)} or {last}; got {value!r}.")
        return value

    return check


def optional(constraint: Constraint) -> Constraint:
    """Return the constraint that a parameter is None or satisfies another constraint."""
    return lambda name, value: None if value is None else constraint(name, value)


def positive_alpha(name: str, value: Any) -> float:
    """Validate a number for `alpha`."""
    hint = "Larger values select fewer inducing points; 'auto' derives it from `tolerance`."
    return positive_number(name, value, hint=hint)


def alpha_or_auto(name: str, value: Any) -> float | None:
    """Validate `alpha`; None for "auto"."""
    return None if isinstance(value, str) and value == "auto" else positive_alpha(name, value)


def locations(
    name: str, value: Any, *, options: Sequence[str], shape: tuple[str | int, str | int]
) -> str | Tensor:
    """Validate locations `[K D]`, or the name of a way to choose them.

    Args:
        options: the names that are allowed, if any.
        shape: the required shape, a letter where any size of at least one is allowed.
    """
    required = f"[{shape[0]} {shape[1]}]"
    if isinstance(value, str) and options:
        if value not in options:
            raise InputError(
                f"`{name}` must be one of {', '.join(options)} or locations {required}; "
                f"got {value!r}."
            )
        return value
    array = tensor(value, name=name, hint=f"Pass locations {required}.")
    fits = array.dim() == 2 and all(
        size == wanted if isinstance(wanted, int) else size > 0
        for size, wanted in zip(array.shape, shape, strict=True)
    )
    if not fits:
        raise InputError(f"`{name}` must have shape {required}; got shape {list(array.shape)}.")
    if not torch.isfinite(array).all():
        raise InputError(f"`{name}` must be finite; remove the rows with NaN or infinity.")
    return array


def column_or_name(name: str, value: Any) -> int | str:
    """Validate a column by number or name."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"`{name}` must be a column of `X`, by number or name; got {value!r}.")
    return int(value)


def columns_or_names(name: str, value: Any) -> list[int | str]:
    """Validate several columns by number or name."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InputError(f"`{name}` must be a list of columns of `X`; got {value!r}.")
    return [column_or_name(name, each) for each in value]


def column_number(name: str, column: int | str, names: Sequence[str], D: int) -> int:
    """Return the number of a column of `X`, which may be given by name or from the end."""
    if isinstance(column, str) and column not in names:
        raise InputError(
            f"`{name}` must be a column of `X`; got {column!r}. Pass a data frame for columns with "
            "names, or the number of the column."
        )
    number = names.index(column) if isinstance(column, str) else column
    if not -D <= number < D:
        raise InputError(f"`{name}` must be one of the {D} columns of `X`; got {column}.")
    return number % D


def flag(name: str, value: Any) -> bool:
    """Validate a Boolean."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"`{name}` must be True or False; got {value!r}.")
    return bool(value)


def likelihood_from(
    likelihood: str | likelihoods.Likelihood,
    kinds: Mapping[str, Callable[..., likelihoods.Likelihood]] = LIKELIHOODS,
) -> likelihoods.Likelihood:
    """Return a likelihood by name, or the one given, which is not copied.

    Args:
        kinds: the likelihoods that have names.

    >>> likelihood_from("student-t").deg_free.item()
    7.0
    """
    if isinstance(likelihood, likelihoods.SoftmaxLikelihood):
        raise InputError("`likelihood` is a softmax, which is for classes; use a classifier.")
    if isinstance(likelihood, likelihoods.Likelihood):
        return likelihood
    if not isinstance(likelihood, str) or likelihood not in kinds:
        raise InputError(
            f"`likelihood` must be one of {', '.join(kinds)} or a GPyTorch likelihood; "
            f"got {likelihood!r}."
        )
    kind = kinds[likelihood]
    return kind(noise_constraint=GreaterThan(LEAST_NOISE)) if kind in WITH_NOISE else kind()


def regression_likelihood(
    _: str, likelihood: str | likelihoods.Likelihood
) -> likelihoods.Likelihood:
    """Return a likelihood as `likelihood_from` does, or that of "heteroscedastic" noise."""
    if isinstance(likelihood, HeteroscedasticLikelihood):
        raise InputError("`likelihood` must be the string 'heteroscedastic' for such noise.")
    varying = partial(HeteroscedasticLikelihood, torch.ones(1, dtype=torch.float64))
    first = {"gaussian": likelihoods.GaussianLikelihood, HETEROSCEDASTIC: varying}
    return likelihood_from(likelihood, first | LIKELIHOODS)


def _class_weight(name: str, value: Any) -> Mapping[Any, float] | str | None:
    """Validate weights of classes."""
    if value is None or (isinstance(value, str) and value == "balanced"):
        return value
    if not isinstance(value, Mapping):
        raise InputError(
            f"`{name}` must be 'balanced', a dictionary from labels to weights, or None; "
            f"got {value!r}."
        )
    hint = "A row of weight 2 counts as two rows; leave out the rows of a class that has none."
    return {label: positive_number(name, weight, hint=hint) for label, weight in value.items()}


def device_from(name: str, value: Any) -> torch.device:
    """Validate a device of this machine; "auto" is the GPU if there is one."""
    if isinstance(value, str) and value == "auto":
        value = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(value)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        # PyTorch answers an unknown name with a list of all that any machine may have.
        why = str(error).splitlines()[0]
        reason = "." if why.startswith("Expected one of") else f": {why}"
        raise InputError(
            f"`{name}` must be a device of this machine, such as 'cpu' or 'cuda', or 'auto'; got "
            f"{value!r}{reason}"
        ) from error
    return device


def _callbacks(name: str, value: Any) -> tuple[Callback, ...]:
    callbacks: Any = (value,) if callable(value) else value
    if callbacks is not None and not isinstance(callbacks, Sequence):
        raise InputError(
            f"`{name}` must be None, a callable or a sequence of callables; got {value!r}."
        )
    return as_callbacks(callbacks)


def _checkpoint(name: str, value: Any) -> Checkpoint | None:
    if value is None or isinstance(value, Checkpoint):
        return value
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"`{name}` must be a folder or a `Checkpoint`; got {value!r}.")
    return Checkpoint(value)


def _random_state(name: str, value: Any) -> Any:
    try:
        check_random_state(value)
    except ValueError as error:
        raise InputError(
            f"`{name}` must be None, an integer or a numpy RandomState; got {value!r}."
        ) from error
    return value


def _priors(name: str, value: Any) -> str | None:
    if value is not None and value != "weak":
        raise InputError(
            f"`{name}` must be 'weak' or None; got {value!r}. Register priors of your own on a "
            "GPyTorch kernel."
        )
    return value


def _unchanged(name: str, value: Any) -> Any:
    """Accept a parameter whose validity depends on others; the estimator checks it itself."""
    del name
    return value


PARAMETERS: Mapping[str, Constraint] = {
    "alpha": alpha_or_auto,
    "batch_size": optional(integer),
    "callbacks": _callbacks,
    "checkpoint": _checkpoint,
    "class_weight": _class_weight,
    "criterion": one_of("elbo", "predictive"),
    "device": device_from,
    "epochs": _unchanged,
    "hidden_mean": one_of("auto", *HIDDEN_MEANS),
    "kernel": _unchanged,
    "layers": integer,
    "likelihood": lambda _, value: likelihood_from(value),
    "log_target": flag,
    "max_cost": optional(positive_number),
    "max_fit_seconds": optional(positive_number),
    "max_iter": optional(integer),
    "max_points": optional(integer),
    "max_predict_us": optional(positive_number),
    "move_candidates": flag,
    "n_candidates": optional(integer),
    "n_components": integer,
    "noise": one_of("target", "shared", "known"),
    "noise_kernel": _unchanged,
    "precision": one_of("double", "mixed"),
    "predict_samples": integer,
    "priors": _priors,
    "random_state": _random_state,
    "samples": integer,
    "schedule": one_of("fast", "paper"),
    "shallow_alternative": flag,
    "skip_connections": flag,
    "smaller_models": partial(integer, least=0),
    "standardise": flag,
    "tolerance": optional(partial(positive_number, hint="It is in nats per observation.")),
    "warm_start": flag,
    "width": _unchanged,
}
"""The constraints that all estimators share; an estimator adds those that are its own."""


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
