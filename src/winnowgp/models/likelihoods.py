"""Observation models: integrals of GPyTorch likelihoods under independent Gaussian latents.

`observation_model` maps a GPyTorch likelihood to the class that computes its expected log
probability, predictive log density and predictive moments. A likelihood either acts on one latent
function per target column, or on several at once: softmax on one per class, and noise that depends
on the inputs on the function and its log noise. Integrals over one latent are closed-form
(Gaussian, Laplace), reduced to a smooth integral (Student-t), evaluated on graded nodes (counts),
or Gauss-Hermite quadrature, which is accurate where the likelihood is not much narrower than q(f).
Integrals of softmax are means over fixed quasi-random nodes. Nothing here is random.
"""

from math import log, pi
from typing import TypeGuard, TypeVar, final

import numpy as np
import torch
from gpytorch import likelihoods
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Distribution, Normal

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import quadrature
from winnowgp.models import quantiles as inversion
from winnowgp.models.kernels import copy_module
from winnowgp.models.observations import (
    DENSITY_NODES,
    EXPECTATION_NODES,
    ObservationModel,
    Prediction,
    UserDefinedObservations,
    is_user_defined,
)
from winnowgp.models.target_likelihoods import TargetLikelihoods, TargetObservations

# Quasi-random nodes for densities of softmax; each is used with its reflection.
SOFTMAX_DENSITY_NODES = 512

_MIN_SOFTMAX_NODES = 16
# Numbers in memory at once for densities of softmax: 32 MiB.
_SOFTMAX_NUMBERS = 2**22

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

    def log_density(
        self, Y: Tensor, mean: Tensor, variance: Tensor, *, components: int = 1
    ) -> Tensor:
        return Normal(mean, (variance + self.likelihood.noise).sqrt()).log_prob(Y)

    def predict(self, mean: Tensor, variance: Tensor, *, components: int = 1) -> Prediction:
        return Prediction(mean, variance + self.likelihood.noise)

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return torch.special.ndtr((Y - mean) / (variance + self.likelihood.noise).sqrt())

    def _quantiles(self, mean: Tensor, variance: Tensor, probabilities: Tensor) -> Tensor:
        return inversion.gaussian_quantiles(mean, variance + self.likelihood.noise, probabilities)


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

    def log_density(
        self, Y: Tensor, mean: Tensor, variance: Tensor, *, components: int = 1
    ) -> Tensor:
        f, wide, weights = self._mixture(mean, variance)
        return (Normal(f, wide).log_prob(Y) + weights.log()).logsumexp(0)

    def predict(self, mean: Tensor, variance: Tensor, *, components: int = 1) -> Prediction:
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
        return quadrature.student_expectation(self.likelihood, Y, mean, variance)

    def log_density(
        self, Y: Tensor, mean: Tensor, variance: Tensor, *, components: int = 1
    ) -> Tensor:
        return quadrature.student_log_density(self.likelihood, Y, mean, variance)

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return inversion.student_cdf(self.likelihood, Y, mean, variance)


@final
class LaplaceObservations(ObservationModel):
    """Laplace noise, in closed form."""

    def initial_precision(self) -> Tensor:
        return self.likelihood.noise.detach().reciprocal()

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return quadrature.laplace_expectation(
            self.likelihood, Y, mean, quadrature.standard_deviation(variance)
        )

    def log_density(
        self, Y: Tensor, mean: Tensor, variance: Tensor, *, components: int = 1
    ) -> Tensor:
        return quadrature.laplace_log_density(
            self.likelihood, Y, mean, quadrature.standard_deviation(variance)
        )

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return inversion.laplace_cdf(self.likelihood, Y, mean, variance)


@final
class BernoulliObservations(ObservationModel):
    """Two classes 0 and 1 under a probit link."""

    def check_targets(self, Y: Float[Tensor, "N P"]) -> None:
        if not bool(((Y == 0) | (Y == 1)).all()):
            raise InputError(
                f"Bernoulli targets must be 0 or 1; got {_examples(Y[(Y != 0) & (Y != 1)])}."
            )

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Integrate log Φ, which GPyTorch's own `log_prob` gets wrong by 2e-3 nats at z = −1."""
        z, weights = quadrature.hermite_nodes(EXPECTATION_NODES, mean)
        flat = quadrature.probit_expectation(
            (2 * Y - 1).expand(mean.shape).flatten(),
            mean.flatten(),
            variance.flatten(),
            nodes=z.flatten(),
            weights=weights.flatten(),
        )
        return flat.reshape(mean.shape)

    def log_density(
        self, Y: Tensor, mean: Tensor, variance: Tensor, *, components: int = 1
    ) -> Tensor:
        # E[Φ((2y − 1) f)] = Φ((2y − 1) mean / √(1 + variance))
        return torch.special.log_ndtr((2 * Y - 1) * mean / (1 + variance).sqrt())

    def predict(self, mean: Tensor, variance: Tensor, *, components: int = 1) -> Prediction:
        probability = torch.special.ndtr(mean / (1 + variance).sqrt())
        return Prediction(probability, probability * (1 - probability))

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        raise InputError("classes have no quantiles; predict their probabilities instead.")


@final
class CountObservations(ObservationModel):
    """Poisson or negative binomial counts, on nodes graded towards where p(y | f) changes fast."""

    likelihood: quadrature.Counts

    def check_targets(self, Y: Float[Tensor, "N P"]) -> None:
        impossible = (Y < 0) | (Y.round() != Y)
        if bool(impossible.any()):
            raise InputError(
                f"counts must be whole numbers of at least 0; got {_examples(Y[impossible])}."
            )

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        nodes = quadrature.hermite_nodes(EXPECTATION_NODES, mean)
        return quadrature.count_expectation(
            self.likelihood, Y, mean, quadrature.standard_deviation(variance), nodes=nodes
        )

    def log_density(
        self, Y: Tensor, mean: Tensor, variance: Tensor, *, components: int = 1
    ) -> Tensor:
        return quadrature.count_log_density(
            self.likelihood, Y, mean, quadrature.standard_deviation(variance)
        )

    def predict(self, mean: Tensor, variance: Tensor, *, components: int = 1) -> Prediction:
        z, weights = quadrature.hermite_nodes(DENSITY_NODES, mean)
        f = mean + quadrature.standard_deviation(variance) * z
        return self._moments(f.clamp_min(quadrature.LOWEST_RATE), weights)

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return inversion.count_cdf(self.likelihood, Y, mean, variance)


@final
class BetaObservations(ObservationModel):
    """Proportions strictly between 0 and 1."""

    def check_targets(self, Y: Float[Tensor, "N P"]) -> None:
        if not bool(((Y > 0) & (Y < 1)).all()):
            raise InputError(
                "Beta targets must lie strictly between 0 and 1; "
                f"got {_examples(Y[(Y <= 0) | (Y >= 1)])}."
            )


@final
class SoftmaxObservations(ObservationModel):
    """Class numbers in one column; each class probability depends on all latent functions."""

    likelihood: likelihoods.SoftmaxLikelihood

    def num_latents(self, targets: int) -> int:
        if targets != 1:
            raise InputError(
                f"softmax needs one column of class numbers; got {targets} target columns."
            )
        return self.likelihood.num_features

    def check_targets(self, Y: Float[Tensor, "N P"]) -> None:
        C = self.likelihood.num_classes
        impossible = (Y < 0) | (Y >= C) | (Y.round() != Y)
        if bool(impossible.any()):
            raise InputError(
                f"softmax targets must be class numbers 0 to {C - 1}; "
                f"got {_examples(Y[impossible])}."
            )

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        if self.likelihood.mixing_weights is None:
            classes = Y[:, 0].long().expand(mean.shape[:-1]).flatten()
            latents = (mean.reshape(-1, mean.shape[-1]), variance.reshape(-1, mean.shape[-1]))
            return quadrature.softmax_expectation(classes, *latents).reshape(*mean.shape[:-1], 1)
        f = _latent_nodes(mean, variance, quadrature.SOFTMAX_NODES)
        observed = self._logits(mean).gather(-1, Y.long().expand(*mean.shape[:-1], 1))
        return observed - self._logits(f).logsumexp(-1, keepdim=True).mean(0)

    def log_density(
        self, Y: Tensor, mean: Tensor, variance: Tensor, *, components: int = 1
    ) -> Tensor:
        return self._log_probability(mean, variance, components).gather(1, Y.long())

    def predict(self, mean: Tensor, variance: Tensor, *, components: int = 1) -> Prediction:
        probability = self._log_probability(mean, variance, components).exp()
        return Prediction(probability, probability * (1 - probability))

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        raise InputError("classes have no quantiles; predict their probabilities instead.")

    def coupling(self, mean: Tensor, variance: Tensor) -> Float[Tensor, "N F F"]:
        if self.likelihood.mixing_weights is None:
            return quadrature.softmax_coupling(mean, variance)
        mixing = self.likelihood.mixing_weights.detach()
        p = (
            self._logits(_latent_nodes(mean, variance, quadrature.SOFTMAX_NODES))
            .softmax(-1)
            .detach()
        )
        p = p.permute(1, 2, 0)
        classes = torch.diag_embed(p.mean(-1)) - p @ p.mT / p.shape[-1]
        return mixing.mT @ classes @ mixing

    def _logits(self, f: Tensor) -> Tensor:
        """Return the logits; GPyTorch's `forward` transposes f if it has a row per class."""
        mixing = self.likelihood.mixing_weights
        return f if mixing is None else f @ mixing.mT

    def _log_probability(
        self, mean: Float[Tensor, "N F"], variance: Float[Tensor, "N F"], components: int
    ) -> Float[Tensor, "N C"]:
        """Return log E_q(f)[softmax(f)] of each row, in blocks of rows."""
        count = max(_MIN_SOFTMAX_NODES, SOFTMAX_DENSITY_NODES // components)
        widest = max(self.likelihood.num_classes, self.likelihood.num_features)
        rows = max(1, _SOFTMAX_NUMBERS // (2 * max(count, 2 * widest) * widest))
        blocks = zip(mean.split(rows), variance.split(rows), strict=True)
        nodes = (_latent_nodes(m, v, count) for m, v in blocks)
        return torch.cat(
            [self._logits(f).log_softmax(-1).logsumexp(0) - log(len(f)) for f in nodes]
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
    quantiles = inversion.gaussian_quantiles
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


def _latent_nodes(mean: Tensor, variance: Tensor, count: int) -> Tensor:
    """Return nodes `[T *S N F]` of F independent Gaussians per row, the same for every row."""
    nodes = quadrature.normal_nodes(count, mean.shape[-1]).to(mean)
    shape = [len(nodes)] + [1] * (mean.dim() - 1) + [mean.shape[-1]]
    return mean + quadrature.standard_deviation(variance) * nodes.reshape(shape)


def _examples(values: Tensor) -> str:
    return ", ".join(f"{v:g}" for v in values.unique()[:5].tolist())
