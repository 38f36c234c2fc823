"""Observation models: integrals of GPyTorch likelihoods under independent Gaussian latents.

`observation_model` maps a GPyTorch likelihood to the class that computes its expected log
probability, predictive log density and predictive moments. A likelihood either acts on one latent
function per target column, or on several at once: softmax on one per class, and noise that depends
on the inputs on the function and its log noise. Integrals over one latent are closed-form
(Gaussian, Laplace), reduced to a smooth integral (Student-t), or Gauss-Hermite quadrature, which is
accurate where the likelihood is not much narrower than q(f). `counts` and `classes` have those of
discrete targets. Nothing here is random.
"""

from math import log, pi, sqrt
from typing import Any, TypeGuard, TypeVar, final

import numpy as np
import torch
from gpytorch import likelihoods
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, Normal

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import quadrature
from winnowgp.models.classes import BernoulliObservations, SoftmaxObservations
from winnowgp.models.counts import CountObservations
from winnowgp.models.kernels import copy_module
from winnowgp.models.observations import (
    DENSITY_NODES,
    EXPECTATION_NODES,
    ObservationModel,
    Prediction,
    UserDefinedObservations,
    examples,
    is_user_defined,
)
from winnowgp.models.target_likelihoods import TargetLikelihoods, TargetObservations

_Kind = TypeVar("_Kind", bound=likelihoods.Likelihood)

WITH_NOISE = (
    likelihoods.GaussianLikelihood,
    likelihoods.StudentTLikelihood,
    likelihoods.LaplaceLikelihood,
)
"""Likelihoods whose targets are the latent function plus noise of one variance."""

_METHODS = ("forward", "expected_log_prob", "log_marginal", "marginal")


@final
class GaussianObservations(ObservationModel):
    """Gaussian noise, in closed form."""

    def expected_log_prob(
        self, Y: Tensor, mean: Tensor, variance: Tensor, *, known: Tensor | float = 0.0
    ) -> Tensor:
        noise = self.likelihood.noise + known
        # −½ [log 2πσ² + ((y − m)² + v)/σ²]; a `Normal` checks its arguments, and waits for a GPU.
        return -0.5 * (log(2 * pi) + noise.log() + ((Y - mean).square() + variance) / noise)

    def log_density(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return Normal(mean, (variance + self.likelihood.noise).sqrt()).log_prob(Y)

    def predict(self, mean: Tensor, variance: Tensor) -> Prediction:
        return Prediction(mean, variance + self.likelihood.noise)

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return torch.special.ndtr((Y - mean) / (variance + self.likelihood.noise).sqrt())

    def _quantiles(self, mean: Tensor, variance: Tensor, probabilities: Tensor) -> Tensor:
        return quadrature.gaussian_quantiles(mean, variance + self.likelihood.noise, probabilities)


@final
class HeteroscedasticLikelihood(likelihoods.Likelihood):
    """Gaussian noise of variance σ² exp g, with two latent functions per row: f and g.

    Args:
        noise: σ², `[1]`.
    """

    noise: Tensor

    def __init__(self, noise: Float[Tensor, " 1"]) -> None:
        super().__init__()
        self.register_buffer("noise", noise.detach().clone())

    def forward(self, function_samples: Tensor, *args: object, **kwargs: object) -> Normal:
        """Return p(y | f, g) for functions in the last axis."""
        f, g = function_samples.split(1, dim=-1)
        return Normal(f, (self.noise * g.exp()).sqrt())


@final
class HeteroscedasticObservations(ObservationModel):
    """Gaussian noise with a latent log variance: a mixture of Gaussians, by quadrature over g."""

    likelihood: HeteroscedasticLikelihood

    def num_latents(self, targets: int) -> int:
        if targets != 1:
            raise InputError(
                f"noise that depends on the inputs needs one target column; got {targets}. Fit a "
                "model for each target."
            )
        return 2

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        (f, g), (v, u) = mean.split(1, dim=-1), variance.split(1, dim=-1)
        noise = self.likelihood.noise
        square = ((Y - f).square() + v) * (-g + 0.5 * u).exp() / noise
        return -0.5 * (log(2 * pi) + noise.log() + g + square)

    def log_density(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        f, wide, weights = self._mixture(mean, variance)
        return (Normal(f, wide).log_prob(Y) + weights.log()).logsumexp(0)

    def predict(self, mean: Tensor, variance: Tensor) -> Prediction:
        (f, g), (v, u) = mean.split(1, dim=-1), variance.split(1, dim=-1)
        return Prediction(f, v + self.likelihood.noise * (g + 0.5 * u).exp())

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        f, wide, weights = self._mixture(mean, variance)
        shape = (-1, *[1] * (Y.dim() - mean.dim()), *wide.shape[1:])
        z = (Y - f) / wide.reshape(shape)
        return (weights.reshape(-1, *[1] * Y.dim()) * torch.special.ndtr(z)).sum(0)

    def _predictive(self, mean: Tensor, variance: Tensor) -> Distribution:
        return Normal(mean[..., :1], 1.0)

    def _mixture(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean `[N 1]` and the deviations and weights of the Gaussians `[T N 1]`."""
        (f, g), (v, u) = mean.split(1, dim=-1), variance.split(1, dim=-1)
        z, weights = quadrature.hermite_nodes(DENSITY_NODES, g)
        noise = self.likelihood.noise * (g + quadrature.standard_deviation(u) * z).exp()
        return f, (v + noise).sqrt(), weights


@final
class StudentTObservations(ObservationModel):
    """Student-t noise, by smooth one-dimensional integrals."""

    def initial_precision(self) -> Tensor:
        return self.likelihood.noise.detach().reciprocal()

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log c − (ν + 1)/2 · E log(1 + z²/νσ²), accurate for any noise.

        E log(1 + x) = ∫ (1 − E e^{−tx}) e^{−t}/t dt for x ≥ 0, a smooth integral over log t, and
        E e^{−az²} = (1 + 2av)^{−½} exp(−a z̄²/(1 + 2av)).
        """
        nu, scale = self.likelihood.deg_free, self.likelihood.noise
        square = (Y - mean).square()
        logarithm: Any = _Logarithm.apply(square, variance, (nu * scale).reshape(()))
        zero = mean.new_zeros(1)
        peak = self.likelihood.forward(zero).log_prob(zero)
        return peak - 0.5 * (nu + 1) * logarithm

    def log_density(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        deviation, log_weight = self._mixture(variance)
        return (Normal(mean, deviation).log_prob(Y) + log_weight).logsumexp(0)

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        variance = variance.reshape((1,) * (Y.dim() - variance.dim()) + variance.shape)
        deviation, log_weight = self._mixture(variance)
        return (log_weight.exp() * torch.special.ndtr((Y - mean) / deviation)).sum(0)

    def _mixture(
        self, variance: Float[Tensor, "*shape"]
    ) -> tuple[Float[Tensor, "T *shape"], Tensor]:
        """Return standard deviations of the Gaussians whose mixture is y, and their log weights.

        y = f + ε has the variance v + σ²/g of f and ε, with nodes of log g, g ~ Gamma(ν/2, ν/2).
        """
        u = torch.linspace(-36, 6, 337, dtype=variance.dtype, device=variance.device)
        u = u.reshape(-1, *([1] * variance.dim()))
        log_weight = (0.5 * self.likelihood.deg_free * (u - u.exp())).log_softmax(0)
        return (variance + self.likelihood.noise * (-u).exp()).sqrt(), log_weight


class _Logarithm(torch.autograd.Function):
    """E log(1 + z²/s) for a Gaussian z of mean square z̄² and variance v, once differentiable.

    With a = t/s, r = a/(1 + 2av) and k = E e^{−az²} = (1 + 2av)^{−½} e^{−r z̄²}, the derivatives are
    integrals over t of

        ∂(1 − k)/∂z̄² = k r,   ∂(1 − k)/∂v = k r (1 − 2 r z̄²).

    The value depends on z̄²/s and v/s only, which gives the derivative in s. Automatic
    differentiation took twice as long on 2,000 rows.
    """

    @staticmethod
    def forward(ctx: Any, square: Tensor, variance: Tensor, s: Tensor) -> Tensor:
        log_t = torch.linspace(-36, 4, 161, dtype=square.dtype, device=square.device)
        t = log_t.exp()
        weights = (-t).exp() * (log_t[1] - log_t[0])
        q, v = square.flatten(), variance.flatten()
        a = (t / s)[:, None]
        widened = torch.addcmul(a.new_ones(()), a, v, value=2)
        r = a / widened
        logarithm = widened.log_().mul_(-0.5).addcmul_(r, q, value=-1)
        k_minus_1 = torch.expm1(logarithm)
        if any(ctx.needs_input_grad):
            r_k = (k_minus_1 + 1).mul_(r)
            once, twice = weights @ r_k, weights @ r_k.mul_(r)
            by_v = torch.addcmul(once, q, twice, value=-2)
            by_s = -(q * once + v * by_v) / s
            ctx.save_for_backward(*(g.reshape(square.shape) for g in (once, by_v, by_s)))
        return -(weights @ k_minus_1).reshape(square.shape)

    # The type of `once_differentiable` has positional parameters only.
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *output: Tensor
    ) -> tuple[Tensor | None, ...]:
        by_square, by_v, by_s = (output[0] * gradient for gradient in ctx.saved_tensors)
        return by_square, by_v, by_s.sum()


@final
class LaplaceObservations(ObservationModel):
    """Laplace noise of variance 2b², in closed form; s is the standard deviation of f."""

    def initial_precision(self) -> Tensor:
        return self.likelihood.noise.detach().reciprocal()

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return −log 2b − E|y − f|/b, with E|z| = z̄ (2Φ(z̄/s) − 1) + 2 s φ(z̄/s)."""
        b, s, z = self.likelihood.noise.sqrt(), quadrature.standard_deviation(variance), Y - mean
        ratio = z / s
        density = torch.exp(-0.5 * ratio.square()) / sqrt(2 * pi)
        distance = z * (2 * torch.special.ndtr(ratio) - 1) + 2 * s * density
        return -(2 * b).log() - distance / b

    def log_density(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the log density of the sum of a Laplace and a Gaussian variable."""
        b, s, z = self.likelihood.noise.sqrt(), quadrature.standard_deviation(variance), Y - mean
        above = -z / b + torch.special.log_ndtr(z / s - s / b)
        below = z / b + torch.special.log_ndtr(-z / s - s / b)
        return -(2 * b).log() + 0.5 * (s / b).square() + torch.logaddexp(above, below)

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return F = Φ(z/s) − ½ e^{s²/2b²} (e^{−z/b} Φ(z/s − s/b) − e^{z/b} Φ(−z/s − s/b))."""
        b, s, z = self.likelihood.noise.sqrt(), quadrature.standard_deviation(variance), Y - mean
        half = 0.5 * (s / b).square()
        above = (half - z / b + torch.special.log_ndtr(z / s - s / b)).exp()
        below = (half + z / b + torch.special.log_ndtr(-z / s - s / b)).exp()
        return torch.special.ndtr(z / s) - 0.5 * (above - below)


@final
class BetaObservations(ObservationModel):
    """Proportions strictly between 0 and 1."""

    def check_targets(self, Y: Float[Tensor, "N P"]) -> None:
        if not bool(((Y > 0) & (Y < 1)).all()):
            raise InputError(
                "Beta targets must lie strictly between 0 and 1; "
                f"got {examples(Y[(Y <= 0) | (Y >= 1)])}."
            )


_MODELS: tuple[tuple[type[likelihoods.Likelihood], type[ObservationModel]], ...] = (
    (likelihoods.GaussianLikelihood, GaussianObservations),
    (HeteroscedasticLikelihood, HeteroscedasticObservations),
    (likelihoods.StudentTLikelihood, StudentTObservations),
    (likelihoods.LaplaceLikelihood, LaplaceObservations),
    (likelihoods.BernoulliLikelihood, BernoulliObservations),
    (likelihoods.PoissonLikelihood, CountObservations),
    (likelihoods.NegativeBinomialLikelihood, CountObservations),
    (likelihoods.BetaLikelihood, BetaObservations),
    (likelihoods.SoftmaxLikelihood, SoftmaxObservations),
)


def observation_model(likelihood: likelihoods.Likelihood) -> ObservationModel:
    """Return the observation model of a GPyTorch likelihood, or of one for each target."""
    if isinstance(likelihood, TargetLikelihoods):
        return TargetObservations(likelihood, tuple(map(observation_model, likelihood.parts)))
    for kind, model in _MODELS:
        if isinstance(likelihood, kind):
            if kind is likelihoods.SoftmaxLikelihood or is_plain(likelihood, kind):
                return model(likelihood)
            return UserDefinedObservations(likelihood, parent=model(likelihood))
    return UserDefinedObservations(likelihood, parent=ObservationModel(likelihood))


def expected_log_likelihood(
    likelihood: likelihoods.Likelihood,
    rows: Dataset,
    mean: Float[Tensor, "*S N F"],
    variance: Float[Tensor, "*S N F"],
) -> Float[Tensor, "*S N P"]:
    """Return E_q(f)[log p(y | f)] of each target, times the weight of its row, in nats.

    Known noise of the rows is added to that of a Gaussian likelihood, which also leaves out targets
    that are missing (NaN): their terms are zero.

    Args:
        mean: means of q(f), the prior mean included.
        variance: variances of q(f).
    """
    model = observation_model(likelihood)
    if not isinstance(model, GaussianObservations):
        return rows.weighted(model.expected_log_prob(rows.Y, mean, variance))
    missing = torch.isnan(rows.Y)
    known = 0.0 if rows.noise is None else rows.noise
    nats = model.expected_log_prob(rows.Y.masked_fill(missing, 0.0), mean, variance, known=known)
    return rows.weighted(nats.masked_fill(missing, 0.0))


def predicted_quantiles(
    likelihood: likelihoods.Likelihood,
    latent: Prediction,
    probabilities: Float[Tensor, " Q"],
    *,
    observed: bool,
) -> Float[Tensor, "Q N P"]:
    """Return quantiles of an observation y, or of f, given Gaussians of f or their mixture.

    Args:
        latent: means and variances of f, `[N P]`, or `[S N P]` of a mixture with equal weights.
        observed: whether to return quantiles of an observation y rather than f.
    """
    quantiles = quadrature.gaussian_quantiles
    if observed:
        quantiles = observation_model(likelihood).quantiles
    return quantiles(latent.mean, latent.variance, probabilities)


def is_plain(likelihood: likelihoods.Likelihood, *kinds: type[_Kind]) -> TypeGuard[_Kind]:
    """Return whether a likelihood is of such a class and inherits all methods that define it.

    A subclass with another p(y | f) must not be mistaken for its parent.
    """
    return any(
        isinstance(likelihood, kind)
        and all(getattr(type(likelihood), m) is getattr(kind, m) for m in _METHODS)
        for kind in kinds
    )


def has_noise(
    likelihood: likelihoods.Likelihood,
) -> TypeGuard[
    likelihoods.GaussianLikelihood
    | likelihoods.StudentTLikelihood
    | likelihoods.LaplaceLikelihood
    | HeteroscedasticLikelihood
]:
    """Return whether targets are the latent function plus noise and can be standardised."""
    return is_plain(likelihood, *WITH_NOISE, HeteroscedasticLikelihood)


def copy_likelihood(likelihood: likelihoods.Likelihood) -> likelihoods.Likelihood:
    """Return a validated copy for a model to own, with quadrature nodes in double precision.

    GPyTorch stores its nodes in single precision, which limits bounds to seven digits.
    """
    if isinstance(likelihood, TargetLikelihoods):
        parts = [copy_likelihood(part) for part in likelihood.parts]
        return TargetLikelihoods(parts, offset=likelihood.offset)
    _check_supported(likelihood)
    copied = copy_module(likelihood)
    if isinstance(copied, likelihoods._OneDimensionalLikelihood):
        locations, weights = np.polynomial.hermite.hermgauss(EXPECTATION_NODES)
        copied.quadrature.locations = torch.from_numpy(locations)
        copied.quadrature.weights = torch.from_numpy(weights)
    return copied


def _check_supported(likelihood: likelihoods.Likelihood) -> None:
    name = type(likelihood).__name__
    if isinstance(likelihood, likelihoods.SoftmaxLikelihood):
        if not is_plain(likelihood, likelihoods.SoftmaxLikelihood):
            raise InputError(
                "`likelihood` must be SoftmaxLikelihood itself if it acts on several latent "
                f"functions at once; got {name}, with methods of its own."
            )
        return
    own = {method for method in _METHODS if is_user_defined(likelihood, method)}
    supported = (
        isinstance(likelihood, likelihoods._OneDimensionalLikelihood)
        or is_plain(likelihood, likelihoods.GaussianLikelihood)
        or (isinstance(likelihood, likelihoods.GaussianLikelihood) and "forward" in own)
        or "expected_log_prob" in own
    )
    if not supported:
        raise InputError(
            "`likelihood` must be Gaussian, softmax, one that GPyTorch integrates in one dimension "
            "(Bernoulli, Poisson, Student-t, Laplace, Beta, negative binomial, your own subclass "
            "of `_OneDimensionalLikelihood`), or your own that defines `expected_log_prob`; "
            f"got {name}."
        )
    batched = {n: list(p.shape) for n, p in likelihood.named_parameters() if p.dim() > 1}
    if batched and not own:
        raise InputError(
            f"`likelihood` must not have a batch shape; got {name} with parameters of shape "
            f"{batched}. All target columns share one likelihood."
        )
