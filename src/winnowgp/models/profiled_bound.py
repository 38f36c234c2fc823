"""The bound with the best q(u) put in, for any likelihood: a function of the other parameters."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import (
    LaplaceLikelihood,
    Likelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds import RowBlocks, Sites, WhitenedChunks, site_gradient
from winnowgp.data import Dataset
from winnowgp.errors import UnsettledWarning
from winnowgp.models.chunked_bound import WithGradient, chunked_kernel
from winnowgp.models.kernel_blocks import prior_mean
from winnowgp.models.observations import expected_log_prob, latent_coupling, latent_functions
from winnowgp.models.site_inference import Inferred, inferred
from winnowgp.typing import Scalar

# Nats an observation that the last step to the best q(u) may gain: while other parameters look for
# a place to start, while they move, and where the result is to be kept.
WARMING, CLIMBING, SETTLED = 3e-5, 1e-5, 1e-11


@final
class ProfiledBound:
    """max over q(u) of the uncollapsed bound, on fixed rows.

    Each call starts from the sites of the call before, so an optimiser that moves little pays for
    few steps. By the envelope theorem its gradient is that of the sites' evidence for the kernel
    and the points, and of the expected log-likelihood for the likelihood and the mean.

    Args:
        Z: the points.
        gain: nats an observation that the last step to the best q(u) may gain.
    """

    def __init__(
        self,
        data: Dataset,
        *,
        kernel: Kernel,
        mean: Mean,
        likelihood: Likelihood,
        Z: Float[Tensor, "M D"],
        gain: float,
    ) -> None:
        self._data, self._gain = data, gain
        self._blocks = RowBlocks.of(data, points=len(Z))
        self._kernel, self._mean, self._likelihood, self._Z = kernel, mean, likelihood, Z
        self._sites: Sites | None = None

    def __call__(self) -> Scalar:
        """The bound in nats, differentiable in what the kernel, mean, likelihood and Z hold."""
        mean, likelihood = self._mean, self._likelihood
        kernel, inputs = chunked_kernel(self._kernel, self._Z, self._blocks)
        with torch.no_grad():
            chunks = WhitenedChunks.for_gradients(kernel, self._blocks)
            found = _searched(
                chunks,
                self._data,
                mean=mean,
                likelihood=likelihood,
                gain=self._gain,
                start=self._sites,
            )
            self._sites = found.sites
            gradients = site_gradient(chunks, found.sites, found.sums)
        others = [p for p in [*mean.parameters(), *likelihood.parameters()] if p.requires_grad]
        more = _direct_gradient(found, self._data, mean, likelihood, others)
        value = self._Z.new_tensor(found.bound)
        return WithGradient.apply(lambda: (value, (*gradients, *more)), *inputs, *others)

    def state_dict(self) -> dict[str, Any]:
        """The sites that the next call starts from."""
        sites = self._sites
        return {} if sites is None else {"linear": sites.linear, "precision": sites.precision}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next call from the sites of another one."""
        like = self._data.X
        self._sites = (
            Sites(state["linear"].to(like), state["precision"].to(like)) if state else None
        )


def best_q(
    chunks: WhitenedChunks,
    data: Dataset,
    *,
    mean: Mean,
    likelihood: Likelihood,
    gain: float,
    start: Sites | None = None,
) -> Inferred:
    """The best q(u) at fixed parameters, to `gain` nats an observation.

    Warns where it was not found. An optimiser on its way goes on without a word: it visits places
    where no q(u) is good, and leaves them again.
    """
    found = _searched(chunks, data, mean=mean, likelihood=likelihood, gain=gain, start=start)
    if not found.settled:
        warnings.warn(
            f"the best q(u) was not found: the last of many rounds still gained more than {gain:g} "
            f"nats an observation, and the bound of {found.bound:.6g} nats may be far from the "
            "best. Are kernel variance and mean on the scale of the latent function?",
            UnsettledWarning,
            stacklevel=4,
        )
    return found


def _searched(
    chunks: WhitenedChunks,
    data: Dataset,
    *,
    mean: Mean,
    likelihood: Likelihood,
    gain: float,
    start: Sites | None,
) -> Inferred:
    centre = prior_mean(mean, data.X).detach()

    def expected(rows: slice, m: Tensor, v: Tensor) -> Tensor:
        part = data.part(rows)
        return part.weighted(expected_log_prob(likelihood, part.Y, centre[rows] + m, v))

    def coupling(m: Tensor, v: Tensor) -> Tensor:
        H = latent_coupling(likelihood, centre + m, v)
        assert H is not None
        return H if data.weights is None else data.weights[:, None, None] * H

    P = latent_functions(likelihood, data.P)
    if start is None and isinstance(likelihood, StudentTLikelihood | LaplaceLikelihood):
        # As if the noise were Gaussian: seen from the prior, far targets hardly pull.
        precision = likelihood.noise.detach().reciprocal().expand(data.Y.shape).clone()
        precision = data.weighted(precision)
        start = Sites(precision * (data.Y - centre), precision)
    coupled = coupling if isinstance(likelihood, SoftmaxLikelihood) else None
    return inferred(
        chunks, expected, P=P, coupling=coupled, start=start, gain=gain * data.observations
    )


def _direct_gradient(
    found: Inferred, data: Dataset, mean: Mean, likelihood: Likelihood, inputs: Sequence[Tensor]
) -> list[Tensor]:
    """∂/∂ Σ_i E_i of the parameters of mean and likelihood at fixed q, in chunks of rows."""
    totals = [torch.zeros_like(p) for p in inputs]
    if not inputs:
        return totals
    for start in range(0, data.N, 4096):
        rows = slice(start, min(start + 4096, data.N))
        with torch.enable_grad():
            f = prior_mean(mean, data.X[rows]) + found.mean[rows]
            part = data.part(rows)
            nats = expected_log_prob(likelihood, part.Y, f, found.variance[rows])
            nats = part.weighted(nats).sum()
        parts = torch.autograd.grad(nats, inputs, allow_unused=True)
        for total, part in zip(totals, parts, strict=True):
            if part is not None:
                total.add_(part)
    return totals
