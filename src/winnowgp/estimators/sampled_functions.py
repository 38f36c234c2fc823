"""Functions drawn from the posterior of a regressor, in the units of its data."""

from copy import copy
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from winnowgp.models import PosteriorPaths
from winnowgp.models.mixture import MixturePaths


@final
class SampledFunctions:
    """Functions drawn by `SparseGPRegressor.sample_functions`, in the units of the data."""

    def __init__(self, regressor: Any, paths: PosteriorPaths | MixturePaths) -> None:
        # Scalers and the columns of `X` are those of this fit, also after another one.
        self._regressor, self._paths = copy(regressor), paths

    def __call__(self, X: Any) -> Any:
        """Return the values of the functions at rows `[N D]`, `[N n_samples]` or `[N P n_samples]`.

        The result is a tensor, differentiable in the rows, if `X` is one.
        """
        fitted = self._regressor
        if not isinstance(X, Tensor):
            with torch.no_grad():
                values = self._paths(fitted._inputs(X)).cpu()
            return np.moveaxis(fitted._y_scaler.values(values), 0, -1)
        values = self._paths(fitted._x_scaler.forward(X))
        values = fitted._y_scaler.columns.inverse(values).movedim(0, -1)
        return values[:, 0] if fitted._y_scaler.single else values
