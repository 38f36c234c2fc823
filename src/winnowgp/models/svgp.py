"""Sparse variational Gaussian processes for any likelihood, with an explicit q(u)."""

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.bounds import subset_blocks, uncollapsed_bound
from winnowgp.bounds.collapsed import masked_blocks
from winnowgp.bounds.evidence import Evidence
from winnowgp.bounds.row_blocks import RowBlocks, WhitenedChunks
from winnowgp.bounds.sites import Sites, exact_site_gradient, site_gradient, site_moments
from winnowgp.bounds.uncollapsed import masked_marginal, subset_marginal
from winnowgp.data import Dataset, Source
from winnowgp.errors import ConvergenceWarning, InputError
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.models.base import InducingModel, check_kernel, copy_with
from winnowgp.models.chunked_kernels import chunked_kernel
from winnowgp.models.exact_gp import WithGradient
from winnowgp.models.kernels import KernelBlocks, covariance, kernel_blocks, prior_mean
from winnowgp.models.likelihoods import (
    copy_likelihood,
    expected_log_likelihood,
    is_plain,
    observation_model,
)
from winnowgp.models.posterior import Posterior
from winnowgp.models.site_inference import SiteInference, infer_sites
from winnowgp.models.site_updates import SiteBound
from winnowgp.selection import SubsetStatistics
from winnowgp.selection.objective import RelaxedObjective, subset_statistics
from winnowgp.typing import Masks, Nats, Scalar, Weights

# Nats per observation that the last update of q(u) may gain: while hyper-parameters are
# initialised, while they are optimised, and for a result that is reported.
INITIAL_GAIN, TRAINING_GAIN, FINAL_GAIN = 3e-5, 1e-5, 1e-11


@final
@dataclass(frozen=True, slots=True)
class UncollapsedObjective(RelaxedObjective):
    """The uncollapsed bound of any subset at its marginal of q(u), differentiable in parameters.

    S subsets are evaluated as one batch: O(S M³ + S P N M²) with M the size of the largest.
    """

    blocks: KernelBlocks
    q_mean: Float[Tensor, "K P"]
    q_factor: Float[Tensor, "P K K"]
    expected_log_prob: Callable[[Tensor, Tensor], Tensor]
    """A function from means and variances `[S B P]` to nats of each row and target."""
    scale: float
    """Number of rows that each row represents."""

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

    def whole(self) -> Scalar:
        """Return the bound with all candidates."""
        return self._bound(self.blocks.Kuu, self.blocks.Kuf, (self.q_mean, self.q_factor))

    def _bound(self, Kuu: Tensor, Kuf: Tensor, q: tuple[Tensor, Tensor]) -> Tensor:
        return uncollapsed_bound(
            Kuu,
            Kuf,
            kff=self.blocks.kff,
            q_mean=q[0],
            q_factor=q[1],
            expected_log_prob=self.expected_log_prob,
            scale=self.scale,
        )


@final
class VariationalGP(InducingModel):
    """P latent Gaussian processes that share kernel, mean and K candidate inducing points.

    q(u_p) = N(L m_p, L F_p F_pᵀ Lᵀ) with K_uu = L Lᵀ and F_p lower-triangular (Hensman et al.
    2015). m and F are parameters, so that all parameters can be learnt together on minibatches;
    `with_best_q` finds the optimal ones at fixed hyper-parameters.

    Args:
        kernel: a GPyTorch kernel without batch shape; copied.
        candidates: locations of the candidates, `[K D]`; copied, and learnt unless frozen.
        likelihood: a GPyTorch likelihood: Gaussian, Bernoulli, softmax, Poisson, Student-t,
            Laplace, Beta, negative binomial, or your own that is integrated in one dimension;
            copied.
        targets: number of target columns. Softmax has one, and a latent function per class.
        mean: prior mean of every latent function; copied; a constant that is learnt by default.

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
        """Raise an `InputError` if the number of target columns differs, or some are impossible."""
        if self.targets != data.P:
            raise InputError(
                f"the model has {self.targets} target columns and the data have {data.P}; pass "
                f"`targets={data.P}` to the constructor."
            )
        rows = data.require_dataset("`VariationalGP`")
        if not is_plain(self.likelihood, GaussianLikelihood):
            rows.require_plain_targets("`VariationalGP` without Gaussian noise")
        observation_model(self.likelihood).check_targets(rows.Y)

    def bound(
        self,
        data: Dataset,
        *,
        total: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """Return the uncollapsed lower bound on log p(Y) at this q(u), in nats.

        scale · Σ_i E_q[log p(y_i | f_i)] − KL[q(u) ‖ p(u)], with scale = total / rows.
        """
        return self.subset_objective(data, total=total).whole()

    def subset_objective(
        self,
        data: Dataset,
        *,
        total: int | None = None,
        generator: torch.Generator | None = None,
    ) -> UncollapsedObjective:
        """Return the bound of any subset of the candidates at its marginal of this q(u)."""
        return UncollapsedObjective(
            blocks=kernel_blocks(self.kernel, self.candidates, data.X),
            q_mean=self.q_mean,
            q_factor=self.q_factor.tril(),
            expected_log_prob=self._expected(data),
            scale=1.0 if total is None else total / data.N,
        )

    def subset_statistics(self, data: Source) -> SubsetStatistics:
        """Return statistics of subsets at the sites of the optimal q(u) of all candidates.

        Exact for all candidates and for a Gaussian likelihood; to first order otherwise, since the
        optimal sites of a subset differ a little. O(P N K²) once.
        """
        chunks, inference = self._infer(data, gain=TRAINING_GAIN)
        constant = inference.constant()
        moments = site_moments(inference.sums, constant=constant, N=data.observations)
        return subset_statistics(chunks.L, *moments)

    def fixed_bound(self, data: Source) -> float:
        """Return the bound with the optimal q(u), as a number."""
        return self._infer(data, gain=FINAL_GAIN)[1].bound

    def chunked_bound(self, data: Source) -> Callable[[], Scalar]:
        """Return the bound with the optimal q(u) as a function of the current parameters."""
        self.check(data)
        return self._profiled(
            data.require_dataset("`VariationalGP`"), self.candidates, gain=TRAINING_GAIN
        )

    def chunked_cost_of(self, data: Source, K: int) -> float:
        # Two updates of q(u) with two passes each, and the gradient.
        return 24.0 * self.P * data.N * K**2

    def dense_bound(self, data: Dataset) -> Callable[[], Scalar]:
        """Return the bound with every row as an inducing point, as a function; O(P N³)."""
        self.check(data)
        return self._profiled(data, None, gain=INITIAL_GAIN)

    def upper_bound(self, data: Source) -> float:
        """Return infinity: no upper bound on the evidence is known for all likelihoods."""
        return inf

    def evidence(self, data: Source, *, max_rows: int | None = None) -> Evidence:
        """Return the ELBO with the optimal q(u) as lower bound, and no upper bound."""
        return Evidence(self.fixed_bound(data), inf, "none")

    @torch.no_grad()
    def with_candidates(self, candidates: Float[Tensor, "J D"]) -> "VariationalGP":
        """Return a new model with other candidates and the same process q(f) at them.

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
        return self._with_q(candidates, A @ self.q_mean, factor)

    @torch.no_grad()
    def _pruned(self, *masks: Tensor) -> "VariationalGP":
        (mask,) = masks
        Kuu = covariance(self.kernel, self.candidates, self.candidates)
        mean, factor = subset_marginal(Kuu, self.q_mean, self.q_factor.tril(), mask=mask[None])
        return self._with_q(self.candidates[mask], mean[0], factor[0])

    def with_best_q(self, data: Source) -> "VariationalGP":
        """Return a new model with the same parameters and the q(u) that maximises the bound."""
        mean, factor = self._infer(data, gain=FINAL_GAIN)[1].sums.posterior()
        # The factor root⁻ᵀ is upper-triangular; parameters are lower-triangular.
        lower = torch.linalg.qr(factor.mT).R.mT
        return self._with_q(self.candidates, mean, lower)

    @torch.no_grad()
    def posterior(self, data: Source) -> Posterior:
        """Return q(f) of this q(u), which has been learnt from the data already."""
        return Posterior(
            self.kernel,
            self.candidates.detach(),
            mean=self.mean,
            likelihood=self.likelihood,
            q_mean=self.q_mean.detach(),
            q_factor=self.q_factor.detach().tril(),
        )

    def _profiled(
        self, data: Dataset, Z: Float[Tensor, "M D"] | None, *, gain: float
    ) -> "ProfiledBound":
        return ProfiledBound(
            data,
            kernel=self.kernel,
            mean=self.mean,
            likelihood=self.likelihood,
            Z=Z,
            gain=gain,
        )

    @torch.no_grad()
    def _infer(self, source: Source, *, gain: float) -> tuple[WhitenedChunks, SiteInference]:
        self.check(source)
        data = source.require_dataset("`VariationalGP`")
        blocks = RowBlocks.of(data, points=self.K)
        kernel, _ = chunked_kernel(self.kernel, self.candidates, blocks)
        chunks = WhitenedChunks.for_values(kernel, blocks)
        return chunks, best_q(chunks, data, mean=self.mean, likelihood=self.likelihood, gain=gain)

    def _expected(self, data: Dataset) -> Callable[[Tensor, Tensor], Tensor]:
        self.check(data)
        centre = prior_mean(self.mean, data.X)

        def expected(mean: Tensor, variance: Tensor) -> Tensor:
            return expected_log_likelihood(self.likelihood, data, centre + mean, variance)

        return expected

    def _with_q(
        self,
        candidates: Float[Tensor, "J D"],
        q_mean: Float[Tensor, "J P"],
        q_factor: Float[Tensor, "P J J"],
    ) -> "VariationalGP":
        return copy_with(self, candidates, q_mean=q_mean, q_factor=q_factor)


@final
class ProfiledBound(SiteBound):
    """The maximum over q(u) of the uncollapsed bound, as a function of the other parameters.

    Each call starts from the sites of the previous call, so that small steps of an optimiser need
    few updates. By the envelope theorem the gradient is that of the sites' evidence for the kernel
    and the inducing points, and of the expected log-likelihood for the likelihood and the mean.

    Args:
        data: rows, which are fixed.
        Z: inducing points; every row if None.
        gain: nats per observation that the last update of q(u) may gain.
    """

    def __init__(
        self,
        data: Dataset,
        *,
        kernel: Kernel,
        mean: Mean,
        likelihood: Likelihood,
        Z: Float[Tensor, "M D"] | None,
        gain: float,
    ) -> None:
        super().__init__(data)
        self._gain, self._exact = gain, Z is None
        self._Z = data.X if Z is None else Z
        self._blocks = RowBlocks.of(data, points=len(self._Z), size=data.N if Z is None else None)
        self._kernel, self._mean, self._likelihood = kernel, mean, likelihood

    def __call__(self) -> Scalar:
        """Return the bound in nats, differentiable in kernel, mean, likelihood and Z."""
        mean, likelihood, differentiable = self._mean, self._likelihood, torch.is_grad_enabled()
        kernel, inputs = chunked_kernel(self._kernel, self._Z, self._blocks)
        with torch.no_grad():
            whitened = WhitenedChunks.for_all_rows if self._exact else WhitenedChunks.for_gradients
            chunks = whitened(kernel, self._blocks)
            inference = _infer(
                chunks,
                self._data,
                mean=mean,
                likelihood=likelihood,
                gain=self._gain,
                start=self._sites,
            )
            self._sites = inference.sites
            value = self._Z.new_tensor(inference.bound)
            if not differentiable:
                return value
            gradient = exact_site_gradient if self._exact else site_gradient
            gradients = gradient(chunks, inference.sites, inference.sums)
        others = [p for p in [*mean.parameters(), *likelihood.parameters()] if p.requires_grad]
        more = _direct_gradient(inference, self._data, mean, likelihood, others)
        return WithGradient.apply(lambda: (value, (*gradients, *more)), *inputs, *others)


def best_q(
    chunks: WhitenedChunks,
    data: Dataset,
    *,
    mean: Mean,
    likelihood: Likelihood,
    gain: float,
    start: Sites | None = None,
) -> SiteInference:
    """Return the optimal q(u) at fixed parameters, to `gain` nats per observation.

    Issues a `ConvergenceWarning` if it has not converged. `ProfiledBound` does not warn, because
    optimisers pass through parameters for which no q(u) is good.
    """
    inference = _infer(chunks, data, mean=mean, likelihood=likelihood, gain=gain, start=start)
    if not inference.converged:
        warnings.warn(
            f"inference of q(u) has not converged: the last round still gained more than {gain:g} "
            f"nats per observation, and the bound of {inference.bound:.6g} nats may be far from "
            "the optimum. Check that kernel variance and mean are on the scale of the latent "
            "function.",
            ConvergenceWarning,
            stacklevel=4,
        )
    return inference


def _infer(
    chunks: WhitenedChunks,
    data: Dataset,
    *,
    mean: Mean,
    likelihood: Likelihood,
    gain: float,
    start: Sites | None,
) -> SiteInference:
    centre = prior_mean(mean, data.X).detach()
    observations = observation_model(likelihood)
    P = observations.num_latents(data.P)

    def expected(rows: slice, m: Tensor, v: Tensor) -> Tensor:
        return expected_log_likelihood(likelihood, data.part(rows), centre[rows] + m, v)

    def coupling(m: Tensor, v: Tensor) -> Tensor | None:
        H = observations.coupling(centre + m, v)
        return H if H is None or data.weights is None else data.weights[:, None, None] * H

    precision = observations.initial_precision()
    if start is None and precision is not None:
        # As if the noise were Gaussian: under the prior q(f), far targets have hardly any gradient.
        precision = data.weighted(precision.expand(data.Y.shape).clone())
        start = Sites(precision * (data.Y - centre), precision)
    return infer_sites(
        chunks, expected, P=P, coupling=coupling, start=start, gain=gain * data.observations
    )


def _direct_gradient(
    inference: SiteInference,
    data: Dataset,
    mean: Mean,
    likelihood: Likelihood,
    inputs: Sequence[Tensor],
) -> list[Tensor]:
    """Return ∂/∂ Σ_i E_i of the parameters of mean and likelihood at fixed q, in row blocks."""
    totals = [torch.zeros_like(p) for p in inputs]
    if not inputs:
        return totals
    for start in range(0, data.N, 4096):
        rows = slice(start, min(start + 4096, data.N))
        with torch.enable_grad():
            f = prior_mean(mean, data.X[rows]) + inference.mean[rows]
            variance = inference.variance[rows]
            nats = expected_log_likelihood(likelihood, data.part(rows), f, variance).sum()
        gradients = torch.autograd.grad(nats, inputs, allow_unused=True)
        for total, gradient in zip(totals, gradients, strict=True):
            if gradient is not None:
                total.add_(gradient)
    return totals
