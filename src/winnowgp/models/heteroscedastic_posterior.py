"""Predictions with noise that depends on the inputs: Gaussian mixtures over the log noise."""

from copy import deepcopy
from typing import final

import torch
from gpytorch.likelihoods import GaussianLikelihood
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.models.likelihoods import HeteroscedasticLikelihood, observation_model
from winnowgp.models.observations import Prediction
from winnowgp.models.posterior import CompositePosterior, Posterior
from winnowgp.models.quantiles import check_probabilities


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
