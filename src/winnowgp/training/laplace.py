"""Hyper-parameter uncertainty of few rows: a Laplace approximation, and a mixture of posteriors.

With the inducing points held, the hyper-parameters θ of a sparse GP have the optimal variational
density q(θ) ∝ exp(ELBO(θ)) p(θ). It prefers smoother functions with more noise than the data do,
because the points were selected for the fitted θ. So where the ELBO is close to the exact evidence
of few rows there, q(θ) is the posterior density ∝ p(y | θ) p(θ). Its Laplace approximation at the
fitted θ proposes draws, which are weighted by q(θ) over the proposal; a few of them become the
members of a `MixturePosterior`.
Coordinates are those of L-BFGS: logarithms of positive parameters, of which exp(log p(θ)) is read
as the density.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isfinite, log
from typing import final

import torch
from gpytorch.kernels import ConstantKernel
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.models import (
    MixturePosterior,
    MultiOutputGP,
    MultiOutputPosterior,
    Posterior,
    SparseGP,
)
from winnowgp.models.kernels import copy_module
from winnowgp.models.observations import LEAST_NOISE
from winnowgp.models.priors import log_prior
from winnowgp.training.initialization import with_unit_weights
from winnowgp.training.lbfgs import Coordinates
from winnowgp.training.schedules import FitResult, draw_seed

MOST_ROWS = 2000
"""Rows up to which a mixture over hyper-parameters is offered."""

MEMBERS = 16
"""Number of posteriors of the mixture."""

# Rows up to which the density of hyper-parameters is that of the exact evidence, and the nats per
# observation by which the ELBO may be below it at the fitted ones. On four splits of 231 rows of a
# periodic series the density of the ELBO, which prefers other hyper-parameters, lost 0.01 to 0.05
# nats per test row.
_EXACT_ROWS, _CLOSE = 500, 0.02
# Number of draws from the Laplace approximation that are weighted.
_DRAWS = 128
# Least curvature of the log density in each direction: neither rows nor priors may determine a
# lengthscale of a column that does not matter. A parameter then has a standard deviation of one in
# its logarithm, that of the weak prior of lengthscales.
_LEAST_CURVATURE = 1.0
# Number of times that the Newton step is halved before it is left out.
_HALVED = 10
# Halvings of the interval of powers of the weights.
_BISECTIONS = 20
# Step of the differences of gradients, in logarithms: their errors are of the order of its square.
_STEP = 1e-3


@torch.no_grad()
def hyperparameter_mixture(
    model: SparseGP,
    data: Dataset,
    *,
    constant_weight: float = 0.0,
    generator: torch.Generator | None = None,
) -> MixturePosterior:
    """Return the mixture of posteriors over the hyper-parameters of a fitted model.

    Draws of the Laplace approximation (scrambled Sobol points) have weights q(θ) over their density
    under it, at most √n times their mean for n draws (Ionides 2008), tempered until as many draws
    are effective as there are members: with many parameters a few draws may have all the weight.
    The members are their quantiles in the order of the last parameter, usually the noise: every
    member stands for as much probability. If no draw can be computed, the fitted posterior is the
    only member.

    A constant can be a further member. Its weight limits what an observation that the model does
    not describe costs: its log density is at least that under the constant plus the log weight.

    It takes 2 p evaluations of the density with its gradient for p hyper-parameters and 128
    without, O((p + 64) N M²) for the ELBO and O((p + 64) N³) for the exact evidence. Predictions
    and files are 16 times those of one posterior.

    Args:
        model: a fitted model; frozen parameters and its inducing points are held. Without inducing
            points, only noise and mean are uncertain.
        data: the rows that it was fitted to.
        constant_weight: weight of the constant model, such as that of `FitResult`; none if the
            model has no inducing points.
        generator: source of randomness, seeded with 0 if None.
    """
    seed = 0 if generator is None else draw_seed(generator)
    density, mode = LogDensity(model, data), model.posterior(data)
    draws = _weighted_draws(density, seed=seed)
    members = [m for m in map(density.posterior, draws) if isinstance(m, Posterior)] or [mode]
    if not constant_weight or not model.K:
        return MixturePosterior(members, mode=mode)
    weights = data.X.new_full((len(members) + 1,), (1 - constant_weight) / len(members))
    weights[-1] = constant_weight
    members.append(constant_posterior(model, data))
    return MixturePosterior(members, mode=mode, member_weights=weights)


@torch.no_grad()
def process_members(
    model: MultiOutputGP, data: Dataset, *, generator: torch.Generator | None = None
) -> list[MultiOutputPosterior]:
    """Return posteriors at hyper-parameters of equal probability, as `hyperparameter_mixture` does.

    They are those of several processes; mixing and noise of the targets are drawn as well. The
    fitted posterior is the only one where no draw can be computed.
    """
    density = LogDensity(model, data)
    draws = _weighted_draws(density, seed=0 if generator is None else draw_seed(generator))
    members = [density.posterior(x) for x in draws]
    return [m for m in members if isinstance(m, MultiOutputPosterior)] or [model.posterior(data)]


@torch.no_grad()
def constant_posterior(model: SparseGP, data: Dataset) -> Posterior:
    """Return the posterior of a constant that the rows scatter around, as Gaussian noise.

    Args:
        model: a model of the rows, which tells whether targets have a noise each.
        data: complete rows without known noise.
    """
    mean = data.weighted(data.Y).sum(0) / data.observations
    noise = data.mean_square(mean).clamp_min(2 * LEAST_NOISE)
    kernel = ConstantKernel()
    kernel.initialize(constant=data.mean_square().mean().clamp_min(LEAST_NOISE))
    one_each = noise if model.noise.dim() else noise.mean().item()
    return SparseGP(kernel, data.X[:1], noise=one_each).posterior(data)


def with_uncertain_hyperparameters(
    result: FitResult[SparseGP], data: Dataset, *, generator: torch.Generator
) -> FitResult[SparseGP]:
    """Return the result of a fit with mixtures of posteriors, also of its smaller models."""

    def mixture(posterior: Posterior) -> MixturePosterior:
        model, weight = _model_of(result, posterior), result.constant_weight
        return hyperparameter_mixture(model, data, constant_weight=weight, generator=generator)

    return _with_posteriors(result, mixture)


@torch.no_grad()
def with_constant(result: FitResult[SparseGP], data: Dataset) -> FitResult[SparseGP]:
    """Return the result of a fit whose predictions, also of its smaller models, are averages.

    The posterior is averaged with a constant, with the weight that held-out rows gave it.
    """

    def average(posterior: Posterior) -> Posterior | MixturePosterior:
        if not posterior.M:
            return posterior
        w = result.constant_weight
        constant = constant_posterior(_model_of(result, posterior), data)
        weights = posterior.Z.new_tensor([1 - w, w])
        return MixturePosterior([posterior, constant], mode=posterior, member_weights=weights)

    return _with_posteriors(result, average)


def _with_posteriors(
    result: FitResult[SparseGP], change: Callable[[Posterior], Posterior | MixturePosterior]
) -> FitResult[SparseGP]:
    """Return the result with the posteriors of all sizes changed."""
    sized = []
    for other in result.sized:
        assert isinstance(other.posterior, Posterior)
        sized.append(replace(other, posterior=change(other.posterior)))
    assert isinstance(result.posterior, Posterior)
    return replace(result, posterior=change(result.posterior), sized=tuple(sized))


def _model_of(result: FitResult[SparseGP], posterior: Posterior) -> SparseGP:
    """Return the model that has a posterior of the fit, of any size."""
    if posterior is result.posterior:
        return result.model
    model = result.model.with_candidates(posterior.Z)
    for name in ("kernel", "mean", "likelihood"):
        getattr(model, name).load_state_dict(getattr(posterior, name).state_dict())
    return model


def _weighted_draws(density: "LogDensity", *, seed: int) -> list[Float[Tensor, " p"]]:
    """Return draws of equal weight; none if nothing is uncertain, or no draw can be computed."""
    if not len(density.fitted):
        return []
    try:
        laplace = LaplaceApproximation.of(density)
    except NotPositiveDefiniteError:
        return []
    draws, log_proposal = laplace.draws(_DRAWS, seed=seed)
    nats = draws.new_tensor([density(x) for x in draws]) + laplace.added(draws)
    if not bool(nats.isfinite().any()):
        return []
    weights = _tempered_weights(nats - log_proposal, MEMBERS)
    # The noise comes last, if it is learnt.
    return list(draws[_strata(draws[:, -1], weights, MEMBERS)])


@final
class LogDensity:
    """log q(θ) = ELBO(θ) + log p(θ) + c of a model with held inducing points, in nats.

    With up to 500 rows, log q(θ) = log p(y | θ) + log p(θ) + c if the exact evidence is at most
    0.02 nats per observation above the ELBO at the fitted hyper-parameters, and weights are at most
    one on average.

    Args:
        model: the model, which is copied.
        data: its rows.
    """

    def __init__(self, model: SparseGP | MultiOutputGP, data: Dataset) -> None:
        self._model, self._data = copy_module(model), data
        if isinstance(self._model, SparseGP):
            # Differences of gradients need double precision.
            self._model.precision = "double"
            if self._model.K == 0:
                # The kernel has hardly any variance, and no effect.
                self._model.kernel.requires_grad_(False)
        for candidates in self._model.candidate_sets:
            candidates.requires_grad_(False)
        self._coordinates = Coordinates(self._model, data.X)
        exact = isinstance(self._model, SparseGP) and _is_close(self._model, data)
        self._bound = (self._model.dense_bound if exact else self._model.chunked_bound)(data)
        self.fitted = self._coordinates.read()
        """The fitted hyper-parameters."""

    def __call__(self, x: Float[Tensor, " p"]) -> float:
        """Return the log density; −∞ where it cannot be computed."""
        if not self._coordinates.in_range(x):
            return -inf
        self._coordinates.write(x)
        try:
            nats = (self._bound() + log_prior(self._model)).item()
        except NotPositiveDefiniteError:
            return -inf
        return nats if isfinite(nats) else -inf

    def gradient(self, x: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """Return the gradient of the log density."""
        self._coordinates.write(x)
        self._model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            (self._bound() + log_prior(self._model)).backward()
        return self._coordinates.gradient()

    def hessian(self, x: Float[Tensor, " p"]) -> Float[Tensor, "p p"]:
        """Return the matrix of second derivatives, by central differences of gradients."""
        steps = _STEP * torch.eye(len(x), dtype=x.dtype, device=x.device)
        rows = [(self.gradient(x + h) - self.gradient(x - h)) / (2 * _STEP) for h in steps]
        H = torch.stack(rows)
        return 0.5 * (H + H.mT)

    def posterior(self, x: Float[Tensor, " p"]) -> Posterior | MultiOutputPosterior:
        """Return q(f) at some hyper-parameters."""
        self._coordinates.write(x)
        return self._model.posterior(self._data)


def _is_close(model: SparseGP, data: Dataset) -> bool:
    """Return whether the ELBO of a model is close to the exact evidence of few rows.

    Weights above one on average are refused: the exact evidence then has no maximum in σ².
    """
    if not model.K or data.N > _EXACT_ROWS or with_unit_weights(model, data) is not data:
        return False
    evidence = model.evidence(data, max_rows=_EXACT_ROWS).lower
    return evidence - model.fixed_bound(data) <= _CLOSE * data.observations


@final
@dataclass(frozen=True, slots=True)
class LaplaceApproximation:
    """A Gaussian density of hyper-parameters with the curvature of their log density at its mode.

    Curvatures below `_LEAST_CURVATURE`, and negative ones, are raised to it: as if there were a
    Gaussian prior around the fitted values in these directions. L-BFGS stops before the maximum,
    some fits keep the maximum of the exact evidence, and others hold lengthscales: the mean is a
    Newton step away, halved until the density is no lower there.
    """

    fitted: Float[Tensor, " p"]
    mean: Float[Tensor, " p"]
    directions: Float[Tensor, "p p"]
    """Eigenvectors of the curvature, as columns."""
    curvature: Float[Tensor, " p"]
    """Its eigenvalues, of at least `_LEAST_CURVATURE`."""
    raised: Float[Tensor, " p"]
    """What was added to the eigenvalues."""

    @classmethod
    def of(cls, density: LogDensity) -> "LaplaceApproximation":
        """Return the approximation at the fitted hyper-parameters of a log density."""
        fitted = density.fitted
        eigenvalues, U = torch.linalg.eigh(-density.hessian(fitted))
        curvature = eigenvalues.clamp_min(_LEAST_CURVATURE)
        step = U @ (U.mT @ density.gradient(fitted) / curvature)  # (−H)⁻¹ g
        least = density(fitted)
        for _ in range(_HALVED):
            if density(fitted + step) >= least:
                break
            step = 0.5 * step
        else:
            step = torch.zeros_like(step)
        return cls(fitted, fitted + step, U, curvature, curvature - eigenvalues)

    def draws(self, n: int, *, seed: int) -> tuple[Float[Tensor, "n p"], Float[Tensor, " n"]]:
        """Return draws of scrambled Sobol points, and their log densities up to a constant."""
        uniform = torch.quasirandom.SobolEngine(len(self.mean), scramble=True, seed=seed).draw(n)
        tiny = torch.finfo(uniform.dtype).eps
        normal = torch.special.ndtri(uniform.clamp(tiny, 1 - tiny).to(self.mean))
        return (
            self.mean + (normal * self.curvature.rsqrt()) @ self.directions.mT,
            -0.5 * normal.square().sum(1),
        )

    def added(self, draws: Float[Tensor, "n p"]) -> Float[Tensor, " n"]:
        """Return the log density of the priors that raised the curvature, up to a constant."""
        return -0.5 * ((draws - self.fitted) @ self.directions).square() @ self.raised


def _tempered_weights(log_weights: Float[Tensor, " n"], effective: int) -> Float[Tensor, " n"]:
    """Return importance weights that sum to one, of so many effective draws.

    Weights above √n times their mean are truncated to it. The weights w are then raised to the
    largest power τ ≤ 1 with 1/Σ w² ≥ `effective` (τ = 0 if fewer draws than these are finite): a
    few draws, where the density is far above its Laplace approximation, do not stand for all of it.
    """
    n = len(log_weights)
    log_weights = log_weights.clamp_max(log_weights.logsumexp(0).item() - 0.5 * log(n))

    def tempered(power: float) -> Tensor:
        return (power * log_weights).softmax(0)

    low, high = 0.0, 1.0
    if 1 / tempered(high).square().sum() < effective:
        for _ in range(_BISECTIONS):
            power = 0.5 * (low + high)
            enough = 1 / tempered(power).square().sum() >= effective
            low, high = (power, high) if enough else (low, power)
    return tempered(high)


def _strata(
    key: Float[Tensor, " n"], weights: Float[Tensor, " n"], count: int
) -> Int[Tensor, " S"]:
    """Return the weighted quantiles (s + ½)/S of draws in the order of a key."""
    order = key.argsort()
    middles = (torch.arange(count, dtype=key.dtype, device=key.device) + 0.5) / count
    at = torch.searchsorted(weights[order].cumsum(0), middles)
    return order[at.clamp_max(len(key) - 1)]
