"""Sparse variational GP for any likelihood."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from typing import Any, final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.bounds import (
    RowBlocks,
    Sites,
    WhitenedChunks,
    masked_blocks,
    masked_marginal,
    site_gradient,
    site_moments,
    subset_blocks,
    subset_marginal,
    uncollapsed_bound,
)
from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError, UnsettledWarning
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.models.base import InducingModel, check_kernel
from winnowgp.models.kernels import KernelBlocks, covariance, kernel_blocks, prior_mean
from winnowgp.models.likelihoods import copy_likelihood, observation_model
from winnowgp.models.posterior import Posterior
from winnowgp.models.sgpr import WithGradient, chunked_kernel
from winnowgp.models.site_inference import Inferred, inferred
from winnowgp.selection import RelaxedObjective, SubsetStatistics, subset_statistics
from winnowgp.typing import Mask, Masks, Nats, Scalar, Weights

# An explicit q(u) as a function of the subset: each score is that of q's own marginal.


@final
@dataclass(frozen=True, slots=True)
class UncollapsedObjective(RelaxedObjective):
    """The uncollapsed bound of any subset, differentiable in all that the model holds.

    S subsets are one batch: O(S M³ + S P N M²) with M the size of the largest.
    """

    blocks: KernelBlocks
    q_mean: Float[Tensor, "K P"]
    q_factor: Float[Tensor, "P K K"]
    expected_log_prob: Callable[[Tensor, Tensor], Tensor]
    """From means and variances `[S B P]` to nats of each row and target."""
    scale: float
    """Rows that each row stands for."""

    @property
    def K(self) -> int:
        return self.blocks.Kuu.shape[0]

    def value(self, mask: Masks) -> Nats:
        Kuu, Kuf = subset_blocks(self.blocks.Kuu, self.blocks.Kuf, mask)
        q = subset_marginal(self.blocks.Kuu, self.q_mean, self.q_factor, mask=mask)
        return self._bound(Kuu, Kuf, q)

    def relaxed_value(self, weights: Weights) -> Nats:
        Kuu, Kuf = masked_blocks(self.blocks.Kuu, self.blocks.Kuf, weights)
        q = masked_marginal(self.blocks.Kuu, self.q_mean, self.q_factor, weights=weights)
        return self._bound(Kuu, Kuf, q)

    def _bound(self, Kuu: Tensor, Kuf: Tensor, q: tuple[Tensor, Tensor]) -> Nats:
        return uncollapsed_bound(
            Kuu,
            Kuf,
            kff=self.blocks.kff,
            q_mean=q[0],
            q_factor=q[1],
            expected_log_prob=self.expected_log_prob,
            scale=self.scale,
        )


# The bound with the best q(u) put in, for any likelihood: a function of the other parameters.


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
    observations = observation_model(likelihood)
    P = observations.num_latents(data.P)

    def expected(rows: slice, m: Tensor, v: Tensor) -> Tensor:
        block = data.part(rows)
        return block.weighted(observations.expected_log_prob(block.Y, centre[rows] + m, v))

    def coupling(m: Tensor, v: Tensor) -> Tensor | None:
        H = observations.coupling(centre + m, v)
        return H if H is None or data.weights is None else data.weights[:, None, None] * H

    precision = observations.initial_precision()
    if start is None and precision is not None:
        # As if the noise were Gaussian: under the prior q(f), far targets have hardly any gradient.
        precision = data.weighted(precision.expand(data.Y.shape).clone())
        start = Sites(precision * (data.Y - centre), precision)
    return inferred(
        chunks, expected, P=P, coupling=coupling, start=start, gain=gain * data.observations
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
            nats = observation_model(likelihood).expected_log_prob(part.Y, f, found.variance[rows])
            nats = part.weighted(nats).sum()
        parts = torch.autograd.grad(nats, inputs, allow_unused=True)
        for total, part in zip(totals, parts, strict=True):
            if part is not None:
                total.add_(part)
    return totals


# A sparse Gaussian process for any likelihood, with an explicit q(u) and minibatches.


@final
class VariationalGP(InducingModel):
    """P latent Gaussian processes that share kernel, mean and K candidate inducing points.

    q(u_p) = N(L m_p, L F_p F_pᵀ Lᵀ) with K_uu = L Lᵀ and F_p lower-triangular (Hensman et al.
    2015). m and F are parameters like any other, so all can be learnt at once on minibatches; or
    `with_best_q` finds the best ones at fixed hyper-parameters, by sites (`site_inference`).

    Args:
        kernel: any GPyTorch kernel without batch shape; copied.
        candidates: where inducing points may be, `[K D]`; copied, and learnt unless frozen.
        likelihood: of GPyTorch: Gaussian, Bernoulli, softmax, Poisson, Student-t, Laplace, Beta,
            negative binomial, or your own that is integrated in one dimension; copied.
        targets: number of target columns. Softmax has one, and as many latent functions as classes.
        mean: prior mean of every latent function; copied, a constant to be learnt by default.

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> from gpytorch.likelihoods import BernoulliLikelihood
    >>> X = torch.linspace(0, 6, 30, dtype=torch.float64)[:, None]
    >>> data = Dataset.of(X, (torch.sin(X[:, 0]) > 0).double())
    >>> model = VariationalGP(ScaleKernel(RBFKernel()), X[::3], likelihood=BernoulliLikelihood())
    >>> better = model.with_best_q(data)
    >>> bool(model.bound(data) < better.bound(data) < 0)
    True
    """

    def __init__(
        self,
        kernel: Kernel,
        candidates: Float[Tensor, "K D"],
        *,
        likelihood: Likelihood,
        targets: int = 1,
        mean: Mean | None = None,
    ) -> None:
        super().__init__()
        check_kernel(kernel, candidates)
        self.kernel = deepcopy(kernel).to(candidates)
        self.mean = deepcopy(ConstantMean() if mean is None else mean).to(candidates)
        self.likelihood = copy_likelihood(likelihood).to(candidates)
        self.candidates = nn.Parameter(candidates.detach().clone())
        self.targets = targets
        P = observation_model(likelihood).num_latents(targets)
        K, like = len(candidates), candidates.detach()
        self.q_mean = nn.Parameter(like.new_zeros(K, P))
        eye = torch.eye(K, dtype=like.dtype, device=like.device)
        self.q_factor = nn.Parameter(eye.repeat(P, 1, 1))

    @property
    def P(self) -> int:
        """Number of latent functions."""
        return self.q_mean.shape[1]

    def check(self, data: Source) -> None:
        """Other target columns than the model was made for, or targets it gives no probability."""
        if self.targets != data.P:
            raise InputError(
                f"the model was made for {self.targets} target columns and the data have {data.P}; "
                "say `targets=` when making it."
            )
        observation_model(self.likelihood).check_targets(data.in_memory("`VariationalGP`").Y)

    def bound(self, data: Dataset, *, total: int | None = None) -> Scalar:
        """Uncollapsed lower bound on log p(Y) at this q(u), in nats.

        scale · Σ_i E_q[log p(y_i | f_i)] − KL[q(u) ‖ p(u)], with scale = total / rows.
        """
        blocks = kernel_blocks(self.kernel, self.candidates, data.X)
        return uncollapsed_bound(
            blocks.Kuu,
            blocks.Kuf,
            kff=blocks.kff,
            q_mean=self.q_mean,
            q_factor=self.q_factor.tril(),
            expected_log_prob=self._expected(data),
            scale=1.0 if total is None else total / data.N,
        )

    def subset_objective(self, data: Dataset, *, total: int | None = None) -> UncollapsedObjective:
        """The bound of any subset at this q(u): what its marginal q(u_Z) is worth."""
        return UncollapsedObjective(
            blocks=kernel_blocks(self.kernel, self.candidates, data.X),
            q_mean=self.q_mean,
            q_factor=self.q_factor.tril(),
            expected_log_prob=self._expected(data),
            scale=1.0 if total is None else total / data.N,
        )

    def subset_statistics(self, data: Source) -> SubsetStatistics:
        """What any subset is worth with the sites of the best q(u) of all candidates; O(P N K²).

        Exact for all candidates and for a Gaussian likelihood; to first order elsewhere, since a
        subset's own best sites differ a little.
        """
        chunks, found = self._inferred(data, gain=CLIMBING)
        moments = site_moments(found.sums, constant=found.constant(), N=data.observations)
        return subset_statistics(chunks.L, *moments)

    def fixed_bound(self, data: Source) -> float:
        """The bound with the best q(u), as a number."""
        return self._inferred(data, gain=SETTLED)[1].bound

    def chunked_bound(self, data: Source, *, tighter: bool = False) -> Callable[[], Scalar]:
        """The same bound as a function of the parameters when it is called."""
        if tighter:
            raise InputError("the tighter bound is for Gaussian noise; use `SparseGP`.")
        self.check(data)
        return self._profiled(data.in_memory("`VariationalGP`"), self.candidates, gain=CLIMBING)

    def chunked_cost(self, data: Source) -> float:
        # Two steps to the best q(u) of two passes each, and the gradient.
        return 12.0 * self.P * data.N * self.K**2

    def dense_bound(self, data: Dataset) -> Callable[[], Scalar]:
        """The same as if every row were an inducing point; O(P N³)."""
        self.check(data)
        return self._profiled(data, data.X, gain=WARMING)

    def upper_bound(self, data: Source) -> float:
        """Infinite: no upper bound on the evidence is known for all likelihoods."""
        return inf

    @torch.no_grad()
    def with_candidates(self, candidates: Float[Tensor, "J D"]) -> "VariationalGP":
        """A new model with the same parameters; its q(u) is that of the process at the new points.

        q(u') = ∫ p(u' | u) q(u) du, whose whitened factor is [A F, (I − A Aᵀ)^½] with
        A = L'⁻¹ K_u'u L⁻ᵀ.
        """
        L = cholesky(covariance(self.kernel, self.candidates, self.candidates)).L
        L_new = cholesky(covariance(self.kernel, candidates, candidates)).L
        cross = solve_lower(L, covariance(self.kernel, self.candidates, candidates))
        A = solve_lower(L_new, cross.mT)
        eye = torch.eye(len(A), dtype=A.dtype, device=A.device)
        AF = A @ self.q_factor.tril()
        # I + A (F Fᵀ − I) Aᵀ, whose eigenvalues are at least those of q.
        factor = cholesky(AF @ AF.mT + eye - A @ A.mT).L
        return self._copied(candidates, A @ self.q_mean, factor)

    @torch.no_grad()
    def prune(self, mask: Mask) -> "VariationalGP":
        """A new model with only the candidates that `mask` keeps, and the marginal q(u) of them."""
        Kuu = covariance(self.kernel, self.candidates, self.candidates)
        mean, factor = subset_marginal(Kuu, self.q_mean, self.q_factor.tril(), mask=mask[None])
        return self._copied(self.candidates[mask], mean[0], factor[0])

    def with_best_q(self, data: Source) -> "VariationalGP":
        """A new model with the same parameters and the q(u) that maximises the bound."""
        mean, factor = self._inferred(data, gain=SETTLED)[1].sums.posterior()
        # The factor root⁻ᵀ is upper-triangular; parameters are lower-triangular.
        lower = torch.linalg.qr(factor.mT).R.mT
        return self._copied(self.candidates, mean, lower)

    @torch.no_grad()
    def posterior(self, data: Source) -> Posterior:
        """q(f) of this q(u); the data are in it already."""
        return Posterior(
            self.kernel,
            self.candidates.detach(),
            mean=self.mean,
            likelihood=self.likelihood,
            q_mean=self.q_mean.detach(),
            q_factor=self.q_factor.detach().tril(),
        )

    def _profiled(self, data: Dataset, Z: Float[Tensor, "M D"], *, gain: float) -> ProfiledBound:
        return ProfiledBound(
            data,
            kernel=self.kernel,
            mean=self.mean,
            likelihood=self.likelihood,
            Z=Z,
            gain=gain,
        )

    @torch.no_grad()
    def _inferred(self, source: Source, *, gain: float) -> tuple[WhitenedChunks, Inferred]:
        self.check(source)
        data = source.in_memory("`VariationalGP`")
        blocks = RowBlocks.of(data, points=self.K)
        kernel, _ = chunked_kernel(self.kernel, self.candidates, blocks)
        chunks = WhitenedChunks.for_values(kernel, blocks)
        found = best_q(chunks, data, mean=self.mean, likelihood=self.likelihood, gain=gain)
        return chunks, found

    def _expected(self, data: Dataset) -> Callable[[Tensor, Tensor], Tensor]:
        self.check(data)
        centre = prior_mean(self.mean, data.X)

        def expected(mean: Tensor, variance: Tensor) -> Tensor:
            nats = observation_model(self.likelihood).expected_log_prob(
                data.Y, centre + mean, variance
            )
            return data.weighted(nats)

        return expected

    def _copied(
        self,
        candidates: Float[Tensor, "J D"],
        q_mean: Float[Tensor, "J P"],
        q_factor: Float[Tensor, "P J J"],
    ) -> "VariationalGP":
        copied = deepcopy(self)
        learnt = self.candidates.requires_grad
        copied.candidates = nn.Parameter(candidates.detach().clone(), requires_grad=learnt)
        copied.q_mean = nn.Parameter(q_mean.detach().contiguous().clone())
        copied.q_factor = nn.Parameter(q_factor.detach().contiguous().clone())
        return copied
