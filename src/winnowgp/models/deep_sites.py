"""Each layer of a deep model as Gaussian regression on what the others leave it to do.

Given samples of its inputs, a layer's functions meet the likelihood through the layers above. To
first order the bound is then a sum over rows of λ f − ½ w f² (`bounds.sites`), and everything that
regression can do — the best q(u) in closed form, exact flips of every candidate, backward
elimination — can be done for one layer of a deep model while the others are held.

In the last layer the sites are those of the likelihood, exact where it is Gaussian. In a hidden one
λ − w μ is the exact gradient of the bound in the mean of each row, and w is Gauss and Newton's:
w_h = Σ_o (∂f_o/∂h)² w_o, never negative, where the exact curvature is noisy and has either sign.
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
from winnowgp.linalg import definite_cholesky
from winnowgp.models.deep_gp import DeepGP
from winnowgp.models.deep_layer import DeepLayer
from winnowgp.models.sgpr import chunked_kernel
from winnowgp.selection import SubsetStatistics
from winnowgp.selection.statistics import subset_statistics


@final
@dataclass(frozen=True, slots=True)
class LayerSites:
    """One layer's inputs, all samples in one list of rows, and the sites of its functions there."""

    inputs: Float[Tensor, "R D"]
    sites: Sites
    """Of the functions less their prior mean, weighted so that all samples count once."""

    @torch.no_grad()
    def sums(
        self, layer: DeepLayer, *, process_group: ProcessGroup = SINGLE_PROCESS
    ) -> tuple[WhitenedChunks, SiteSums]:
        """What the sites add up to for a layer's candidates, O(P R K²).

        Args:
            ranks: processes with sites of their own, all of which are added.
        """
        rows = Dataset(self.inputs, self.inputs[:, :0])
        blocks = RowBlocks.of(rows, points=layer.K, process_group=process_group)
        kernel, _ = chunked_kernel(layer.kernel, layer.candidates, blocks)
        chunks = WhitenedChunks.for_values(kernel, blocks)
        return chunks, site_sums(chunks, self.sites)

    def statistics(self, layer: DeepLayer, *, bound: float, N: int | float) -> SubsetStatistics:
        """What any subset of a layer's candidates is worth, the other layers held.

        On the CPU: choosing is thousands of steps on small matrices, one after another.

        Args:
            bound: of all candidates, in nats; values are relative to it.
            N: observations.
        """
        chunks, found = self.sums(layer)
        sums = SiteSums(found.roots.cpu(), found.D.cpu(), found.open.cpu())
        constant = bound - sums.evidence().item()
        return subset_statistics(chunks.L.cpu(), *site_moments(sums, constant=constant, N=N))

    @torch.no_grad()
    def natural_step(
        self, layer: DeepLayer, *, rate: float, process_group: ProcessGroup = SINGLE_PROCESS
    ) -> tuple[Float[Tensor, "K P"], Float[Tensor, "P K K"]]:
        """Mean and factor of a layer's q(v) after a natural-gradient step; the best at rate one.

        B ← (1 − rate) Λ + rate B,  D ← (1 − rate) Λ m + rate D,  with Λ the precision of q.
        """
        _, sums = self.sums(layer, process_group=process_group)
        if rate < 1:
            sums = _towards(layer, sums, rate)
        q_mean, factor = sums.posterior()
        # The factor root⁻ᵀ is upper-triangular; parameters are lower-triangular.
        return q_mean, torch.linalg.qr(factor.mT).R.mT

    def improved(self, layer: DeepLayer, *, rate: float = 1.0) -> DeepLayer:
        """The layer after such a step; with the q(u) that is best for these sites at rate one."""
        return layer.with_q(layer.candidates, *self.natural_step(layer, rate=rate))


def deep_sites(
    model: DeepGP, data: Dataset, *, total: int | None = None, eps: Sequence[Tensor]
) -> list[LayerSites]:
    """The sites of every layer for given ε of the hidden ones.

    One pass up, one down for the gradient, and one down for each function of the last layer.
    """
    with torch.enable_grad():
        # A copy: sites are gradients in the means, also of layers whose parameters are frozen.
        found = deepcopy(model).requires_grad_().evaluated(data, total=total, eps=eps)
        outputs, inputs = found.passed.outputs, found.passed.inputs
        means = [output.mean for output in outputs]
        *slopes, curvature = torch.autograd.grad(
            found.fit, [*means, outputs[-1].variance], retain_graph=True
        )
        precision = (-2 * curvature).clamp_min(0)
        curvatures = _gauss_newton(model, means[-1], inputs[1:], precision)
    pairs = zip(model.layers, inputs, means, slopes, [*curvatures, precision], strict=True)
    return [layer_sites(*parts) for parts in pairs]


def _gauss_newton(
    model: DeepGP, top: Tensor, inputs: list[Tensor], precision: Tensor
) -> list[Tensor]:
    """w of every hidden layer's outputs; the first layer's are the sum over all samples."""
    if not inputs:
        return []
    totals: list[Tensor] = [torch.zeros(())] * len(inputs)
    for o in range(top.shape[-1]):
        slopes = torch.autograd.grad(top[..., o].sum(), inputs, retain_graph=True)
        for number, (layer, slope) in enumerate(zip(model.layers, slopes, strict=False)):
            J = slope[..., : layer.P]
            totals[number] = totals[number].to(J) + J.square() * precision[..., o : o + 1]
    first, *others = totals
    return [first.sum(0, keepdim=True), *others]


def layer_sites(
    layer: DeepLayer,
    inputs: Float[Tensor, "*T N D"],
    mean: Float[Tensor, "*T N P"],
    slope: Float[Tensor, "*T N P"],
    precision: Float[Tensor, "*T N P"],
) -> LayerSites:
    """Sites from the gradient of the bound in a layer's means, and their precisions."""
    rows = inputs.detach().flatten(0, -2)
    centred = mean.detach().flatten(0, -2) - layer.centre(rows).detach()
    weights = precision.detach().flatten(0, -2)
    return LayerSites(rows, Sites(slope.flatten(0, -2) + weights * centred, weights))


def _towards(layer: DeepLayer, sums: SiteSums, rate: float) -> SiteSums:
    eye = torch.eye(layer.K, dtype=sums.D.dtype, device=sums.D.device)
    inverse = torch.linalg.solve_triangular(layer.q_factor.tril(), eye, upper=False)
    old = inverse.mT @ inverse
    new = sums.roots @ sums.roots.mT
    linear = torch.einsum("pij,jp->ip", old, layer.q_mean)
    roots = definite_cholesky(torch.lerp(old, new, rate))
    return SiteSums(roots, torch.lerp(linear, sums.D, rate), sums.open)
