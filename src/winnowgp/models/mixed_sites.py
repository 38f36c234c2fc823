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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.collapsed import Moments
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
    SiteBound,
    SiteProblem,
    alternate,
    site_derivatives,
)
from winnowgp.models.target_likelihoods import TargetLikelihoods, TargetObservations
from winnowgp.typing import Scalar


@dataclass(frozen=True, slots=True)
class MixedInference:
    """q(u) of given sites, and the sites that the likelihoods imply at its marginals."""

    sites: Sites
    moments: Moments
    """Moments of the sites, without a constant."""
    root: Float[Tensor, "M M"]
    """Cholesky factor of B."""
    q_mean: Float[Tensor, " M"]
    mean: Float[Tensor, "N P"]
    """Mean of each mixture under q."""
    variance: Float[Tensor, "N P"]
    implied: Sites
    """Sites from the gradient of the likelihoods at these marginals; equal at the optimum."""
    lift: Float[Tensor, " M"]
    """Σ_ip v̂_ip ∂E/∂μ_ip; equal to m at the optimum."""
    trace: float
    """tr B⁻¹."""
    bound: float
    """ELBO, in nats."""
    converged: bool = False

    def alpha(self) -> Float[Tensor, "N P"]:
        """Return α = λ − w μ."""
        return self.sites.linear - self.sites.precision * self.mean

    def slope(self) -> Float[Tensor, "N P"]:
        """Return ∂E/∂μ; equal to α at the optimum."""
        return self.implied.linear - self.implied.precision * self.mean


@torch.no_grad()
def infer_mixed_sites(
    chunks: MixedChunks,
    expected: ExpectedLogProb,
    *,
    mixing: Float[Tensor, "P Q"],
    start: Sites | None = None,
    gain: float,
    max_rounds: int = 100,
) -> MixedInference:
    """Return the optimal q(u), to `gain` nats.

    Args:
        expected: expected log-likelihood of the mixtures of some rows; zero for missing targets.
        mixing: W.
        start: sites to start from, such as those of nearby parameters.
    """
    problem = _MixedProblem(chunks, expected, mixing)
    flat = mixing.new_zeros(chunks.blocks.N, len(mixing))
    try:
        state = problem.evaluate(start or Sites(flat, flat))
    except NotPositiveDefiniteError:
        state = problem.evaluate(Sites(flat, flat))
    return alternate(problem, state, gain=gain, max_rounds=max_rounds)


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


@dataclass(frozen=True, slots=True)
class MeanStep:
    """A direction for the means of q: changes of α, m and μ."""

    alpha: Float[Tensor, "N P"]
    q_mean: Float[Tensor, " M"]
    mean: Float[Tensor, "N P"]


@final
@dataclass(frozen=True, slots=True)
class _MixedProblem(SiteProblem[MixedInference, MeanStep]):
    chunks: MixedChunks
    expected: ExpectedLogProb
    mixing: Float[Tensor, "P Q"]

    def evaluate(self, sites: Sites) -> MixedInference:
        C, D, square, constant, diagonal, _ = self.chunks.moments(
            site_targets(sites, self.mixing), shared=False
        )
        moments = Moments(
            C=C,
            D=D[:, None],
            square=square,
            diagonal=diagonal,
            constant=constant,
            N=self.chunks.blocks.observations,
        )
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
        return self._with_likelihood(
            sites,
            moments,
            root,
            q_mean,
            self._mean(q_mean),
            variance,
            float(inverse.square().sum()),
        )

    def mean_step(self, at: MixedInference) -> tuple[MeanStep, float]:
        # (I + Σ_ip w_ip v̂_ip v̂_ipᵀ) δ = Σ_ip g_ip v̂_ip − m, and the matrix is B.
        lifted = at.lift - at.q_mean
        q_mean = torch.cholesky_solve(lifted[:, None], at.root)[:, 0]
        mean = self._mean(q_mean)
        alpha = at.slope() - at.alpha() - at.sites.precision * mean
        return MeanStep(alpha, q_mean, mean), float(lifted @ q_mean)

    def move_means(self, at: MixedInference, step: MeanStep, rate: float) -> MixedInference:
        q_mean, mean = at.q_mean + rate * step.q_mean, at.mean + rate * step.mean
        precision = at.sites.precision
        sites = Sites(at.alpha() + rate * step.alpha + precision * mean, precision)
        # D = B m
        moments = replace(at.moments, D=(at.root @ (at.root.mT @ q_mean))[:, None])
        return self._with_likelihood(sites, moments, at.root, q_mean, mean, at.variance, at.trace)

    def converged(self, state: MixedInference) -> MixedInference:
        return replace(state, converged=True)

    def _mean(self, m: Float[Tensor, " M"]) -> Float[Tensor, "N P"]:
        """Return v̂_ipᵀ m of each row and target."""
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

    def _with_likelihood(
        self,
        sites: Sites,
        moments: Moments,
        root: Tensor,
        q_mean: Tensor,
        mean: Tensor,
        variance: Tensor,
        trace: float,
    ) -> MixedInference:
        """Evaluate the likelihoods and their derivatives at the marginals; `trace` is tr B⁻¹."""
        linear, precision = torch.empty_like(mean), torch.empty_like(mean)

        def likelihoods(shard: Iterable[MixedChunk]) -> Sums:
            nats, lift = mean.new_zeros(()), torch.zeros_like(q_mean)
            for chunk in shard:
                rows = chunk.block.rows
                m, v = mean[rows], variance[rows]
                total, slope, curvature = site_derivatives(self.expected, rows, m, v)
                nats += total
                precision[rows] = -2 * curvature
                linear[rows] = slope + precision[rows] * m
                mixed = slope @ self.mixing
                for part, own in zip(self.chunks.parts, mixed.mT, strict=True):
                    lift[part] += chunk.V[part] @ own
            return nats, lift

        nats, lift = self.chunks.summed(likelihoods)
        if not torch.isfinite(nats + linear.sum() + precision.sum()):
            raise NotPositiveDefiniteError(
                "the gradient of the likelihood is not finite at some rows"
            )
        # KL = ½ [‖m‖² + log|B| + tr B⁻¹ − M]
        kl = half_log_det(root) + 0.5 * (q_mean.square().sum() + trace - len(root))
        return MixedInference(
            sites=sites,
            moments=moments,
            root=root,
            q_mean=q_mean,
            mean=mean,
            variance=variance,
            implied=Sites(linear, precision),
            lift=lift,
            trace=trace,
            bound=(nats - kl).item(),
        )


# Nats per observed target that the last update of the sites may gain.
_GAIN = 1e-7


@final
@dataclass(frozen=True, slots=True)
class ConditionedSites:
    """q(ε) of given sites, and the sites that the likelihoods imply at its marginals."""

    sites: Sites
    root: Float[Tensor, "M M"]
    """Cholesky factor of B."""
    q_mean: Float[Tensor, " M"]
    mean: Float[Tensor, "N P"]
    """Mean of each mixture, without the offset of its likelihood."""
    variance: Float[Tensor, "N P"]
    implied: Sites
    lift: Float[Tensor, " M"]
    """Σ_ip φ_ip ∂E/∂μ_ip; equal to the mean of q(ε) at the optimum."""
    bound: float
    """Lower bound on the log density of the rows given earlier ones, in nats."""

    def alpha(self) -> Float[Tensor, "N P"]:
        """Return α = λ − w μ."""
        return self.sites.linear - self.sites.precision * self.mean


@torch.no_grad()
def conditioned_sites(
    likelihood: TargetLikelihoods,
    data: Dataset,
    *,
    mean: Float[Tensor, "N P"],
    features: Float[Tensor, "N P M"],
    residual: Float[Tensor, "N P"],
) -> ConditionedSites:
    """Return the optimal q of more rows, given that of earlier ones.

    Args:
        likelihood: likelihoods of the targets.
        data: more rows; targets may be missing.
        mean: μ.
        features: φ.
        residual: variances of r.
    """
    problem = _Problem(expected_targets(likelihood, data), mean, features.flatten(0, 1), residual)
    flat = torch.zeros_like(mean)
    try:
        state = problem.evaluate(initial_sites(likelihood, data))
    except NotPositiveDefiniteError:
        state = problem.evaluate(Sites(flat, flat))
    observed = float((~torch.isnan(data.Y)).sum())
    return alternate(problem, state, gain=_GAIN * max(observed, 1.0))


@final
@dataclass(frozen=True, slots=True)
class _Problem(SiteProblem[ConditionedSites, MeanStep]):
    expected: ExpectedLogProb
    centre: Float[Tensor, "N P"]
    features: Float[Tensor, "R M"]
    """φ, one row for each row and target."""
    residual: Float[Tensor, "N P"]

    def evaluate(self, sites: Sites) -> ConditionedSites:
        weighted = sites.precision.reshape(-1, 1) * self.features
        eye = torch.eye(weighted.shape[1], dtype=weighted.dtype, device=weighted.device)
        root = definite_cholesky(eye + self.features.mT @ weighted)
        pseudo = (sites.linear - sites.precision * self.centre).reshape(-1)
        q_mean = torch.cholesky_solve((self.features.mT @ pseudo)[:, None], root)[:, 0]
        spread = solve_lower(root, self.features.mT).square().sum(0)
        variance = spread.view(self.centre.shape) + self.residual
        return self._with_likelihood(sites, root, q_mean, self._mean(q_mean), variance)

    def mean_step(self, at: ConditionedSites) -> tuple[MeanStep, float]:
        # B δ = Σ_ip φ_ip ∂E/∂μ_ip − E ε
        lifted = at.lift - at.q_mean
        q_mean = torch.cholesky_solve(lifted[:, None], at.root)[:, 0]
        mean = self._mean(q_mean) - self.centre
        slope = at.implied.linear - at.implied.precision * at.mean
        return MeanStep(slope - at.alpha() - at.sites.precision * mean, q_mean, mean), float(
            lifted @ q_mean
        )

    def move_means(self, at: ConditionedSites, step: MeanStep, rate: float) -> ConditionedSites:
        mean, precision = at.mean + rate * step.mean, at.sites.precision
        sites = Sites(at.alpha() + rate * step.alpha + precision * mean, precision)
        q_mean = at.q_mean + rate * step.q_mean
        return self._with_likelihood(sites, at.root, q_mean, mean, at.variance)

    def converged(self, state: ConditionedSites) -> ConditionedSites:
        return replace(state)

    def _mean(self, q_mean: Float[Tensor, " M"]) -> Float[Tensor, "N P"]:
        return self.centre + (self.features @ q_mean).view(self.centre.shape)

    def _with_likelihood(
        self, sites: Sites, root: Tensor, q_mean: Tensor, mean: Tensor, variance: Tensor
    ) -> ConditionedSites:
        """Evaluate the likelihoods and their derivatives at the marginals."""
        nats, slope, curvature = site_derivatives(self.expected, slice(None), mean, variance)
        precision = -2 * curvature
        linear = slope + precision * mean
        if not torch.isfinite(nats + linear.sum() + precision.sum()):
            raise NotPositiveDefiniteError(
                "the gradient of the likelihood is not finite at some rows"
            )
        inverse = solve_lower(root, torch.eye(len(root), dtype=root.dtype, device=root.device))
        trace = inverse.square().sum() - len(root)
        # KL = ½ [‖E ε‖² + log|B| + tr B⁻¹ − M]
        kl = half_log_det(root) + 0.5 * (q_mean.square().sum() + trace)
        return ConditionedSites(
            sites=sites,
            root=root,
            q_mean=q_mean,
            mean=mean,
            variance=variance,
            implied=Sites(linear, precision),
            lift=self.features.mT @ slope.reshape(-1),
            bound=float(nats - kl),
        )
