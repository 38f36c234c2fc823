"""Optimal q(u) of several processes whose mixtures any likelihoods observe, by Gaussian sites.

Target p of row i depends on g_ip = Σ_q W_pq f_q(x_i), and has a site exp(λ_ip g − ½ w_ip g²). The
sites are targets of `bounds.mixing` with A_i = Wᵀ diag(w_i) W and b_i = Wᵀ λ_i, so that they give
q(v) = N(B⁻¹ D, B⁻¹) of the whitened inducing values of all processes, B = I + C. A row of the joint
problem is v̂_ip = (W_p1 v_1i, …, W_pQ v_Qi), and with α = λ − w μ

    μ_ip = v̂_ipᵀ m,   σ²_ip = v̂_ipᵀ B⁻¹ v̂_ip + Σ_q W_pq² t_qi,   m = Σ_ip α_ip v̂_ip.

No matrix has N P columns: m and μ cost O(N M), and C and all σ² O(N M²) for any number of targets.
`site_updates` has the iteration.

`conditioned_sites` has the same problem in other coordinates, for more rows given the posterior
q(v) = N(m, F Fᵀ) that earlier rows left, which takes the place of the prior: with v = m + F ε and
ε ~ N(0, I), the mixture of row i and target p is

    g_ip = μ_ip + φ_ipᵀ ε + r_ip,   φ_ip = Σ_q W_pq F_qᵀ V_qi,   var r_ip = Σ_q W_pq² t_qi,

where F_q are the rows of F that belong to process q, V_q = L_q⁻¹ k_q(Z_q, X), and t_q the variance
that the inducing values do not explain. Then

    q(ε) = N(B⁻¹ D, B⁻¹),   B = I + Σ_ip w_ip φ_ip φ_ipᵀ,   D = Σ_ip (λ_ip − w_ip μ_ip) φ_ip,

and the sites are optimal where they are those that the likelihoods imply at its marginals. It holds
N P M numbers, and costs O(N P M²).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.mixing import (
    MixedChunk,
    MixedChunks,
    MixedTargets,
    TargetFunction,
    mixed_two_pass,
)
from winnowgp.bounds.row_blocks import RowBlock, Sums
from winnowgp.bounds.sites import Sites
from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower
from winnowgp.models.exact_gp import WithGradient
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.site_updates import (
    ExpectedLogProb,
    MeanStep,
    SiteBound,
    SiteProblem,
    SiteState,
    alternate,
    site_derivatives,
)
from winnowgp.models.target_likelihoods import TargetLikelihoods, TargetObservations
from winnowgp.typing import Scalar

# Nats per observed target that the last update of the sites of more rows may gain.
_GAIN = 1e-7


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MixedInference(SiteState):
    """q = N(B⁻¹ D, B⁻¹) of the inducing values of all processes; rows are mixtures of these.

    Means are without the offsets of the likelihoods. Given earlier rows, the bound is one on the
    log density of the rows.
    """

    root: Float[Tensor, "M M"]
    """Cholesky factor of B."""
    trace: Scalar
    """tr B⁻¹."""


@torch.no_grad()
def infer_mixed_sites(
    chunks: MixedChunks,
    expected: ExpectedLogProb,
    *,
    mixing: Float[Tensor, "P Q"],
    start: Sites,
    gain: float,
) -> MixedInference:
    """Return the optimal q(u), to `gain` nats.

    Args:
        expected: expected log-likelihood of the mixtures of some rows; zero for missing targets.
        mixing: W.
        start: sites to start from, such as those of nearby parameters.
    """
    problem = _WhitenedMixtures(chunks, expected, mixing)
    return alternate(problem, problem.started(start), gain=gain)


@torch.no_grad()
def conditioned_sites(
    likelihood: TargetLikelihoods,
    data: Dataset,
    *,
    mean: Float[Tensor, "N P"],
    features: Float[Tensor, "N P M"],
    residual: Float[Tensor, "N P"],
) -> MixedInference:
    """Return the optimal q(ε) of more rows, given the posterior of earlier ones.

    Args:
        likelihood: likelihoods of the targets.
        data: more rows; targets may be missing.
        mean: μ.
        features: φ.
        residual: variances of r.
    """
    expected = expected_targets(likelihood, data)
    problem = _ConditionedMixtures(expected, mean, features.flatten(0, 1), residual)
    observed = float((~torch.isnan(data.Y)).sum())
    start = problem.started(initial_sites(likelihood, data))
    return alternate(problem, start, gain=_GAIN * max(observed, 1.0))


def expected_targets(likelihood: TargetLikelihoods, data: Dataset) -> ExpectedLogProb:
    """Return the expected log-likelihood of the mixtures of some rows, whose offsets are added."""
    model = observation_model(likelihood)

    def expected(rows: slice, mean: Tensor, variance: Tensor) -> Tensor:
        nats = model.expected_log_prob(data.Y[rows], likelihood.offset + mean, variance)
        return nats if data.weights is None else data.weights[rows, None] * nats

    return expected


def initial_sites(likelihood: TargetLikelihoods, data: Dataset) -> Sites:
    """Return sites to start from: exact for Gaussian noise, and flat for counts and classes."""
    model = observation_model(likelihood)
    assert isinstance(model, TargetObservations)
    precision = data.weighted(model.site_precisions(data.Y))
    residual = (data.Y - likelihood.offset.detach()).nan_to_num(0.0)
    return Sites(precision * residual, precision)


@final
class MixedProfiledBound(SiteBound):
    """The maximum over q(u) of the bound, as a function of the other parameters.

    Each call starts from the sites of the previous call. By the envelope theorem the gradient is
    that of the sites' evidence for kernels, inducing points and mixing, and that of the expected
    log-likelihood for the parameters of the likelihoods.

    Args:
        data: rows, which are fixed.
        likelihood: likelihoods of the targets.
        chunks: returns the rows at the current parameters, and the inputs of their gradient.
        mixing: returns the current W.
        gain: nats per observed target that the last update of q(u) may gain.
    """

    def __init__(
        self,
        data: Dataset,
        *,
        likelihood: TargetLikelihoods,
        chunks: Callable[[], tuple[MixedChunks, list[Tensor]]],
        mixing: Callable[[], Tensor],
        gain: float,
    ) -> None:
        super().__init__(data)
        self._likelihood = likelihood
        self._chunks, self._mixing, self._gain = chunks, mixing, gain

    def __call__(self) -> Scalar:
        """Return the bound in nats, differentiable in all parameters."""
        mixing, (chunks, inputs) = self._mixing(), self._chunks()
        expected = expected_targets(self._likelihood, self._data)
        inference = infer_mixed_sites(
            chunks,
            expected,
            mixing=mixing.detach(),
            start=self._sites or initial_sites(self._likelihood, self._data),
            gain=self._gain * float((~torch.isnan(self._data.Y)).sum()),
        )
        self._sites = inference.sites
        value = inference.q_mean.new_tensor(inference.bound)
        if not torch.is_grad_enabled():
            return value
        leaf = mixing.detach().clone().requires_grad_()
        gradient = mixed_two_pass(
            chunks, targets=site_targets(inference.sites, leaf), parameters=[leaf], shared=False
        )
        own = [p for p in self._likelihood.parameters() if p.requires_grad]
        with torch.enable_grad():
            nats = expected(slice(None), inference.mean, inference.variance).sum()
            direct = torch.autograd.grad(nats, own, allow_unused=True, materialize_grads=True)
        gradients = (*gradient.targets, *direct, *(g for each in gradient.kernels for g in each))
        return WithGradient.apply(lambda: (value, gradients), mixing, *own, *inputs)


def site_targets(sites: Sites, mixing: Float[Tensor, "P Q"]) -> TargetFunction:
    """Return what the sites of a block of rows say, differentiable in `mixing`."""

    def targets(block: RowBlock) -> MixedTargets:
        linear, precision = sites.linear[block.rows], sites.precision[block.rows]
        return MixedTargets.of_sites(linear, precision, mixing=mixing)

    return targets


class _Mixtures(SiteProblem[MixedInference]):
    """Mixtures of processes with one joint q, in any coordinates."""

    @abstractmethod
    def _product(self, m: Float[Tensor, " M"]) -> Float[Tensor, "N P"]:
        """Return v̂_ipᵀ m of each row and target, or φ_ipᵀ m."""

    @abstractmethod
    def _likelihoods(
        self, mean: Float[Tensor, "N P"], variance: Float[Tensor, "N P"]
    ) -> tuple[Scalar, Tensor, Tensor, Float[Tensor, " M"]]:
        """Return Σ_i E_i at the marginals, its derivatives in them, and the `lift`."""

    def started(self, sites: Sites) -> MixedInference:
        """Return q of given sites, or of flat ones where it has no covariance."""
        try:
            return self.evaluate(sites)
        except NotPositiveDefiniteError:
            flat = torch.zeros_like(sites.linear)
            return self.evaluate(Sites(flat, flat))

    def mean_step(self, at: MixedInference) -> tuple[MeanStep, float]:
        # (I + Σ_ip w_ip v̂_ip v̂_ipᵀ) δ = Σ_ip g_ip v̂_ip − m, and the matrix is B.
        lifted = at.lift - at.q_mean
        q_mean = torch.cholesky_solve(lifted[:, None], at.root)[:, 0]
        mean = self._product(q_mean)
        alpha = at.slope() - at.alpha() - at.sites.precision * mean
        return MeanStep(alpha, q_mean, mean), float(lifted @ q_mean)

    def moved(
        self, at: MixedInference, sites: Sites, q_mean: Tensor, mean: Tensor
    ) -> MixedInference:
        return self._with_likelihood(sites, at.root, q_mean, mean, at.variance, at.trace)

    def _with_likelihood(
        self,
        sites: Sites,
        root: Tensor,
        q_mean: Tensor,
        mean: Tensor,
        variance: Tensor,
        trace: Scalar,
    ) -> MixedInference:
        """Evaluate the likelihoods and their derivatives at the marginals; `trace` is tr B⁻¹."""
        nats, slope, curvature, lift = self._likelihoods(mean, variance)
        precision = -2 * curvature
        linear = slope + precision * mean
        if not torch.isfinite(nats + linear.sum() + precision.sum()):
            raise NotPositiveDefiniteError(
                "the gradient of the likelihood is not finite at some rows"
            )
        # KL = ½ [‖m‖² + log|B| + tr B⁻¹ − M]
        kl = half_log_det(root) + 0.5 * (q_mean.square().sum() + (trace - len(root)))
        return MixedInference(
            sites=sites,
            root=root,
            q_mean=q_mean,
            mean=mean,
            variance=variance,
            implied=Sites(linear, precision),
            lift=lift,
            trace=trace,
            bound=(nats - kl).item(),
        )


@final
@dataclass(frozen=True, slots=True)
class _WhitenedMixtures(_Mixtures):
    """Mixtures in the whitened coordinates of the prior, in chunks of rows."""

    chunks: MixedChunks
    expected: ExpectedLogProb
    mixing: Float[Tensor, "P Q"]

    def evaluate(self, sites: Sites) -> MixedInference:
        C, D, *_ = self.chunks.moments(site_targets(sites, self.mixing), shared=False)
        eye = torch.eye(len(C), dtype=C.dtype, device=C.device)
        root = definite_cholesky(C + eye)
        inverse = solve_lower(root, eye)
        variance = torch.empty_like(sites.linear)

        def variances(shard: Iterable[MixedChunk]) -> Sums:
            for chunk in shard:
                variance[chunk.block.rows] = self._variance(chunk, inverse)
            return (variance.new_zeros(()),)

        self.chunks.summed(variances)
        q_mean = torch.cholesky_solve(D[:, None], root)[:, 0]
        trace = inverse.square().sum()
        return self._with_likelihood(sites, root, q_mean, self._product(q_mean), variance, trace)

    def _product(self, m: Float[Tensor, " M"]) -> Float[Tensor, "N P"]:
        mean = m.new_empty(self.chunks.blocks.N, len(self.mixing))

        def means(shard: Iterable[MixedChunk]) -> Sums:
            for chunk in shard:
                f = [chunk.V[part].mT @ m[part] for part in self.chunks.parts]
                mean[chunk.block.rows] = torch.stack(f, 1) @ self.mixing.mT
            return (m.new_zeros(()),)

        self.chunks.summed(means)
        return mean

    def _variance(self, chunk: MixedChunk, inverse: Float[Tensor, "M M"]) -> Float[Tensor, "B P"]:
        """Return W cov(f) Wᵀ of each row: O(B M²), and O(B Q² M) for the covariances."""
        parts, B = self.chunks.parts, len(chunk.block)
        # The rows of root⁻¹ above those of a process are zero.
        E = [inverse[p.start :, p] @ chunk.V[p] for p in parts]
        S = inverse.new_zeros(B, len(parts), len(parts))
        for q, s in self.chunks.pairs(lower=True):
            S[:, q, s] = S[:, s, q] = (E[q] * E[s][parts[q].start - parts[s].start :]).sum(0)
        for q, p in enumerate(parts):
            # t is non-negative up to rounding.
            S[:, q, q] += (chunk.kff[q] - chunk.V[p].square().sum(0)).clamp_min(0)
        return torch.einsum("pq,nqs,ps->np", self.mixing, S, self.mixing).clamp_min(0)

    def _likelihoods(
        self, mean: Float[Tensor, "N P"], variance: Float[Tensor, "N P"]
    ) -> tuple[Scalar, Tensor, Tensor, Float[Tensor, " M"]]:
        slope, curvature = torch.empty_like(mean), torch.empty_like(mean)

        def sums(shard: Iterable[MixedChunk]) -> Sums:
            nats, lift = mean.new_zeros(()), mean.new_zeros(self.chunks.M)
            for chunk in shard:
                rows = chunk.block.rows
                total, slope[rows], curvature[rows] = site_derivatives(
                    self.expected, rows, mean[rows], variance[rows]
                )
                nats += total
                mixed = slope[rows] @ self.mixing
                for part, own in zip(self.chunks.parts, mixed.mT, strict=True):
                    lift[part] += chunk.V[part] @ own
            return nats, lift

        nats, lift = self.chunks.summed(sums)
        return nats, slope, curvature, lift


@final
@dataclass(frozen=True, slots=True)
class _ConditionedMixtures(_Mixtures):
    """Mixtures in the coordinates ε of the posterior that earlier rows left."""

    expected: ExpectedLogProb
    centre: Float[Tensor, "N P"]
    features: Float[Tensor, "R M"]
    """φ, one row for each row and target."""
    residual: Float[Tensor, "N P"]

    def evaluate(self, sites: Sites) -> MixedInference:
        weighted = sites.precision.reshape(-1, 1) * self.features
        eye = torch.eye(weighted.shape[1], dtype=weighted.dtype, device=weighted.device)
        root = definite_cholesky(eye + self.features.mT @ weighted)
        pseudo = (sites.linear - sites.precision * self.centre).reshape(-1)
        q_mean = torch.cholesky_solve((self.features.mT @ pseudo)[:, None], root)[:, 0]
        spread = solve_lower(root, self.features.mT).square().sum(0)
        variance = spread.view(self.centre.shape) + self.residual
        mean, trace = self.centre + self._product(q_mean), solve_lower(root, eye).square().sum()
        return self._with_likelihood(sites, root, q_mean, mean, variance, trace)

    def _product(self, m: Float[Tensor, " M"]) -> Float[Tensor, "N P"]:
        return (self.features @ m).view(self.centre.shape)

    def _likelihoods(
        self, mean: Float[Tensor, "N P"], variance: Float[Tensor, "N P"]
    ) -> tuple[Scalar, Tensor, Tensor, Float[Tensor, " M"]]:
        nats, slope, curvature = site_derivatives(self.expected, slice(None), mean, variance)
        return nats, slope, curvature, self.features.mT @ slope.reshape(-1)
