"""Deep estimators that keep several allocations of inducing points to their layers."""

from abc import ABC
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from winnowgp.data import Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators.base import BaseGP
from winnowgp.models import DeepPosterior
from winnowgp.models.deep_gp import Allocation, deep_predict_us, prediction_cost
from winnowgp.training import FitResult
from winnowgp.training.schedules import SizedDeepModel


@dataclass(kw_only=True, eq=False, repr=False)
class AllocatedEstimator(BaseGP, ABC):
    """The base class of deep estimators: the models that the fit has trained, and `resized`."""

    posterior_: DeepPosterior = field(init=False)
    n_inducing_: tuple[int, ...] = field(init=False)
    allocations_: tuple[Allocation, ...] = field(init=False)
    _sized: tuple[SizedDeepModel, ...] = field(init=False)

    # Estimators that were pickled by earlier versions have no such attribute. Without an annotation
    # it is no field of the dataclass: fitted attributes are not set by `__init__`.
    comparison_ = None

    @property
    def available_sizes_(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of inducing points per layer that `resized` accepts, quickest first."""
        return (*(sized.posterior.M for sized in self._sized), self.n_inducing_)

    def resized(self, points: int | tuple[int, ...]) -> Self:
        """Return a copy of the fitted estimator with fewer inducing points.

        The fit has trained this model already; no training data are needed. Inclusion probabilities
        were not computed: `candidates_` and `inclusion_` are empty, and `alpha_` and `frontiers_`
        have None for each layer.

        Args:
            points: numbers of inducing points per layer, one of `available_sizes_`, or their sum.
        """
        check_is_fitted(self)
        sizes = self.available_sizes_
        wanted = [each for each in sizes if points in (each, sum(each))]
        if not wanted:
            listed = ", ".join(f"{sum(each)} {each}" for each in sizes)
            raise InputError(
                f"`points` must be one of the sizes that the fit kept, {listed}; got {points!r}. "
                "For another size, fit again with a larger tolerance (`--tolerance`)."
            )
        number, resized = sizes.index(wanted[-1]), copy(self)
        if number < len(self._sized):
            resized._set_sized(number)
        return resized

    def scored_allocations(self, X: Any, y: Any) -> tuple[Allocation, ...]:
        """Return `allocations_` with the mean log density of new rows, of the available sizes.

        Args:
            X: inputs `[N D]`.
            y: targets or labels.
        """
        models: list[Any] = [self.resized(sizes) for sizes in self.available_sizes_]
        densities = {m.n_inducing_: float(np.mean(m.log_density(X, y))) for m in models}
        return tuple(
            replace(each, log_density=densities.get(each.sizes)) for each in self.allocations_
        )

    def _set_allocations(
        self, result: FitResult[Any], observations: float, *, samples: int
    ) -> None:
        """Set `allocations_`, and keep the models that are quicker than the selected one.

        Args:
            samples: number of samples of a prediction by the other models.
        """
        trained = [
            (each.posterior.with_samples(samples).cpu(), each.elbo) for each in result.allocations
        ]
        trained.append((self.posterior_, result.elbo))
        trained.sort(key=lambda pair: prediction_cost(pair[0].layers, samples=pair[0].samples))
        best = result.elbo + result.elbo_gap
        self.allocations_ = tuple(
            Allocation(
                posterior.M,
                deep_predict_us(result.model, posterior.M, samples=posterior.samples),
                elbo,
                (best - elbo) / observations,
            )
            for posterior, elbo in trained
        )
        own = [posterior is self.posterior_ for posterior, _ in trained].index(True)
        self._sized = tuple(SizedDeepModel(*pair) for pair in trained[:own])

    def _set_posterior(self, posterior: DeepPosterior) -> None:
        self.posterior_, self.n_inducing_ = posterior, posterior.M
        points = [layer.candidates.detach().clone() for layer in posterior.layers]
        self.inducing_points_ = layer_locations(points, self._x_scaler)

    def _set_sized(self, number: int) -> None:
        """Set the attributes to those of a smaller model."""
        sized = self._sized[number]
        self.comparison_ = None
        self._set_posterior(sized.posterior)
        (gap,) = {each.elbo_gap for each in self.allocations_ if each.sizes == self.n_inducing_}
        self.elbo_, self.elbo_gap_ = sized.elbo, gap
        self._sized = self._sized[:number]
        self.candidates_ = tuple(points[:0] for points in self.inducing_points_)
        self.inclusion_ = tuple(np.zeros(0) for _ in self.n_inducing_)
        self.alpha_ = self.frontiers_ = (None,) * len(self.n_inducing_)


def layer_locations(
    layers: Sequence[Tensor], x_scaler: Standardiser
) -> tuple[NDArray[np.float64], ...]:
    """Return the locations of each layer's points; only those of the first layer have units."""
    first, *others = (points.cpu() for points in layers)
    return (x_scaler.inverse(first).numpy(), *(points.numpy() for points in others))
