"""The fast schedule cut short, for tests that need some fitted model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from winnowgp import training
from winnowgp.data import Dataset
from winnowgp.estimators import deep_shallow
from winnowgp.models.base import Model
from winnowgp.training import (
    FastSchedule,
    confirmation,
    fast_multi_output,
    fast_sparse,
    laplace,
    lbfgs,
)
from winnowgp.training import hyperparameters as warm_up
from winnowgp.training.cross_validation import CrossValidation
from winnowgp.training.fast_steps import FastSteps

_smaller_models = fast_sparse.smaller_models


@contextmanager
def smaller_sizes(count: int) -> Iterator[None]:
    """In it a fit refits so few models of smaller sizes, which take a third of its time; the
    innermost of several counts."""

    def few(steps: Any, fitted: Any, kept: int) -> Any:
        return _smaller_models(steps, fitted, min(kept, count))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_sparse, "smaller_models", few)
        yield


@contextmanager
def two_folds() -> Iterator[None]:
    """In it two tenths of the rows are held out for the reported densities instead of all in turn,
    which take a tenth to a quarter of the time of a fit of few rows."""
    folds = CrossValidation.of

    def two(data: Dataset, order: Tensor, **_settings: Any) -> CrossValidation:
        return folds(data, order, folds=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CrossValidation, "of", two)
        yield


@contextmanager
def short_fits(*, starts: int = 1, rounds: int = 1, sizes: int = 0) -> Iterator[None]:
    """In it estimators begin with so few starts of each kernel, the model as given or the first of
    those that the data suggest; compare as few of a given number of points; choose and move so few
    times; end each optimisation early; hold out two tenths of the rows instead of all in turn;
    refit models of so few smaller sizes; and mix four posteriors over hyper-parameters, of 16
    draws."""
    every, converged = warm_up.starting_points, lbfgs.maximise
    search, halving = warm_up._Search.optimise, FastSteps.successive_halving

    def few(model: Model, data: Dataset, _count: int | None = None) -> list[Model]:
        return every(model, data, 1 + max(starts, 1))

    def of_few(
        self: Any, given: Sequence[warm_up.Start[Model]], count: int, **settings: Any
    ) -> Any:
        kernels = [start.kernel for start in given]
        within = [kernels[:i].count(kernel) < max(starts, 1) for i, kernel in enumerate(kernels)]
        first = [start for start, kept in zip(given, within, strict=True) if kept]
        return search(self, first, count, **settings)

    def of_fewer(self: Any, given: list[Any], **settings: Any) -> Any:
        return halving(self, given[: 1 + max(starts, 1)], **settings)

    def early(*arguments: Any, stop: lbfgs.Stop, **settings: Any) -> lbfgs.Maximum:
        # Five iterations that gain little, ten times as much as in a whole fit.
        brief = lbfgs.Stop(10 * stop.gain, min(stop.window, 5), stop.iterations)
        return converged(*arguments, stop=brief, **settings)

    with smaller_sizes(sizes), two_folds(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_up, "starting_points", few)
        patch.setattr(warm_up._Search, "optimise", of_few)
        patch.setattr(FastSteps, "successive_halving", of_fewer)
        patch.setattr(lbfgs, "maximise", early)
        patch.setattr(confirmation, "_SMALL_FOLDS", 3)
        patch.setattr(confirmation, "_FOLDS", 3)
        patch.setattr(laplace, "_DRAWS", 16)
        patch.setattr(laplace, "MEMBERS", 4)
        patch.setattr(
            training, "FastSchedule", partial(FastSchedule, rounds=rounds, inclusion_steps=10)
        )
        yield


@contextmanager
def shortest_fits() -> Iterator[None]:
    """In it, in addition, estimators do not compare starts, do not ask held-out rows whether a
    model is better than a constant, and refit no smaller models."""
    with short_fits(starts=0, sizes=0), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastSteps, "successive_halving", lambda _, starts, **_settings: starts[:1])
        patch.setattr(fast_sparse, "confirmed_optima", lambda _, initial, **__: initial)
        yield


@contextmanager
def short_shallow_starts() -> Iterator[None]:
    """In it the shallow GP from which a deep fit of few rows starts, most of the time of a short
    one, is that of a short fit."""
    whole = deep_shallow._fitted_shallow

    def shortly(*arguments: Any) -> Any:
        with shortest_fits():
            return whole(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deep_shallow, "_fitted_shallow", shortly)
        yield


@contextmanager
def short_process_fits() -> Iterator[None]:
    """In it models of several processes have one start, a few iterations of each optimisation, one
    selection, and mix four posteriors over hyper-parameters."""
    every = fast_multi_output.starting_points
    with short_fits(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_multi_output, "starting_points", lambda *given: every(*given)[:1])
        for name in ("_START", "_POOL", "_MOVE"):
            patch.setattr(fast_multi_output, name, 6)
        few = partial(FastSchedule, rounds=1, inclusion_steps=5, iterations=6)
        patch.setattr(training, "FastSchedule", few)
        yield
