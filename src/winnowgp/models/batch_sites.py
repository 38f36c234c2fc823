"""Gaussian sites of a batch, given what a stream remembers of earlier rows.

For a likelihood that is not Gaussian, the optimal q(u) of a batch and a memory is that of the
batch's rows, which have sites to be inferred, and of the R remembered combinations of each latent
function, which are observed with Gaussian noise of variance one (`bounds.streaming`).
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.collapsed import Moments
from winnowgp.bounds.row_blocks import RowBlocks, WhitenedChunks
from winnowgp.bounds.sites import Sites, site_moments
from winnowgp.bounds.streaming import Memory
from winnowgp.data import Dataset
from winnowgp.models.chunked_kernels import chunked_kernel
from winnowgp.models.kernels import prior_mean
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.site_inference import SiteInference, infer_sites
from winnowgp.models.svgp import VariationalGP


def infer_batch_sites(
    model: VariationalGP,
    memory: Memory,
    data: Dataset,
    *,
    L: Float[Tensor, "K K"],
    V: Float[Tensor, "K M"],
    gain: float,
    start: Sites | None = None,
) -> SiteInference:
    """Return the optimal q(u) given a batch and a memory; its sites are those of the batch first.

    Args:
        model: the model, with K candidates.
        memory: what is remembered of earlier rows.
        data: the batch.
        L: factor of K_uu.
        V: L⁻¹ K_ua of the points of the memory (`old_projection`).
        gain: nats per observation that the last update of the sites may gain.
        start: sites to start from.
    """
    blocks = RowBlocks.of(data, points=model.K)
    kernel, _ = chunked_kernel(model.kernel, model.candidates, blocks)
    R, P = memory.y.shape
    chunks = WhitenedChunks(kernel, blocks, L=L).followed_by(
        torch.cat([V @ A for A in memory.A], 1)
    )
    observations = observation_model(model.likelihood)
    centre = prior_mean(model.mean, data.X).detach()
    old = memory.centred(prior_mean(model.mean, memory.Z)).detach().mT.reshape(-1)
    output = torch.eye(P, dtype=V.dtype, device=V.device).repeat_interleave(R, 0)

    def expected(rows: slice, m: Tensor, v: Tensor) -> Tensor:
        if rows.start >= data.N:
            m, v = (m * output).sum(1), (v * output).sum(1)
            return -0.5 * ((m - old).square() + v)
        block = data.part(rows)
        return block.weighted(observations.expected_log_prob(block.Y, centre[rows] + m, v))

    def coupling(m: Tensor, v: Tensor) -> Tensor | None:
        H = observations.coupling(centre + m[: data.N], v[: data.N])
        if H is None:
            return None
        H = H if data.weights is None else data.weights[:, None, None] * H
        return torch.cat([H, torch.diag_embed(output)])

    precision = observations.initial_precision()
    if start is None and precision is not None:
        # As in `svgp`: under a wide q(f), far targets have hardly any gradient.
        precision = data.weighted(precision.expand(data.Y.shape).clone())
        start = Sites(
            torch.cat([precision * (data.Y - centre), output * old[:, None]]),
            torch.cat([precision, output]),
        )
    return infer_sites(
        chunks,
        expected,
        P=P,
        coupling=coupling,
        start=start,
        gain=gain * data.observations,
    )


def batch_site_moments(
    inference: SiteInference, memory: Memory, remembered: list[Moments], *, N: int | float
) -> list[Moments]:
    """Return the moments of inferred sites, which include the remembered rows.

    Args:
        inference: sites of a batch and a memory.
        memory: the memory.
        remembered: its moments, of which the sites do not have the residual and the trace.
        N: number of observations of the batch.
    """
    own = site_moments(inference.sums, constant=inference.constant(), N=N + memory.N)
    return [
        replace(
            m,
            square=m.square + memory.residual / memory.P,
            diagonal=m.diagonal + (r.diagonal - r.C.diagonal().sum()),
        )
        for m, r in zip(own, remembered, strict=True)
    ]
