"""Functions drawn from a `SparseGPModel`, for BoTorch's `draw_matheron_paths`."""

from typing import Any, final

import torch
from botorch.sampling.pathwise.paths import SamplePath
from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.integrations.botorch.model import SparseGPModel
from winnowgp.models.pathwise import PosteriorPaths


@final
class SparseGPPath(SamplePath):
    """Functions drawn from a model, in the units of its data.

    They have the shapes of BoTorch's own paths: values `[*sample_shape q]` at rows `[q d]`, with an
    axis of outcomes before the last if there are several. Batch axes of the rows are broadcast with
    those of the sample.

    Args:
        model: the model; it must not be conditioned on observations.
        sample_shape: shape of the sample.
    """

    def __init__(self, model: SparseGPModel, sample_shape: torch.Size) -> None:
        super().__init__()
        if model.joint.X.shape[-2] > 0:
            raise InputError(
                "functions cannot be drawn from a model that is conditioned on observations; use "
                "`updated` instead of `condition_on_observations`, or fit the model again."
            )
        self._model, self._sample_shape = model, sample_shape
        self._paths = PosteriorPaths(model.joint.posterior, sample_shape.numel())

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        """Do nothing: the model is not an ensemble."""

    def forward(self, X: Float[Tensor, "*b q d"]) -> Tensor:
        """Return the values of the functions at the rows."""
        model, single = self._model, self._model.num_outputs == 1
        if not single and X.dim() > 2 and X.shape[-3] == 1:
            # BoTorch adds an axis for the outcomes.
            X = X[..., 0, :, :]
        rows, axes = (X - model.x_shift) / model.x_scale, len(self._sample_shape)
        if axes == 0:
            values = self._paths(rows[..., None, :, :])[..., 0, :, :]
        elif axes == 1:
            values = self._paths(rows)
        else:
            batch = torch.broadcast_shapes(rows.shape[:-2], self._sample_shape)
            rows = rows.expand(*batch, *rows.shape[-2:]).flatten(-2 - axes, -3)
            values = self._paths(rows).unflatten(-3, self._sample_shape)
        values = values * model.y_scale + model.y_shift
        return values[..., 0] if single else values.mT


@DrawMatheronPaths.register(SparseGPModel)
def _draw_paths(model: SparseGPModel, *, sample_shape: torch.Size, **samplers: Any) -> SparseGPPath:
    """Draw functions; BoTorch's samplers of the prior and of the update are not needed."""
    del samplers
    return SparseGPPath(model, sample_shape)
