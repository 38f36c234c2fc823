"""The base class of all estimators: parameters, training, prediction in chunks, docstrings."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from inspect import cleandoc, signature
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

import numpy as np
import torch
from gpytorch.kernels import Kernel
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from winnowgp.data import Dataset, MaskedMatrix, Source, Standardiser
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.data.scaling import StandardisedSource
from winnowgp.estimators import validation
from winnowgp.estimators.rows import dates_as_days, explained_inputs, refuse_source, tensor
from winnowgp.io import save
from winnowgp.models import DeepPosterior, MixturePosterior, MultiOutputPosterior, Posterior
from winnowgp.models.base import check_kernel
from winnowgp.models.fidelity_posterior import FidelityModel
from winnowgp.models.heteroscedastic import HeteroscedasticPosterior
from winnowgp.models.observations import Prediction
from winnowgp.selection import Frontier
from winnowgp.training import (
    FitResult,
    FixedAlpha,
    Goal,
    MaxCost,
    MaxPoints,
    MaxPredictTime,
    Schedule,
    Tolerance,
    fit,
)
from winnowgp.training.callbacks import Callbacks
from winnowgp.training.checkpoint import open_checkpoint
from winnowgp.training.fingerprint import row_identity
from winnowgp.training.schedules import warn_not_sharded

ROWS = 16_384
"""Rows predicted at once: bounds the memory at this many times the number of inducing points."""


NUMBERS = 2**24
"""Largest array while a deep GP predicts: rows × samples × outputs × inducing points of a layer."""

AnyPosterior: TypeAlias = (
    Posterior
    | HeteroscedasticPosterior
    | MixturePosterior
    | MultiOutputPosterior
    | FidelityModel
    | DeepPosterior
)
"""A posterior of observed inputs."""


@dataclass(kw_only=True, eq=False, repr=False)
class BaseGP(BaseEstimator, ABC):
    """The parameters and methods that all estimators share.

    Estimators are dataclasses: a field is a constructor argument with its default, and the
    attribute that stores it. Each class documents the arguments and attributes that it declares;
    `documented` joins them in the docstring of an estimator. `winnowgp.estimators.validation`
    validates the arguments. The base that sets defaults (`SparseEstimator`, `DeepEstimator`) comes
    first among the bases of an estimator: its fields take precedence.

    A fit calls, in this order: `_validate`, which needs no data; `_check_columns` and
    `_check_targets`; `_fit`, which standardises the inputs; `_train`, which opens the checkpoint,
    with `_initial_model`, `_training_schedule` and `_after_training`; and `_set_fitted`. So an
    error in the arguments neither claims a checkpoint nor changes a fitted estimator. Hooks call
    `super()`: those of `SparseGPRegressor` go through `StreamingRegressor`, `StreamingEstimator`,
    `SparseEstimator`, `NumericTargets` and this class.

    Args:
        random_state: seed or RandomState; the same seed gives the same fit.
        device: device of the fit: "cpu", "cuda", or "auto" for a GPU if there is one. Predictions
            are computed on the CPU; `predicting_on` moves those of regressors and classifiers.
        callbacks: a callable or a sequence of callables, called with the
            `winnowgp.training.Progress` of every step.
        checkpoint: a folder or a `Checkpoint` in which the progress of the fit is saved. A fit that
            was interrupted continues from it, and gives the same result.

    Attributes:
        posterior_: the posterior, for standardised inputs and targets.
    """

    kernel: Any = "rbf"
    alpha: Any = "auto"
    tolerance: float | None = None
    n_candidates: Any = None
    schedule: str = "fast"
    batch_size: int | str | None = None
    random_state: int | np.random.RandomState | None = None
    device: str = "cpu"
    callbacks: Callbacks = None
    checkpoint: validation.CheckpointLike | None = None

    _constraints: ClassVar[Mapping[str, validation.Constraint]] = validation.PARAMETERS
    # Set by a fit; not arguments.
    n_features_in_: int = field(init=False)
    feature_names_in_: Any = field(init=False)
    _x_scaler: Standardiser = field(init=False)
    posterior_: Any = field(init=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the fitted estimator to a file that `winnowgp.load` reads.

        The file grows with the number of inducing points and not with the number of rows, except
        that the file of a `GPLVM` also holds the latent positions of the training rows.
        """
        return save(self, path)

    @abstractmethod
    def _check_combination(self, params: validation.Parameters) -> None:
        """Check parameters that depend on each other, and convert them in place."""

    @abstractmethod
    def _check_columns(self, params: validation.Parameters, D: int) -> None:
        """Check parameters that depend on the number of columns, and convert them in place."""

    def _check_targets(self, params: validation.Parameters, data: Source) -> None:
        """Check parameters that depend on the targets; `params.likelihood` is known by then."""

    @abstractmethod
    def _initial_model(self, data: Any, params: validation.Parameters) -> Any:
        """Return the model that is trained, on the device of the data."""

    @abstractmethod
    def _training_schedule(self, model: Any, data: Any, params: validation.Parameters) -> Schedule:
        """Return the schedule that the parameters specify."""

    @abstractmethod
    def _set_fitted(self, result: FitResult[Any], observations: float) -> None:
        """Set the fitted attributes that do not concern the targets."""

    def _warn_of_limits(self) -> None:
        """Warn if a limit affected the fit; called last, when the estimator is fitted."""

    def _validate(self) -> validation.Parameters:
        """Return the validated parameters; this needs no data."""
        params = validation.validated(self._constraints, self.get_params(deep=False))
        self._check_combination(params)
        return params

    def _fit(self, rows: Source, params: validation.Parameters) -> None:
        """Standardise the inputs of rows whose targets are ready for the model; train a model.

        Args:
            rows: rows in the user's units, in memory and merged, so that repeating a row and
                weighting it give the same fit; or a source that is standardised already.
        """
        if isinstance(rows, StandardisedSource):
            # Kernels and candidates are on the CPU until the model is built.
            x_scaler, data = rows.x_scaler.to(torch.device("cpu")), rows.materialised()
        else:
            dataset = rows.require_dataset("this fit")
            x_scaler = self._input_scaler(dataset, params)
            data = rows.with_rows(replace(dataset, X=x_scaler.forward(dataset.X)))
        params.x_scaler = x_scaler
        identity = {}
        if params.checkpoint is not None or rows.process_group.world_size > 1:
            names = {
                "inputs": "X",
                "targets": "y",
                "weights": "sample_weight",
                "noise": "noise_variance",
            }
            values = row_identity(rows, saved=params.checkpoint is not None)
            identity = {names.get(name, name): value for name, value in values.items()}
        result = self._train(data, params, identity=identity, process_group=rows.process_group)
        self._x_scaler = cpu_scaler(x_scaler)
        self._set_fitted(result, data.observations)

    def _input_scaler(self, rows: Dataset, params: validation.Parameters) -> Standardiser:
        """Return the scaler of the inputs."""
        return Standardiser.of(rows.X, weights=rows.weights)

    def _train(
        self,
        data: Any,
        params: validation.Parameters,
        *,
        identity: Mapping[str, Any],
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> FitResult[Any]:
        """Open the checkpoint, draw the seed, and train an initial model on standardised data.

        Args:
            identity: values that identify these data in a checkpoint.
        """
        if process_group.world_size == 1:
            warn_not_sharded(
                ProcessGroup.from_environment(),
                "rows are shared as a source, `fit(shard(source))`, for regression with Gaussian "
                "noise and for minibatches of classes and of layers",
            )
        parameters = self.get_params(deep=False)
        del parameters["callbacks"], parameters["checkpoint"]
        if params.earlier is not None:
            identity = {**identity, "earlier": params.earlier}
        params.log = open_checkpoint(
            params.checkpoint,
            callbacks=params.callbacks,
            process_group=process_group,
            **identity,
            estimator=type(self).__name__,
            **parameters,
        )
        # Without a `random_state`, a resumed fit continues with the seed that it began with.
        drawn = int(check_random_state(self.random_state).randint(2**31))
        seed = params.log.once(lambda: drawn)
        params.generator = torch.Generator(params.device).manual_seed(seed)
        data = _moved(data, params.device)
        model = self._initial_model(data, params)
        result = fit(
            model,
            data,
            schedule=self._training_schedule(model, data, params),
            callbacks=params.callbacks,
            checkpoint=params.log,
            generator=params.generator,
        )
        result = self._after_training(result, data, params)
        params.log.finish()
        return result

    def _after_training(
        self, result: FitResult[Any], data: Any, params: validation.Parameters
    ) -> FitResult[Any]:
        """Return the result of a fit, to which an estimator may add."""
        return result

    def predicting_on(self, device: str) -> Self:
        """Return a copy of the fitted estimator that computes its predictions on a device.

        Fits end on the CPU, whatever their device. A GPU pays off for thousands of inducing
        points, or for many rows.

        Args:
            device: "cpu" or "cuda", or "auto" for a GPU if there is one.
        """
        check_is_fitted(self)
        moved = copy(self)
        moved.posterior_ = deepcopy(self.posterior_).to(validation.device_from("device", device))
        return moved

    def _inputs(self, X: Any) -> Tensor:
        """Validate inputs for a prediction; return them standardised, on the posterior's device."""
        check_is_fitted(self)
        refuse_source(X)
        X = dates_as_days(X)
        with explained_inputs(X):
            X = validate_data(self, X, dtype=np.float64, reset=False)
        return self._x_scaler.forward(tensor(X)).to(posterior_device(self.posterior_))

    @torch.no_grad()
    def _predict_latent(
        self,
        inputs: Tensor,
        predict: Callable[..., Prediction],
        *,
        observed: bool,
        noise: Tensor | None = None,
    ) -> Prediction:
        """Return mean and variance of each row, for standardised inputs and targets.

        Args:
            predict: method of the posterior.
            observed: whether to predict a new observation, noise included.
            noise: known noise variances of the observations.
        """
        chunks = chunks_with_noise(self.posterior_, inputs, noise)
        predictions = [predict(chunk, observed=observed, **known) for chunk, known in chunks]
        return Prediction(
            torch.cat([prediction.mean for prediction in predictions]).cpu(),
            torch.cat([prediction.variance for prediction in predictions]).cpu(),
        )

    @torch.no_grad()
    def _log_density(
        self, inputs: Tensor, targets: Tensor, *, noise: Tensor | None = None
    ) -> Tensor:
        """Return the log density of each standardised target, in nats."""
        targets_of = targets.to(inputs.device).split(rows_at_once(self.posterior_))
        chunks = chunks_with_noise(self.posterior_, inputs, noise)
        densities = [
            self.posterior_.log_density(x, y, **known)
            for (x, known), y in zip(chunks, targets_of, strict=True)
        ]
        return torch.cat(densities).cpu()


def most_points(params: validation.Parameters) -> MaxPoints | None:
    """Return the limit that `max_points` sets, if it does."""
    return None if params.max_points is None else MaxPoints(params.max_points)


def goal_within(
    params: validation.Parameters,
    limit: MaxPoints | MaxCost | MaxPredictTime | None,
) -> Goal:
    """Return the goal that `alpha` or `tolerance` sets within a limit, or the limit itself."""
    if params.alpha is not None:
        return FixedAlpha(params.alpha)
    if params.tolerance is not None:
        return Tolerance(params.tolerance, limit=limit)
    assert limit is not None
    return limit


def total_points(estimator: Any) -> int:
    """Return the number of inducing points, of all layers together for a deep estimator."""
    points = estimator.n_inducing_
    return sum(points) if isinstance(points, tuple) else points


def first_points(estimator: Any) -> NDArray[np.float64]:
    """Return the locations of the inducing points among the inputs; those of the first layer."""
    points = estimator.inducing_points_
    return points[0] if isinstance(points, tuple) else points


def rows_at_once(posterior: AnyPosterior) -> int:
    """Return the number of rows that are predicted at once, as memory allows."""
    if not isinstance(posterior, DeepPosterior):
        return ROWS
    hidden = sum(layer.P for layer in posterior.layers[:-1])
    samples = max(posterior.samples, 4 * hidden) if posterior.samples else 1
    return max(1, NUMBERS // (samples * max(layer.P * layer.K for layer in posterior.layers)))


def chunks_with_noise(
    posterior: AnyPosterior,
    inputs: Tensor,
    noise: Tensor | None,
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return chunks of rows, each with its known noise as a keyword argument if there is any."""
    size = rows_at_once(posterior)
    chunks = inputs.split(size)
    if noise is None:
        return [(rows, {}) for rows in chunks]
    return [(x, {"noise": s}) for x, s in zip(chunks, noise.split(size), strict=True)]


def posterior_device(posterior: AnyPosterior) -> torch.device:
    """Return the device on which a posterior predicts."""
    if not isinstance(posterior, DeepPosterior):
        return posterior.Z.device
    return posterior.layers[0].candidates.device


def cpu_scaler(scaler: Standardiser) -> Standardiser:
    """Return a scaler on the CPU in double precision, as predictions need it."""
    return Standardiser(scaler.shift.cpu().double(), scaler.scale.cpu().double())


def cpu_frontier(frontier: Frontier | None) -> Frontier | None:
    """Return a frontier on the CPU."""
    if frontier is None:
        return None
    return Frontier(frontier.bounds.cpu(), frontier.masks.cpu(), frontier.N)


def check_kernel_columns(kernel: Kernel, D: int, *, name: str = "kernel") -> None:
    """Raise an error that names the argument if a kernel cannot be evaluated on D columns."""
    check_kernel(kernel, torch.zeros(0, D), name=name)


def _moved(data: Any, device: torch.device) -> Any:
    if isinstance(data, MaskedMatrix):
        return MaskedMatrix(data.Y.to(device), data.observed.to(device))
    return data.to(device)


Class = TypeVar("Class", bound=type)

_SECTION = re.compile(r"^(Args|Attributes):\n((?:    .*\n|\n(?=    ))+)\n*", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+): (?:.*\n(?:     .*\n)*)", re.MULTILINE)
_EXAMPLES = re.compile(r"^>>> ", re.MULTILINE)


def documented(cls: Class) -> Class:
    """Complete the docstring of an estimator with those of its base classes.

    Each class documents the arguments and fitted attributes that it declares itself. Those of its
    bases follow, unless the class describes them anew. Arguments are listed in the order of the
    signature.

    >>> class Base:
    ...     '''A base.
    ...
    ...     Args:
    ...         a: a number.
    ...     '''
    >>> @documented
    ... class Derived(Base):
    ...     '''A derived class.
    ...
    ...     Args:
    ...         b: another number.
    ...     '''
    ...     def __init__(self, a, b): ...
    >>> print(Derived.__doc__)
    A derived class.
    <BLANKLINE>
    Args:
        a: a number.
        b: another number.
    """
    description, examples = _SECTION.sub("", _own_docstring(cls)), ""
    if begin := _EXAMPLES.search(description):
        description, examples = description[: begin.start()], description[begin.start() :]
    blocks = [description.strip()]
    for title in ("Args", "Attributes"):
        entries: dict[str, str] = {}
        for base in cls.__mro__:
            for name, text in _entries(base, title).items():
                entries.setdefault(name, text)
        order = list(signature(cls).parameters) if title == "Args" else []
        entries = {name: entries[name] for name in order if name in entries} | entries
        if entries:
            blocks.append(f"{title}:\n{''.join(entries.values())}".rstrip())
    cls.__doc__ = "\n\n".join([*blocks, *([examples.strip()] if examples else [])])
    return cls


def _own_docstring(cls: type[Any]) -> str:
    return cleandoc(vars(cls).get("__doc__") or "") + "\n"


def _entries(cls: type[Any], title: str) -> dict[str, str]:
    """Return the entries of a section in a class's own docstring, by name."""
    return {
        entry.group(1): entry.group()
        for section in _SECTION.finditer(_own_docstring(cls))
        if section.group(1) == title
        for entry in _ENTRY.finditer(section.group(2))
    }
