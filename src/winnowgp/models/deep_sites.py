"""Gaussian sites of each layer of a deep model, with the other layers held fixed.

Given samples of its inputs, a layer's functions enter the likelihood through the layers above. To
first order the bound is then a sum over rows of λ f − ½ w f² (`bounds.sites`), and all methods of
Gaussian regression (the optimal q(u) in closed form, exact marginal gains, backward elimination)
apply to one layer of a deep model at a time.

In the last layer the sites are those of the likelihood, exact if it is Gaussian. In a hidden layer
λ − w μ is the exact gradient of the bound with respect to the mean of each row, and w is the
Gauss-Newton precision (`site_inference.gauss_newton_precisions`).
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.row_blocks import RowBlocks, WhitenedChunks
from winnowgp.bounds.sites import Sites, SiteSums, site_moments, site_sums
from winnowgp.data import Dataset
from winnowgp.data.distributed import SINGLE_PROCESS, ProcessGroup
from winnowgp.linalg import definite_cholesky, solve_lower
from winnowgp.models.chunked_kernels import chunked_kernel
from winnowgp.models.deep_gp import DeepGP
from winnowgp.models.deep_layer import DeepLayer, layer_covariance
from winnowgp.models.site_inference import gauss_newton_precisions
from winnowgp.selection import SubsetStatistics
from winnowgp.selection.objective import subset_statistics
from winnowgp.typing import Scalar


@final
@dataclass(frozen=True, slots=True)
class LayerSites:
    """Inputs of one layer, with all samples as rows, and the sites of its functions at them."""

    inputs: Float[Tensor, "R D"]
    sites: Sites
    """Sites of the functions less their prior mean, weighted so that all samples count once."""

    @torch.no_grad()
    def sums(self, layer: DeepLayer) -> tuple[WhitenedChunks, SiteSums]:
        """Return the sums of the sites for a layer's candidates, O(P R K²)."""
        rows = Dataset(self.inputs, self.inputs[:, :0])
        blocks = RowBlocks.of(rows, points=layer.K)
        kernel, _ = chunked_kernel(layer.kernel, layer.candidates, blocks)
        chunks = WhitenedChunks.for_values(kernel, blocks)
        return chunks, site_sums(chunks, self.sites)

    def statistics(self, layer: DeepLayer, *, bound: float, N: int | float) -> SubsetStatistics:
        """Return statistics that score subsets of a layer's candidates, the other layers fixed.

        They are on the CPU: selection takes thousands of sequential steps on small matrices.

        Args:
            bound: bound of all candidates, in nats, which anchors the values.
            N: number of observations.
        """
        chunks, on_device = self.sums(layer)
        sums = SiteSums(on_device.roots.cpu(), on_device.D.cpu(), on_device.open.cpu())
        constant = bound - sums.evidence().item()
        return subset_statistics(chunks.L.cpu(), *site_moments(sums, constant=constant, N=N))

    @torch.no_grad()
    def natural_step(
        self,
        layer: DeepLayer,
        *,
        rate: float | Scalar,
        whitened: Float[Tensor, "K R"] | None = None,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> tuple[Float[Tensor, "K P"], Float[Tensor, "P K K"]]:
        """Return mean and factor of a layer's q(v) after a natural-gradient step.

        At rate one it is the optimal q(v) for these sites.

        B ← (1 − rate) Λ + rate B,  D ← (1 − rate) Λ m + rate D,  with Λ the precision of q.

        O(P R K²), without the chunks of `sums`: the rows are those of a minibatch.

        Args:
            whitened: V = L⁻¹ K_uf, if it is known.

        Raises:
            NotPositiveDefiniteError: a precision cannot be factorised.
        """
        V = whitened
        if V is None:
            K = layer_covariance(layer.kernel, layer.candidates, self.inputs)
            V = solve_lower(layer.points().L, K)
        C = torch.stack([(V * w) @ V.mT for w in self.sites.precision.mT])
        C, D = process_group.all_reduce(C, V @ self.sites.linear)
        B = rate * C
        B.diagonal(dim1=-2, dim2=-1).add_(rate)
        D = rate * D
        if isinstance(rate, Tensor) or rate < 1:
            inverse = _inverse(layer.q_factor.tril())
            old = inverse.mT @ inverse
            B += (1 - rate) * old
            D += (1 - rate) * torch.einsum("pij,jp->ip", old, layer.q_mean)
        return _whitened_q(B, D)

    def improved(self, layer: DeepLayer, *, rate: float = 1.0) -> DeepLayer:
        """Return the layer after a natural-gradient step of its q(u)."""
        return layer.with_q(layer.candidates, *self.natural_step(layer, rate=rate))


def deep_sites(
    model: DeepGP, data: Dataset, *, total: int | None = None, eps: Sequence[Tensor]
) -> list[LayerSites]:
    """Return the sites of every layer for given ε of the hidden layers.

    The cost is one forward pass, one backward pass for the gradient, and one backward pass for each
    function of the last layer.
    """
    with torch.enable_grad():
        # A copy: sites are gradients in the means, also of layers whose parameters are frozen.
        evaluated = deepcopy(model).requires_grad_().evaluated(data, total=total, eps=eps)
        outputs, inputs = evaluated.passed.outputs, evaluated.passed.inputs
        means = [output.mean for output in outputs]
        *slopes, curvature = torch.autograd.grad(
            evaluated.fit, [*means, outputs[-1].variance], retain_graph=True
        )
        precision = (-2 * curvature).clamp_min(0)
        hidden = hidden_precisions(model, means[-1], inputs[1:], precision)
    layers = zip(model.layers, inputs, means, slopes, [*hidden, precision], strict=True)
    return [layer_sites(*layer) for layer in layers]


def hidden_precisions(
    model: DeepGP, top: Tensor, inputs: list[Tensor], precision: Tensor
) -> list[Tensor]:
    """Return w of every hidden layer's outputs; those of the first layer sum over samples."""
    if not inputs:
        return []
    totals = gauss_newton_precisions(top.unbind(-1), precision[..., None].unbind(-2), inputs)
    # A later layer's inputs are the outputs of the layer below, then the skip connections.
    w = [total[..., : layer.P] for total, layer in zip(totals, model.layers, strict=False)]
    return [w[0].sum(0, keepdim=True), *w[1:]]


def layer_sites(
    layer: DeepLayer,
    inputs: Float[Tensor, "*T N D"],
    mean: Float[Tensor, "*T N P"],
    slope: Float[Tensor, "*T N P"],
    precision: Float[Tensor, "*T N P"],
) -> LayerSites:
    """Return sites from the gradient of the bound in a layer's means, and their precisions."""
    rows = inputs.detach().flatten(0, -2)
    centred = mean.detach().flatten(0, -2) - layer.centre(rows).detach()
    weights = precision.detach().flatten(0, -2)
    return LayerSites(rows, Sites(slope.flatten(0, -2) + weights * centred, weights))


def _whitened_q(
    B: Float[Tensor, "P K K"], D: Float[Tensor, "K P"]
) -> tuple[Float[Tensor, "K P"], Float[Tensor, "P K K"]]:
    """Return B⁻¹ D and the lower-triangular F with B⁻¹ = F Fᵀ, for every output.

    The Cholesky factor of the reversed B, reversed again, is an upper-triangular U with B = U Uᵀ,
    and F = U⁻ᵀ. On a GPU this is much faster than the QR decomposition of an upper-triangular root.
    """
    F = _inverse(definite_cholesky(B.flip(-2, -1))).flip(-2, -1).mT
    return (F @ (F.mT @ D.mT[..., None]))[..., 0].mT, F


def _inverse(L: Float[Tensor, "P K K"]) -> Float[Tensor, "P K K"]:
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return solve_lower(L, eye.expand_as(L))
