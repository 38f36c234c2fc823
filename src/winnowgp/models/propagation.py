"""Samples that travel through the layers of a deep Gaussian process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.models.deep_layer import DeepLayer, LayerPoints
from winnowgp.models.observations import Prediction

# A variance of zero has a square root without a derivative.
_LEAST_VARIANCE = 1e-20


@dataclass(frozen=True, slots=True)
class Propagation:
    """What each layer saw and what it said; leading axes are subsets, then samples.

    The first layer sees no samples, so its axis of samples has length one.
    """

    inputs: list[Tensor]
    """Of each layer, `[.. T N D]`."""
    outputs: list[Prediction]
    """q of each layer's functions given its inputs, `[.. T N P]`."""

    @property
    def last(self) -> Prediction:
        """q of the functions that the likelihood sees, one Gaussian for each sample."""
        return self.outputs[-1]


def layer_inputs(
    hidden: Float[Tensor, "*S N H"], X: Float[Tensor, "N D"], *, connected: bool
) -> Float[Tensor, "*S N I"]:
    """What a layer after the first sees: the layer before, and the observed input if connected."""
    if not connected:
        return hidden
    return torch.cat([hidden, X.expand(*hidden.shape[:-1], X.shape[-1])], dim=-1)


def propagated(
    layers: Sequence[DeepLayer],
    points: Sequence[LayerPoints],
    X: Float[Tensor, "N D"],
    *,
    noise: Sequence[Tensor],
    connected: bool,
) -> Propagation:
    """T samples of every layer but the last, and q of the last layer's functions given them.

    Each row travels alone: its marginal in a layer depends on its own place in the layer before and
    on nothing else (Salimbeni & Deisenroth 2017), so a sample is h = mean + sd · ε row by row.

    Args:
        points: of each layer, all with the same leading axes S.
        noise: ε of each layer but the last, `[T N H]`, or `[T 1 H]` for the same in every row.
    """
    inputs, outputs = X[None], []
    trail = [inputs]
    for number, (layer, used) in enumerate(zip(layers, points, strict=True)):
        found = layer.marginals(inputs, used.over_samples())
        outputs.append(found)
        if number < len(layers) - 1:
            sd = found.variance.clamp_min(_LEAST_VARIANCE).sqrt()
            hidden = found.mean + sd * noise[number]
            inputs = layer_inputs(hidden, X, connected=connected)
            trail.append(inputs)
    return Propagation(trail, outputs)
