"""Where a deep model starts: layers that together are nearly a shallow one."""

from collections.abc import Callable, Sequence

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.models.deep_layer import DeepLayer

HIDDEN_MEANS = ("identity", "zero")


def deep_layers(
    X: Float[Tensor, "N D"],
    points: Float[Tensor, "K D"],
    *,
    kernel: Callable[[int, int], Kernel],
    widths: Sequence[int],
    connected: bool = False,
    hidden_mean: str = "identity",
    q_scale: float = 1e-3,
) -> list[DeepLayer]:
    """Layers whose hidden functions start as linear maps with almost no doubt about them.

    Args:
        X: inputs, for their principal components.
        points: candidates of the first layer; those of the next are their images.
        kernel: makes the kernel of a layer from its number, 0 for the first, and its number of
            inputs.
        widths: number of outputs of each layer, the last that of the likelihood's functions.
        connected: whether layers after the first also see the input.
        hidden_mean: "identity", or "zero" for hidden functions that are to be pre-trained on the
            targets instead (`training.train_layerwise`).
        q_scale: standard deviation of the whitened q(u) in hidden layers at the start. Started at
            that of the prior instead, the first steps drown what the last layer could learn.
    """
    if not widths or min(widths) < 1:
        raise InputError(f"`widths` must be one positive number a layer; got {list(widths)}.")
    if hidden_mean not in HIDDEN_MEANS:
        raise InputError(
            f"`hidden_mean` must be one of {', '.join(HIDDEN_MEANS)}; got {hidden_mean!r}."
        )
    layers, inputs, Z = [], X, points
    for number, width in enumerate(widths):
        last = number == len(widths) - 1
        slope = linear_map(inputs, width)
        layer = DeepLayer(
            kernel(number, Z.shape[1]),
            Z,
            outputs=width,
            slope=None if last or hidden_mean == "zero" else slope,
            q_scale=1.0 if last else q_scale,
        )
        # Hidden functions have no level of their own to learn: the next layer can take any.
        layer.level.requires_grad_(last)
        layers.append(layer)
        inputs, Z = inputs @ slope, Z @ slope
        if connected:
            inputs, Z = torch.cat([inputs, X], 1), torch.cat([Z, points], 1)
    return layers


def linear_map(X: Float[Tensor, "N D"], width: int) -> Float[Tensor, "D P"]:
    """The identity; padded by zeros to more outputs, principal components for fewer."""
    D = X.shape[1]
    if width < D:
        # Few rows span too few directions: any that are orthogonal to them do for the rest.
        found = torch.linalg.svd(X - X.mean(0), full_matrices=len(X) < width)
        return found.Vh[:width].mT.contiguous()
    return torch.eye(D, width, dtype=X.dtype, device=X.device)
