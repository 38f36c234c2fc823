"""Posteriors: cached predictors that need no training data."""

from abc import ABC, abstractmethod
from copy import deepcopy
from typing import Any, final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.linalg import cholesky, definite_cholesky, solve_lower, threads_for
from winnowgp.models.kernels import Cross, copy_module, covariance, cross_covariance, prior_mean
from winnowgp.models.likelihoods import observation_model, predicted_quantiles
from winnowgp.models.observations import Prediction

# Rows predicted at once: larger blocks exceed the processor's cache and take half as long again.
_ROWS = 2048

# Jitter of joint covariances, relative to the prior variance: without it, rounding makes the
# covariance of nearly coincident rows indefinite, and sampling from it fails.
_JITTER = {torch.float64: 1e-10, torch.float32: 1e-5}
# Largest rounding error of eigenvalues between zero and one.
_ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-6}


@final
class Posterior(nn.Module):
    """q(f) with M inducing points. Predictions cost O(M²) per row, whatever the training data were.

        q(v_p) = N(m_p, F_p F_pᵀ),  u = L v,  K_uu = L Lᵀ

    A posterior holds copies of kernel, mean and likelihood, and caches L; L⁻ᵀ m for means in O(M);
    and for variances, from I − F Fᵀ = C diag(s) Cᵀ, the matrix A = Cᵀ L⁻¹, with which

        var f(x) = k(x, x) − Σ_m s_m (A k)_m²,   k = k(Z, x)

    is one product. If q(f) is nowhere wider than the prior, all signs s_m are one and C is a
    Cholesky factor; otherwise C comes from the eigenvectors, which take 25 times as long.

    In float32 the product is as accurate as the solve V = L⁻¹ k, to about 1e-5 of the prior
    variance if K_uu is nearly singular: both are limited by the precision of k, and a fit in
    float32 has larger errors.

    The result does not depend on train or eval mode, and is differentiable in the inputs only.

    Args:
        kernel: a GPyTorch kernel; copied.
        Z: inducing points.
        mean: prior mean; copied.
        likelihood: a GPyTorch likelihood; copied.
        q_mean: means m of the whitened q(v).
        q_factor: factors F of its covariances; one for all outputs, or one each.
        L: Cholesky factor of K_uu, if it is known, such as that of a saved posterior.
        gain: Aᵀ, if it is known.
        signs: signs s that belong to `gain`.
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
        gain: Float[Tensor, "#P M M"] | None = None,
        signs: Float[Tensor, "#P M"] | None = None,
    ) -> None:
        super().__init__()
        self.kernel = copy_module(kernel).requires_grad_(False)
        self.mean = copy_module(mean).requires_grad_(False)
        self.likelihood = copy_module(likelihood).requires_grad_(False)
        if L is None:
            L = cholesky(covariance(self.kernel, Z, Z)).L
        if gain is None or signs is None:
            gain, signs = _gain(L, q_factor)
        weights = torch.linalg.solve_triangular(L.mT, q_mean, upper=True)
        cached = {
            "Z": Z,
            "q_mean": q_mean,
            "q_factor": q_factor,
            "L": L,
            "weights": weights,
            "gain": gain,
            "signs": signs,
        }
        for name, tensor in cached.items():
            self.register_buffer(name, tensor.detach().clone())

    @property
    def described(self) -> "Posterior":
        """The posterior itself; for a mixture, the posterior that its attributes describe."""
        return self

    @property
    def M(self) -> int:
        """Number of inducing points."""
        return self.Z.shape[0]

    @property
    def P(self) -> int:
        """Number of latent functions."""
        return self.q_mean.shape[1]

    def predict_mean(self, X: Float[Tensor, "N D"]) -> Float[Tensor, "N P"]:
        """Return E[f(x)] of each row, O(M) per row."""
        self._check(X)
        cross = cross_covariance(self.kernel, self.Z)
        means = [cross(rows)[0] @ self.weights for rows in X.split(_ROWS)]
        return prior_mean(self.mean, X) + torch.cat(means)

    def predict(
        self,
        X: Float[Tensor, "N D"],
        *,
        observed: bool = False,
        noise: Float[Tensor, "N P"] | None = None,
    ) -> Prediction:
        """Return mean and variance of each row, O(M²) per row.

        Args:
            observed: whether to predict an observation y rather than f. Classes have one column
                each, whose mean is a probability.
            noise: known noise variances of the observations, in addition to the learnt one.
        """
        self._check(X)
        cross = cross_covariance(self.kernel, self.Z)
        blocks = [self._latents(rows, cross) for rows in X.split(_ROWS)]
        mean, variance = (torch.cat(moments) for moments in zip(*blocks, strict=True))
        if observed:
            variance = self._with_known(variance, noise)
            return observation_model(self.likelihood).predict(mean, variance)
        return Prediction(mean, variance)

    def covariance(
        self,
        X: Float[Tensor, "N D"],
        *,
        observed: bool = False,
        noise: Float[Tensor, "N P"] | None = None,
    ) -> Float[Tensor, "P N N"]:
        """Return the full covariance of the rows, one matrix per output: K − VᵀV + VᵀF FᵀV.

        Args:
            observed: whether to add Gaussian noise.
            noise: known noise variances of the observations, in addition to the learnt one.
        """
        self._check(X)
        V = self._whitened(X)
        FV = self.q_factor.mT @ V
        prior = covariance(self.kernel, X, X) - V.mT @ V
        if observed:
            learnt = self._noise().reshape(-1, 1).expand(-1, len(X))  # [#P N]
            prior = prior + torch.diag_embed(learnt if noise is None else learnt + noise.mT)
        return (prior + FV.mT @ FV).expand(self.P, -1, -1)

    def sample(
        self,
        X: Float[Tensor, "N D"],
        n: int,
        *,
        observed: bool = False,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "S N P"]:
        """Return `n` samples of the functions, drawn jointly at the rows; O(N³) once.

        Args:
            observed: whether to sample observations y, with Gaussian noise, rather than f.
        """
        mean = self.predict(X).mean
        L = cholesky(self.covariance(X, observed=observed)).L
        normal = torch.randn(
            (n, self.P, X.shape[0]), generator=generator, dtype=X.dtype, device=X.device
        )
        return mean + torch.einsum("pij,spj->sip", L, normal)

    def log_density(
        self,
        X: Float[Tensor, "N D"],
        Y: Float[Tensor, "N T"],
        *,
        noise: Float[Tensor, "N T"] | None = None,
    ) -> Float[Tensor, "N T"]:
        """Return log p(y) under the predictive distribution of each row and target, in nats.

        Args:
            Y: targets; the density of a missing one, which is NaN, is NaN.
            noise: known noise variances of the observations, in addition to the learnt one.
        """
        latent, missing = self.predict(X), torch.isnan(Y)
        variance = self._with_known(latent.variance, noise)
        filled = torch.where(missing, 0.0, Y)
        nats = observation_model(self.likelihood).log_density(filled, latent.mean, variance)
        return torch.where(missing, torch.nan, nats)

    def quantiles(
        self,
        X: Float[Tensor, "N D"],
        probabilities: Float[Tensor, " Q"],
        *,
        observed: bool = True,
        noise: Float[Tensor, "N P"] | None = None,
    ) -> Float[Tensor, "Q N T"]:
        """Return quantiles of the predictive distribution of each row and target.

        Args:
            probabilities: Q probabilities, strictly between 0 and 1.
            observed: whether to return quantiles of an observation y rather than f.
            noise: known noise variances of the observations, in addition to the learnt one.
        """
        latent = self.predict(X)
        if observed:
            latent = Prediction(latent.mean, self._with_known(latent.variance, noise))
        return predicted_quantiles(self.likelihood, latent, probabilities, observed=observed)

    @torch.no_grad()
    def condition_on(self, data: Dataset) -> "Posterior":
        """Return q(f) after observing N more rows with Gaussian noise, with the same M points.

        With V = L⁻¹ K_uf and q(v) = N(m, F Fᵀ), precisions and their products with means add up:

            (F Fᵀ)'⁻¹ = (F Fᵀ)⁻¹ + V Vᵀ/σ²,   m' = m + (F Fᵀ)' V (y − Vᵀm)/σ²,

        computed as F' = F R⁻ᵀ with R Rᵀ = I + FᵀV VᵀF/σ². For the optimal q(u) of a `SparseGP` the
        result is that of all rows together at the same parameters. O(P M² (M + N)); the rows are
        not stored.
        """
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise InputError(
                "`condition_on` needs a posterior with a GaussianLikelihood; this one has a "
                f"{type(self.likelihood).__name__}. Fit the model to all rows instead."
            )
        if data.P != self.P:
            raise InputError(f"`data` must have {self.P} target columns; got {data.P}.")
        data.require_plain_targets("`condition_on`")
        noise = self.likelihood.noise.reshape(-1)  # [P] or [1]
        V, F = self._whitened(data.X), self.q_factor
        A = F.mT @ V / noise.sqrt()[:, None, None]
        eye = torch.eye(self.M, dtype=V.dtype, device=V.device)
        R = definite_cholesky(eye + A @ A.mT)
        new_factor = solve_lower(R, F.mT).mT
        residual = data.Y - prior_mean(self.mean, data.X) - V.mT @ self.q_mean
        # One column per output: [P M 1] = [#P M M] @ [P M 1].
        linear = (V @ residual / noise).mT[..., None]
        step = new_factor @ (new_factor.mT @ linear)
        return Posterior(
            self.kernel,
            self.Z,
            mean=self.mean,
            likelihood=self.likelihood,
            q_mean=self.q_mean + step[..., 0].mT,
            q_factor=new_factor,
            L=self.L,
        )

    def _latents(
        self, X: Float[Tensor, "N D"], cross: Cross
    ) -> tuple[Float[Tensor, "N P"], Float[Tensor, "N P"]]:
        k, kff = cross(X)
        mean = prior_mean(self.mean, X) + k @ self.weights
        factors = zip(self.gain, self.signs, strict=True)
        explained = torch.stack([(k @ A).square_() @ signs for A, signs in factors])  # [#P N]
        return mean, (kff - explained).clamp_min(0).mT.expand(mean.shape)

    def _noise(self) -> Tensor:
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise InputError(
                f"{type(self.likelihood).__name__} has no Gaussian noise to add to a covariance; "
                "pass `observed=False` for the covariance of the latent function."
            )
        return self.likelihood.noise

    def _with_known(
        self, variance: Float[Tensor, "N P"], noise: Float[Tensor, "N P"] | None
    ) -> Float[Tensor, "N P"]:
        """Return the variance of f plus known noise, to which the likelihood adds its own."""
        if noise is None:
            return variance
        self._noise()
        return variance + noise

    def _whitened(self, X: Float[Tensor, "N D"]) -> Float[Tensor, "M N"]:
        return solve_lower(self.L, covariance(self.kernel, self.Z, X))

    def _check(self, X: Tensor) -> None:
        if X.dim() != 2 or X.shape[1] != self.Z.shape[1]:
            raise InputError(
                f"`X` must have {self.Z.shape[1]} columns as in training; got {list(X.shape)}."
            )


def _gain(L: Float[Tensor, "M M"], q_factor: Float[Tensor, "#P M M"]) -> tuple[Tensor, Tensor]:
    """Return Aᵀ of each output, `[#P M M]`, and the signs `[#P M]`; O(P M³) once."""
    eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
    with threads_for(10.0 * q_factor.numel() * len(L)):
        explained = eye - q_factor @ q_factor.mT
        # Rounding makes zero eigenvalues negative.
        C, failed = torch.linalg.cholesky_ex(explained + _ROUNDING[L.dtype] * eye)
        signs = C.new_ones(C.shape[:-1])
        if bool(failed.any()):
            s, U = torch.linalg.eigh(explained)
            C, signs = U * s.abs().sqrt()[..., None, :], s.sign()
        # Cᵀ L⁻¹, as its transpose L⁻ᵀ C.
        gain = torch.linalg.solve_triangular(L.mT, C, upper=True)
    # Contiguous, as it is after loading: another layout would round differently.
    return gain.contiguous(), signs


class CompositePosterior(nn.Module, ABC):
    """Several posteriors that predict together; `Z`, `kernel` and `mean` describe one of them."""

    @property
    @abstractmethod
    def described(self) -> Posterior:
        """The posterior that the attributes describe."""

    @property
    def M(self) -> int:
        """Number of inducing points of the described posterior."""
        return self.described.M

    @property
    def P(self) -> int:
        """Number of latent functions."""
        return self.described.P

    @property
    def Z(self) -> Float[Tensor, "M D"]:
        """Inducing points of the described posterior."""
        return self.described.Z

    @property
    def kernel(self) -> Kernel:
        """Kernel of the described posterior."""
        return self.described.kernel

    @property
    def mean(self) -> Mean:
        """Prior mean of the described posterior."""
        return self.described.mean


@final
class JointPosterior(nn.Module):
    """The joint q(f) of a `Posterior` at batches of rows, conditioned exactly on further rows.

    With the posterior's mean m and covariance c(x, x') = k(x, x') − Σ_m s_m (A k)_m (A k')_m, rows
    X' and observations y' = f(X') + e of noise variances r, and S = c(X', X') + diag(r):

        mean(x) = m(x) + c(x, X') S⁻¹ (y' − m(X')),   cov(x, x') = c(x, x') − c(x, X') S⁻¹ c(X', x')

    Unlike `Posterior.condition_on`, which updates q(u), this also conditions the residual process,
    so that observations far from the inducing points take effect. Rows and observations may have
    batch axes, and the result is differentiable in them. Variances have 1e-10 of the prior variance
    added (1e-5 in float32). O(M²) per row and O(n³) once for n further rows; for many rows use
    `Posterior.condition_on`.

    Args:
        posterior: posterior of a fitted model.
        X: further rows, if any.
        Y: their observations; batch axes are alternatives, such as fantasies.
        noise: noise variances of the observations.
    """

    X: Tensor
    Y: Tensor
    noise: Tensor
    root: Tensor
    weights: Tensor

    def __init__(
        self,
        posterior: Posterior,
        *,
        X: Float[Tensor, "*b n D"] | None = None,
        Y: Float[Tensor, "*c n P"] | None = None,
        noise: Float[Tensor, "*#c n P"] | None = None,
    ) -> None:
        super().__init__()
        none = posterior.q_mean[:0]
        X = posterior.Z[:0] if X is None else X
        Y = none if Y is None else Y
        noise = none if noise is None else noise
        self.posterior = posterior
        mean, G = self._features(X)[:2]
        S = self._covariance(X, G, X, G) + torch.diag_embed(noise.mT)
        # A semi-definite matrix plus the noise: no jitter is needed.
        root = definite_cholesky(S)
        weights = torch.cholesky_solve((Y.mT - mean)[..., None], root)[..., 0]
        observed = {"X": X, "Y": Y, "noise": noise, "root": root, "weights": weights}
        for name, tensor in observed.items():
            self.register_buffer(name, tensor)

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of the observations; empty if there are none."""
        return self.weights.shape[:-2]

    def forward(
        self, X: Float[Tensor, "*d q D"]
    ) -> tuple[Float[Tensor, "*e P q"], Float[Tensor, "*e P q q"]]:
        """Return means and covariances of the rows, one per output.

        Batch axes of `X` and of the observations are broadcast.
        """
        mean, G, variance = self._features(X)
        if X.shape[-2] == 1:
            prior = variance[..., None, :, None]
            cov = prior - self._explained(G, G)
        else:
            cov = self._covariance(X, G, X, G)
        if self.X.shape[-2] > 0:
            cross = self._covariance(self.X, self._features(self.X)[1], X, G)
            mean = mean + (cross.mT @ self.weights[..., None])[..., 0]
            known = solve_lower(self.root, cross)
            cov = cov - known.mT @ known
        cov = cov + torch.diag_embed(_JITTER[X.dtype] * variance)[..., None, :, :]
        batch = torch.broadcast_shapes(X.shape[:-2], self.batch_shape)
        P, q = self.posterior.P, X.shape[-2]
        return mean.expand(*batch, P, q), cov.expand(*batch, P, q, q)

    def condition_on(
        self,
        X: Float[Tensor, "*b n D"],
        Y: Float[Tensor, "*c n P"],
        *,
        noise: Float[Tensor, "*#c n P"],
    ) -> "JointPosterior":
        """Return the posterior given these observations as well."""
        return JointPosterior(
            self.posterior,
            X=_appended(self.X, X),
            Y=_appended(self.Y, Y),
            noise=_appended(self.noise, noise),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "JointPosterior":
        """Copy the observations without their autograd history, which PyTorch cannot copy."""
        X, Y, noise = (tensor.detach().clone() for tensor in (self.X, self.Y, self.noise))
        copy = JointPosterior(deepcopy(self.posterior, memo), X=X, Y=Y, noise=noise)
        return copy.train(self.training)

    def _features(
        self, X: Float[Tensor, "*d q D"]
    ) -> tuple[Float[Tensor, "*d P q"], Float[Tensor, "*d #P q M"], Float[Tensor, "*d q"]]:
        """Return m(X), (A k)ᵀ and k(x, x) of all rows in one product."""
        q, flat = self.posterior, X.reshape(-1, X.shape[-1])
        k, variance = cross_covariance(q.kernel, q.Z)(flat)
        mean = prior_mean(q.mean, flat) + k @ q.weights
        G = k @ q.gain
        return (
            mean.reshape(*X.shape[:-1], q.P).mT,
            G.reshape(len(q.gain), *X.shape[:-1], q.M).movedim(0, -3),
            variance.reshape(X.shape[:-1]),
        )

    def _covariance(
        self, A: Float[Tensor, "*a r D"], GA: Tensor, B: Float[Tensor, "*b q D"], GB: Tensor
    ) -> Float[Tensor, "*ab #P r q"]:
        """Return c(A, B)."""
        batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        prior = covariance(
            self.posterior.kernel, A.expand(*batch, *A.shape[-2:]), B.expand(*batch, *B.shape[-2:])
        )
        return prior[..., None, :, :] - self._explained(GA, GB)

    def _explained(
        self, GA: Float[Tensor, "*a #P r M"], GB: Float[Tensor, "*b #P q M"]
    ) -> Float[Tensor, "*ab #P r q"]:
        return (GA * self.posterior.signs[:, None, :]) @ GB.mT


def _appended(old: Float[Tensor, "*a n C"], new: Float[Tensor, "*b m C"]) -> Tensor:
    batch = torch.broadcast_shapes(old.shape[:-2], new.shape[:-2])
    return torch.cat([t.expand(*batch, *t.shape[-2:]) for t in (old, new)], -2)
