"""Gaussian sites of more rows, given the posterior of several processes that earlier rows left.

The posterior q(v) = N(m, F Fᵀ) of whitened inducing values takes the place of the prior: with
v = m + F ε and ε ~ N(0, I), the mixture g_ip = Σ_q W_pq f_q(x_i) of row i and target p is

    g_ip = μ_ip + φ_ipᵀ ε + r_ip,   φ_ip = Σ_q W_pq F_qᵀ V_qi,   var r_ip = Σ_q W_pq² t_qi,

where F_q are the rows of F that belong to process q, V_q = L_q⁻¹ k_q(Z_q, X), and t_q the variance
that the inducing values do not explain. With Gaussian sites exp(λ g − ½ w g²) of the new rows,

    q(ε) = N(B⁻¹ D, B⁻¹),   B = I + Σ_ip w_ip φ_ip φ_ipᵀ,   D = Σ_ip (λ_ip − w_ip μ_ip) φ_ip,

and the sites are optimal where they are those that the likelihoods imply at its marginals. It is
the problem of `mixed_sites` in other coordinates; it holds N P M numbers, and costs O(N P M²).
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from winnowgp.bounds.sites import Sites
from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.linalg import definite_cholesky, half_log_det, solve_lower
from winnowgp.models.mixed_sites import MeanStep, expected_targets, initial_sites
from winnowgp.models.site_updates import (
    ExpectedLogProb,
    SiteProblem,
    alternate,
    site_derivatives,
)
from winnowgp.models.target_likelihoods import TargetLikelihoods

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
