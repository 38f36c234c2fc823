"""What is left of a model once it is fitted: a small, self-contained predictor."""

from copy import deepcopy
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.errors import InputError
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.models.cross_covariance import Cross, cross_covariance
from winnowgp.models.kernel_blocks import covariance, prior_mean
from winnowgp.models.observations import Prediction, log_density, observation

# Rows predicted at once: more would leave the processor's cache, and take half as long again.
_ROWS = 2048


@final
class Posterior(nn.Module):
    """q(f) through M inducing points: O(M²) a row, whatever the training data were.

        q(v_p) = N(m_p, F_p F_pᵀ),  u = L v,  K_uu = L Lᵀ

    Owns copies of kernel, mean and likelihood, and what can be computed once: L; L⁻ᵀ m for means in
    O(M); and for variances, from the eigenvectors of I − F Fᵀ = U diag(s) Uᵀ, the matrix
    A = |diag(s)|^½ Uᵀ L⁻¹, with which

        var f(x) = k(x, x) − Σ_m sign(s_m) (A k)_m²,   k = k(Z, x)

    is one product. Known to be narrower than the prior everywhere, all signs are positive. In
    float32 it is as accurate as the solve V = L⁻¹ k, to about 1e-5 of the prior variance where K_uu
    is nearly singular: both are limited by the digits of k, and a fit in float32 is off by more.

    Nothing here changes with train or eval mode, and nothing requires a gradient except, if the
    caller asks, the inputs.
    """

    Z: Tensor
    q_mean: Tensor
    q_factor: Tensor
    L: Tensor
    weights: Tensor
    gain: Tensor
    signs: Tensor

    def __init__(
        self,
        kernel: Kernel,
        Z: Float[Tensor, "M D"],
        *,
        mean: Mean,
        likelihood: Likelihood,
        q_mean: Float[Tensor, "M P"],
        q_factor: Float[Tensor, "#P M M"],
        L: Float[Tensor, "M M"] | None = None,
    ) -> None:
        """Args:
        L: a factor of K_uu that is known already, as of a posterior that was saved.
        """
        super().__init__()
        self.kernel = deepcopy(kernel).requires_grad_(False)
        self.mean = deepcopy(mean).requires_grad_(False)
        self.likelihood = deepcopy(likelihood).requires_grad_(False)
        if L is None:
            L = cholesky(covariance(self.kernel, Z, Z)).L
        weights = torch.linalg.solve_triangular(L.mT, q_mean, upper=True)
        cached = {
            "Z": Z,
            "q_mean": q_mean,
            "q_factor": q_factor,
            "L": L,
            "weights": weights,
            **_gain(L, q_factor),
        }
        for name, tensor in cached.items():
            self.register_buffer(name, tensor.detach().clone())

    @property
    def M(self) -> int:
        """Number of inducing points."""
        return self.Z.shape[0]

    @property
    def P(self) -> int:
        """Number of latent functions."""
        return self.q_mean.shape[1]

    def predict_mean(self, X: Float[Tensor, "N D"]) -> Float[Tensor, "N P"]:
        """E[f(x)], O(M) a row."""
        self._check(X)
        k, _ = cross_covariance(self.kernel, self.Z)(X)
        return prior_mean(self.mean, X) + k @ self.weights

    def predict(self, X: Float[Tensor, "N D"], *, observed: bool = False) -> Prediction:
        """Mean and variance of each row, O(M²) a row.

        Args:
            observed: whether they are those of an observation y rather than of f. A class is one
                column, its mean a probability.
        """
        self._check(X)
        cross = cross_covariance(self.kernel, self.Z)
        parts = [self._latents(rows, cross) for rows in X.split(_ROWS)]
        mean, variance = (torch.cat(part) for part in zip(*parts, strict=True))
        if observed:
            return observation(self.likelihood, mean, variance)
        return Prediction(mean, variance)

    def covariance(
        self, X: Float[Tensor, "N D"], *, observed: bool = False
    ) -> Float[Tensor, "P N N"]:
        """Full covariance of the rows, one matrix an output: K − VᵀV + VᵀF FᵀV.

        Args:
            observed: whether Gaussian noise is added.
        """
        self._check(X)
        V = self._whitened(X)
        FV = self.q_factor.mT @ V
        prior = covariance(self.kernel, X, X) - V.mT @ V
        if observed:
            prior = prior + self._noise() * torch.eye(X.shape[0], dtype=X.dtype, device=X.device)
        return (prior + FV.mT @ FV).expand(self.P, -1, -1)

    def sample(
        self,
        X: Float[Tensor, "N D"],
        n: int,
        *,
        observed: bool = False,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "S N P"]:
        """`n` functions drawn jointly at the rows; O(N³) once."""
        mean = self.predict(X).mean
        L = cholesky(self.covariance(X, observed=observed)).L
        normal = torch.randn(
            (n, self.P, X.shape[0]), generator=generator, dtype=X.dtype, device=X.device
        )
        return mean + torch.einsum("pij,spj->sip", L, normal)

    def log_density(self, X: Float[Tensor, "N D"], Y: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        """log p(y) under the predictive distribution of each row and target, in nats."""
        latent = self.predict(X)
        return log_density(self.likelihood, Y, latent.mean, latent.variance)

    def _latents(
        self, X: Float[Tensor, "N D"], cross: Cross
    ) -> tuple[Float[Tensor, "N P"], Float[Tensor, "N P"]]:
        k, kff = cross(X)
        mean = prior_mean(self.mean, X) + k @ self.weights
        # [#P N M] with [#P M 1]
        explained = (k @ self.gain).square() @ self.signs[..., None]
        return mean, (kff - explained[..., 0]).clamp_min(0).mT.expand(mean.shape)

    def _noise(self) -> Tensor:
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise InputError(
                f"{type(self.likelihood).__name__} has no Gaussian noise to add to a covariance; "
                "ask for that of the function, with `observed=False`."
            )
        return self.likelihood.noise.reshape(())

    def _whitened(self, X: Float[Tensor, "N D"]) -> Float[Tensor, "M N"]:
        return solve_lower(self.L, covariance(self.kernel, self.Z, X))

    def _check(self, X: Tensor) -> None:
        if X.dim() != 2 or X.shape[1] != self.Z.shape[1]:
            raise InputError(
                f"`X` must have {self.Z.shape[1]} columns as in training; got {list(X.shape)}."
            )


def _gain(L: Float[Tensor, "M M"], q_factor: Float[Tensor, "#P M M"]) -> dict[str, Tensor]:
    """Aᵀ of each output, `[#P M M]`, and the signs `[#P M]`; O(P M³) once."""
    eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
    s, U = torch.linalg.eigh(eye - q_factor @ q_factor.mT)
    # Uᵀ L⁻¹, as its transpose L⁻ᵀ U.
    raised = torch.linalg.solve_triangular(L.mT, U, upper=True)
    return {"gain": raised * s.abs().sqrt()[..., None, :], "signs": s.sign()}
