"""Regression whose noise depends on the inputs: two sparse Gaussian processes and one bound.

    y = f(x) + σ exp(g(x)/2) ε,   ε ~ N(0, 1)

f and g are independent Gaussian processes with kernels and candidates of their own (Goldberg et al.
1998). With q(f) q(g) and their marginals (μ_f, v_f) and (μ_g, v_g) at a row, the expected
log-likelihood is closed-form (Lázaro-Gredilla & Titsias 2011):

    E_i = −½ [log 2πσ² + μ_g + w ((y − μ_f)² + v_f)/σ²],   w = exp(−μ_g + v_g/2).

Given q(g), f is regression in which row i has the noise variance σ²/w_i, so that the optimal q(u_f)
and the marginal gains of its candidates are exact. Given q(f), g has one observation per row, the
root e_i of ((y − μ_f)² + v_f)/σ², which is Gaussian with mean zero and log variance g
(`LogVarianceLikelihood`); the optimal q(u_g) follows from Gaussian sites. So each process can be
fitted by the methods of its class with the other one fixed, and each such step raises one bound.

A constant added to g and subtracted from log σ² changes nothing. `normalised` fixes it such that
the weights w_i have mean one: σ² is then the harmonic mean of the noise, and a weighted fit of f
counts N observations. Predictions are Gaussian mixtures over g.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from math import log, pi
from typing import final

import torch
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from gpytorch.means import ConstantMean
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributions import Normal

from winnowgp.bounds import collapsed_bound, subset_blocks
from winnowgp.bounds.uncollapsed import marginals, subset_marginal, whitened_kl
from winnowgp.data import Dataset, Source
from winnowgp.errors import InputError
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.models.base import SelectableModel
from winnowgp.models.kernels import KernelBlocks, covariance, kernel_blocks, prior_mean
from winnowgp.models.likelihoods import HeteroscedasticLikelihood, observation_model
from winnowgp.models.observations import LEAST_NOISE, Prediction
from winnowgp.models.posterior import CompositePosterior, Posterior
from winnowgp.models.quadrature import check_probabilities
from winnowgp.models.sgpr import SparseGP
from winnowgp.models.svgp import VariationalGP
from winnowgp.selection import SubsetObjective, SubsetStatistics
from winnowgp.typing import Masks, Nats, Scalar


@final
class HeteroscedasticPosterior(CompositePosterior):
    """q(f) and q(g) of y = f(x) + σ exp(g(x)/2) ε.

    Given g, an observation is Gaussian with variance v_f + σ² exp g. Under q(g) it is a mixture of
    such Gaussians, which is integrated by Gauss-Hermite quadrature.

    Args:
        function: q(f), whose Gaussian noise is σ².
        log_noise: q(g).
    """

    def __init__(self, function: Posterior, log_noise: Posterior) -> None:
        super().__init__()
        if not isinstance(function.likelihood, GaussianLikelihood):
            raise InputError(
                "`function` must have a GaussianLikelihood; got "
                f"{type(function.likelihood).__name__}."
            )
        self.function, self.log_noise = function, log_noise

    @property
    def described(self) -> Posterior:
        """q(f)."""
        return self.function

    @property
    def likelihood(self) -> HeteroscedasticLikelihood:
        """Gaussian noise of variance σ² exp g."""
        assert isinstance(self.function.likelihood, GaussianLikelihood)
        return HeteroscedasticLikelihood(self.function.likelihood.noise)

    def predict_mean(self, X: Float[Tensor, "N D"]) -> Float[Tensor, "N 1"]:
        """Return E[f(x)] of each row, which is also the mean of an observation."""
        return self.function.predict_mean(X)

    def predict_noise(self, X: Float[Tensor, "N D"]) -> Prediction:
        """Return mean and variance of the noise variance σ² exp g of each row; log-normal."""
        g = self.log_noise.predict(X)
        mean = self.likelihood.noise * (g.mean + 0.5 * g.variance).exp()
        return Prediction(mean, mean.square() * g.variance.expm1())

    def predict(self, X: Float[Tensor, "N D"], *, observed: bool = False) -> Prediction:
        """Return mean and variance of each row.

        Args:
            observed: whether to predict an observation y, with the noise of its row, rather than f.
        """
        f = self.function.predict(X)
        if not observed:
            return f
        return Prediction(f.mean, f.variance + self.predict_noise(X).mean)

    def covariance(
        self, X: Float[Tensor, "N D"], *, observed: bool = False
    ) -> Float[Tensor, "P N N"]:
        """Return the full covariance of the rows.

        Args:
            observed: whether to add the expected noise variance of each row.
        """
        covariance = self.function.covariance(X)
        if not observed:
            return covariance
        return covariance + torch.diag_embed(self.predict_noise(X).mean.mT)

    def sample(
        self,
        X: Float[Tensor, "N D"],
        n: int,
        *,
        observed: bool = False,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "S N P"]:
        """Return `n` samples of f drawn jointly at the rows, or of observations; O(N³) once.

        Args:
            observed: whether to draw observations: f plus noise whose log variance is drawn too.
        """
        f = self.function.sample(X, n, generator=generator)
        if not observed:
            return f
        g = self.log_noise.sample(X, n, generator=generator)
        eps = torch.randn(f.shape, generator=generator, dtype=X.dtype, device=X.device)
        return f + (self.likelihood.noise * g.exp()).sqrt() * eps

    def with_constant_noise(self) -> Posterior:
        """Return q(f) with the noise variance of all rows, if the log noise has no points."""
        if self.log_noise.M:
            raise InputError(
                f"noise depends on the inputs: its logarithm has {self.log_noise.M} inducing "
                "points. Use `predict_noise` for the noise of a row."
            )
        constant = deepcopy(self.function)
        noise = self.predict_noise(self.Z.new_zeros(1, self.Z.shape[1])).mean[0]
        constant.likelihood.initialize(noise=noise)
        return constant

    def latents(self, X: Float[Tensor, "N D"]) -> Prediction:
        """Return means and variances of f and g, `[N 2]`, for `HeteroscedasticLikelihood`."""
        f, g = self.function.predict(X), self.log_noise.predict(X)
        return Prediction(torch.cat([f.mean, g.mean], 1), torch.cat([f.variance, g.variance], 1))

    def log_density(self, X: Float[Tensor, "N D"], Y: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        """Return log E_q(g) N(y | μ_f, v_f + σ² exp g) of each row, in nats."""
        latent = self.latents(X)
        return observation_model(self.likelihood).log_density(Y, latent.mean, latent.variance)

    def quantiles(
        self, X: Float[Tensor, "N D"], probabilities: Float[Tensor, " Q"], *, observed: bool = True
    ) -> Float[Tensor, "Q N T"]:
        """Return quantiles of the predictive distribution of each row, inverting its mixture.

        Args:
            observed: whether to return quantiles of an observation y rather than f.
        """
        check_probabilities(probabilities)
        if not observed:
            return self.function.quantiles(X, probabilities, observed=False)
        latent = self.latents(X)
        model = observation_model(self.likelihood)
        return model.quantiles(latent.mean, latent.variance, probabilities)


# Updates of q(f) and q(g) in turn, at most.
_UPDATES = 50
# Rows whose leverages are computed at once, and the least 1 − h, which rounding may lower.
_ROWS, _LEAST_LEFT = 2048, 1e-6


@final
class LogVarianceLikelihood(_OneDimensionalLikelihood):
    """Gaussian observations with mean zero, whose log variance is the latent function g.

    E_q[log p(e | g)] = −½ [log 2π + μ + e² exp(−μ + v/2)] is closed-form.
    """

    def forward(self, function_samples: Tensor, *args: object, **kwargs: object) -> Normal:
        """Return p(e | g) = N(0, exp g)."""
        return Normal(torch.zeros_like(function_samples), (0.5 * function_samples).exp())

    def expected_log_prob(
        self, observations: Tensor, function_dist: Normal, *args: object, **kwargs: object
    ) -> Tensor:
        """Return E_q(g)[log p(e | g)] of each observation, in nats."""
        mean, variance = function_dist.mean, function_dist.variance
        weights = (-mean + 0.5 * variance).exp()
        return -0.5 * (log(2 * pi) + mean + observations.square() * weights)


@final
@dataclass(frozen=True, slots=True)
class HeteroscedasticObjective(SubsetObjective):
    """The bound of any pair of subsets at the optimal q(u_f) and the subset's marginal of q(u_g).

    Masks cover the candidates of f, followed by those of g. Each pair costs O(N M²).
    """

    function: KernelBlocks
    log_noise: KernelBlocks
    q_mean: Float[Tensor, "K 1"]
    q_factor: Float[Tensor, "1 K K"]
    centre: Float[Tensor, "N 1"]
    """Prior mean of g."""
    Y: Float[Tensor, "N 1"]
    noise: Scalar
    counts: Float[Tensor, " N"]
    """Number of observations that each row counts as."""

    @property
    def K(self) -> int:
        return len(self.function.Kuu) + len(self.log_noise.Kuu)

    def value(self, mask: Masks) -> Nats:
        split = [len(self.function.Kuu), len(self.log_noise.Kuu)]
        pairs = [self._bound(*(part[None] for part in each.split(split))) for each in mask]
        return torch.stack(pairs) if pairs else self.noise.new_zeros(0)

    def _bound(self, function: Bool[Tensor, "1 K"], log_noise: Bool[Tensor, "1 J"]) -> Scalar:
        Kuu, Kuf = subset_blocks(self.log_noise.Kuu, self.log_noise.Kuf, log_noise)
        q_mean, q_factor = subset_marginal(
            self.log_noise.Kuu, self.q_mean, self.q_factor, mask=log_noise
        )
        V = solve_lower(cholesky(Kuu).L, Kuf)
        mean, variance = marginals(V, kff=self.log_noise.kff, q_mean=q_mean, q_factor=q_factor)
        level = (self.centre + mean[0])[:, 0] + self.noise.log()
        row_noise = (level - 0.5 * variance[0, :, 0]).exp() / self.counts
        Kuu, Kuf = subset_blocks(self.function.Kuu, self.function.Kuf, function)
        nats = collapsed_bound(Kuu, Kuf, kff=self.function.kff, Y=self.Y, noise=row_noise)[0]
        # The log-normaliser of the row noise, in place of E[g] + log σ².
        constant = (2 * pi * row_noise).log() - self.counts * (log(2 * pi) + level)
        return nats + 0.5 * constant.sum() - whitened_kl(q_mean, q_factor)[0]


@final
class HeteroscedasticGP(SelectableModel[Dataset]):
    """A Gaussian process f whose Gaussian noise has the variance σ² exp g(x), g another process.

    Candidate sets are those of f and of g, in this order.

    Args:
        function: the process f; its noise is σ²; copied.
        log_noise: the process g, with a `LogVarianceLikelihood` and a constant mean; copied.

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> X = torch.linspace(0, 6, 40, dtype=torch.float64)[:, None]
    >>> noise = torch.randn(40, generator=torch.Generator().manual_seed(0)) * X[:, 0] / 6
    >>> data = Dataset.of(X, torch.sin(X[:, 0]) + noise)
    >>> model = HeteroscedasticGP(
    ...     SparseGP(ScaleKernel(RBFKernel()), X[::4], noise=0.1),
    ...     VariationalGP(ScaleKernel(RBFKernel()), X[::13], likelihood=LogVarianceLikelihood()),
    ... )
    >>> fitted = model.with_best_q(data)
    >>> bool(fitted.bound(data) > model.bound(data))
    True
    >>> deviations = fitted.posterior(data).predict_noise(X).mean.sqrt()
    >>> bool(deviations[-1] > 2 * deviations[0])
    True
    """

    def __init__(self, function: SparseGP, log_noise: VariationalGP) -> None:
        super().__init__()
        if not isinstance(log_noise.likelihood, LogVarianceLikelihood):
            raise InputError(
                "`log_noise` must have a LogVarianceLikelihood; got "
                f"{type(log_noise.likelihood).__name__}."
            )
        if not isinstance(log_noise.mean, ConstantMean):
            raise InputError(
                "`log_noise` must have a ConstantMean, the mean log noise; got "
                f"{type(log_noise.mean).__name__}."
            )
        if log_noise.candidates.shape[1] != function.candidates.shape[1]:
            raise InputError(
                "`function` and `log_noise` must have candidates with equally many columns; got "
                f"{function.candidates.shape[1]} and {log_noise.candidates.shape[1]}."
            )
        self.function, self.log_noise = deepcopy(function), deepcopy(log_noise)

    @property
    def candidate_sets(self) -> tuple[nn.Parameter, ...]:
        """Locations of the candidates of f and of g."""
        return self.function.candidates, self.log_noise.candidates

    @property
    def candidates(self) -> nn.Parameter:
        """Locations of the candidates of f."""
        return self.function.candidates

    @property
    def likelihood(self) -> HeteroscedasticLikelihood:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Gaussian noise of variance σ² exp g."""
        return HeteroscedasticLikelihood(self.function.noise[None])

    def check(self, data: Source) -> None:
        """Raise an `InputError` unless there is one target column, in memory."""
        if data.P != 1:
            raise InputError(
                f"noise that depends on the inputs needs one target column; got {data.P}. Fit a "
                "model for each target."
            )
        data.require_dataset("`HeteroscedasticGP`")

    def bound(self, data: Dataset, *, generator: torch.Generator | None = None) -> Scalar:
        """Return the bound at this q(u_g) and the optimal q(u_f), in nats, differentiable."""
        whole = torch.ones(1, sum(len(Z) for Z in self.candidate_sets), dtype=torch.bool)
        return self.subset_objective(data).value(whole.to(data.device))[0]

    def subset_objective(
        self, data: Dataset, *, generator: torch.Generator | None = None
    ) -> HeteroscedasticObjective:
        """Return the bound of any pair of subsets, the candidates of f before those of g."""
        self.check(data)
        f, g = self.function, self.log_noise
        return HeteroscedasticObjective(
            function=kernel_blocks(f.kernel, f.candidates, data.X),
            log_noise=kernel_blocks(g.kernel, g.candidates, data.X),
            q_mean=g.q_mean,
            q_factor=g.q_factor.tril(),
            centre=prior_mean(g.mean, data.X),
            Y=data.Y - prior_mean(f.mean, data.X),
            noise=f.noise,
            counts=data.counts,
        )

    def subset_statistics(self, data: Dataset) -> tuple[SubsetStatistics, SubsetStatistics]:
        """Return statistics of the candidates of f given q(g), and of those of g given q(f).

        Values of the first are the bound of this model. Those of the second are the bound to first
        order, since sites and q(f) are held fixed; both are exact for all candidates at the
        optimal q.
        """
        f, g = self.function, self.log_noise
        weighted = self.weighted(data)
        first = f.subset_statistics(weighted).shifted(self.constant(data))
        q = f.posterior(weighted)
        kl = whitened_kl(q.q_mean, q.q_factor).item()
        constant = -0.5 * data.observations * f.noise.log().item() - kl
        return first, g.subset_statistics(self.residuals(data)).shifted(constant)

    @torch.no_grad()
    def weighted(self, data: Dataset) -> Dataset:
        """Return the rows that f is fitted to: row i has the weight w_i = exp(−μ_g + v_g/2)."""
        return replace(data, weights=data.counts * self._weights(self._log_noise(data)))

    @torch.no_grad()
    def constant(self, data: Dataset) -> float:
        """Return the nats to add to a bound of f on `weighted` rows to obtain that of the model.

        ½ (Σ w − N) log 2πσ² − ½ Σ μ_g − KL[q(u_g) ‖ p(u_g)]
        """
        g, counts = self._log_noise(data), data.counts
        excess = counts @ self._weights(g) - data.observations
        level = counts @ g.mean[:, 0]
        kl = whitened_kl(self.log_noise.q_mean, self.log_noise.q_factor.tril())
        return (0.5 * (excess * (log(2 * pi) + self.function.noise.log()) - level) - kl).item()

    @torch.no_grad()
    def residuals(self, data: Dataset) -> Dataset:
        """Return the rows that g is fitted to: with targets √(((y − μ_f)² + v_f)/σ²)."""
        f, noise = self.function.posterior(self.weighted(data)).predict(data.X), self.function.noise
        return replace(data, Y=(((data.Y - f.mean).square() + f.variance) / noise).sqrt())

    def fixed_bound(self, data: Dataset) -> float:
        """Return the bound at this q(u_g) as a number, in blocks of rows."""
        return self.function.fixed_bound(self.weighted(data)) + self.constant(data)

    def with_best_q(self, data: Dataset, *, gain: float = 1e-9) -> "HeteroscedasticGP":
        """Return a new model with the same parameters and the q(u_g) that maximises the bound.

        q(f) and q(g) are updated in turn, each to its optimum given the other.

        Args:
            gain: nats per observation that the last update may gain.
        """
        model, bound = self, self.fixed_bound(data)
        for _ in range(_UPDATES):
            updated = model.with_parts(log_noise=model.log_noise.with_best_q(model.residuals(data)))
            better = updated.fixed_bound(data)
            if better < bound + gain * data.observations:
                return updated if better > bound else model
            model, bound = updated, better
        return model

    @torch.no_grad()
    def normalised(self, data: Dataset) -> "HeteroscedasticGP":
        """Return the same model with weights w_i of mean one: a constant moves from g to log σ²."""
        weights = data.counts @ self._weights(self._log_noise(data))
        shift = (weights / data.observations).log()
        model = self.with_parts()
        level = prior_mean(model.log_noise.mean, data.X[:1])[0, 0]
        model.log_noise.mean.initialize(constant=level + shift)
        noise = (model.function.noise * (-shift).exp()).clamp_min(1.01 * LEAST_NOISE)
        model.function.likelihood.initialize(noise=noise)
        return model

    def with_parts(
        self, *, function: SparseGP | None = None, log_noise: VariationalGP | None = None
    ) -> "HeteroscedasticGP":
        """Return a new model with another f or another g."""
        return HeteroscedasticGP(function or self.function, log_noise or self.log_noise)

    def _pruned(self, *masks: Tensor) -> "HeteroscedasticGP":
        return HeteroscedasticGP(self.function.prune(masks[0]), self.log_noise.prune(masks[1]))

    @torch.no_grad()
    def posterior(self, data: Dataset) -> HeteroscedasticPosterior:
        """Return q(f) and q(g), which do not depend on the data afterwards."""
        return HeteroscedasticPosterior(
            self.function.posterior(self.weighted(data)), self.log_noise.posterior(data)
        )

    def _log_noise(self, data: Dataset) -> Prediction:
        """Return mean and variance of q(g) at the rows."""
        return self.log_noise.posterior(data).predict(data.X)

    @staticmethod
    def _weights(g: Prediction) -> Float[Tensor, " N"]:
        return (-g.mean + 0.5 * g.variance).exp()[:, 0]


@torch.no_grad()
def leave_one_out_residuals(function: SparseGP, data: Dataset) -> Dataset:
    """Return the rows with |y − μ_f|/sd of a prediction without the row as target.

    Under constant noise these targets have mean square one. They show noise that varies even where
    q(f) follows every observation, so that (y − μ_f)² + v_f is about σ² everywhere.

    With the part s = kᵀ L⁻ᵀ F Fᵀ L⁻¹ k of the variance v_f that comes from q(u), and h = w s/σ² the
    leverage of a row of weight w, the prediction without the row has

        y − μ = (y − μ_f)/(1 − h),   var y = σ² + s/(1 − h) + (v_f − s).

    It is exact for the model whose prior is that of the inducing points, and for the exact GP if
    these are all rows. O(N M²).

    Args:
        function: a model with constant noise.
        data: the rows that it was fitted to.
    """
    q, noise, blocks = function.posterior(data), function.noise, []
    for rows in data.chunks(_ROWS):
        f = q.predict(rows.X)
        V = solve_lower(q.L, covariance(q.kernel, q.Z, rows.X))
        s = (q.q_factor[0].mT @ V).square().sum(0)[:, None]
        left = (1 - rows.counts[:, None] * s / noise).clamp_min(_LEAST_LEFT)
        variance = noise + s / left + (f.variance - s)
        blocks.append((rows.Y - f.mean).abs() / (left * variance.sqrt()))
    return replace(data, Y=torch.cat(blocks))
