"""Posteriors: cached predictors that need no training data."""

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
from winnowgp.linalg import cholesky, definite_cholesky, solve_lower
from winnowgp.models.kernels import Cross, covariance, cross_covariance, prior_mean
from winnowgp.models.likelihoods import Prediction, observation_model

# What is left of a model once it is fitted: a small, self-contained predictor.


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
            return observation_model(self.likelihood).predict(mean, variance)
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
        return observation_model(self.likelihood).log_density(Y, latent.mean, latent.variance)

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


# A posterior that has seen more rows.


@torch.no_grad()
def updated_posterior(posterior: Posterior, data: Dataset) -> Posterior:
    """q(f) after N more rows with Gaussian noise, through the same M points.

    With V = L⁻¹ K_uf and q(v) = N(m, F Fᵀ), precisions and their products with means add up:

        (F Fᵀ)'⁻¹ = (F Fᵀ)⁻¹ + V Vᵀ/σ²,   m' = m + (F Fᵀ)' V (y − Vᵀm)/σ²,

    computed as F' = F R⁻ᵀ with R Rᵀ = I + FᵀV VᵀF/σ². For the best q(u) of a `SparseGP` the result
    is that of all rows together at the same parameters. O(P M² (M + N)); the rows are forgotten.
    """
    noise = _noise(posterior)  # [P] or [1]
    if data.P != posterior.P:
        raise InputError(f"`data` must have {posterior.P} target columns; got {data.P}.")
    V = solve_lower(posterior.L, covariance(posterior.kernel, posterior.Z, data.X))
    F = posterior.q_factor
    A = F.mT @ V / noise.sqrt()[:, None, None]
    eye = torch.eye(posterior.M, dtype=V.dtype, device=V.device)
    R = definite_cholesky(eye + A @ A.mT)
    new_factor = solve_lower(R, F.mT).mT
    missed = data.Y - prior_mean(posterior.mean, data.X) - V.mT @ posterior.q_mean
    # One column an output: [P M 1] = [#P M M] @ [P M 1].
    pull = (V @ missed / noise).mT[..., None]
    step = new_factor @ (new_factor.mT @ pull)
    return Posterior(
        posterior.kernel,
        posterior.Z,
        mean=posterior.mean,
        likelihood=posterior.likelihood,
        q_mean=posterior.q_mean + step[..., 0].mT,
        q_factor=new_factor,
        L=posterior.L,
    )


def _noise(posterior: Posterior) -> Float[Tensor, " #P"]:
    if not isinstance(posterior.likelihood, GaussianLikelihood):
        raise InputError(
            "only a posterior with Gaussian noise takes more rows in closed form; this one has a "
            f"{type(posterior.likelihood).__name__}. Fit again instead."
        )
    return posterior.likelihood.noise.reshape(-1)


# q(f) at batches of rows jointly, and what it becomes once more rows are observed.


# Of the prior variance, added to that of each row: without it, rounding makes the covariance of
# rows that nearly coincide indefinite, and whoever draws from it stumbles.
_JITTER = {torch.float64: 1e-10, torch.float32: 1e-5}


@final
class JointPosterior(nn.Module):
    """The Gaussian process that a `Posterior` is, conditioned exactly on rows observed since.

    With the posterior's mean m and covariance c(x, x') = k(x, x') − Σ_m s_m (A k)_m (A k')_m, rows
    X' and observations y' = f(X') + e of noise variances r, and S = c(X', X') + diag(r):

        mean(x) = m(x) + c(x, X') S⁻¹ (y' − m(X')),   cov(x, x') = c(x, x') − c(x, X') S⁻¹ c(X', x')

    Unlike an update of q(u), this tells also what the inducing points cannot see, so that a value
    observed where they are far is believed there. Rows and observations may have batch axes, and
    everything is differentiable in all of them. Variances have 1e-10 of the prior's added (1e-5 in
    float32). O(M²) a row and O(n³) once for n rows observed; for many of them, see
    `updated_posterior`.

    Args:
        posterior: of a finished model.
        X: rows observed since, if any.
        Y: what was observed, in as many batches as there are alternatives.
        noise: its variances.
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
        mean, G = self._seen(X)[:2]
        S = self._covariance(X, G, X, G) + torch.diag_embed(noise.mT)
        # A semi-definite matrix and at least the least noise: no jitter is needed.
        root = definite_cholesky(S)
        weights = torch.cholesky_solve((Y.mT - mean)[..., None], root)[..., 0]
        observed = {"X": X, "Y": Y, "noise": noise, "root": root, "weights": weights}
        for name, tensor in observed.items():
            self.register_buffer(name, tensor)

    @property
    def batch_shape(self) -> torch.Size:
        """Of the alternatives that were observed; none if nothing was."""
        return self.weights.shape[:-2]

    def forward(
        self, X: Float[Tensor, "*d q D"]
    ) -> tuple[Float[Tensor, "*e P q"], Float[Tensor, "*e P q q"]]:
        """Means of the rows, and their covariances, output by output; the batch axes are those of
        `X` and of the observations, broadcast."""
        mean, G, variance = self._seen(X)
        if X.shape[-2] == 1:
            prior = variance[..., None, :, None]
            cov = prior - self._explained(G, G)
        else:
            cov = self._covariance(X, G, X, G)
        if self.X.shape[-2] > 0:
            cross = self._covariance(self.X, self._seen(self.X)[1], X, G)
            mean = mean + (cross.mT @ self.weights[..., None])[..., 0]
            known = solve_lower(self.root, cross)
            cov = cov - known.mT @ known
        cov = cov + torch.diag_embed(_JITTER[X.dtype] * variance)[..., None, :, :]
        batch = torch.broadcast_shapes(X.shape[:-2], self.batch_shape)
        P, q = self.posterior.P, X.shape[-2]
        return mean.expand(*batch, P, q), cov.expand(*batch, P, q, q)

    def conditioned(
        self,
        X: Float[Tensor, "*b n D"],
        Y: Float[Tensor, "*c n P"],
        *,
        noise: Float[Tensor, "*#c n P"],
    ) -> "JointPosterior":
        """The process that has observed these rows as well."""
        return JointPosterior(
            self.posterior,
            X=_appended(self.X, X),
            Y=_appended(self.Y, Y),
            noise=_appended(self.noise, noise),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "JointPosterior":
        """With the same rows, and without what these were computed from.

        PyTorch refuses to copy tensors that have a history.
        """
        X, Y, noise = (tensor.detach().clone() for tensor in (self.X, self.Y, self.noise))
        copy = JointPosterior(deepcopy(self.posterior, memo), X=X, Y=Y, noise=noise)
        return copy.train(self.training)

    def _seen(
        self, X: Float[Tensor, "*d q D"]
    ) -> tuple[Float[Tensor, "*d P q"], Float[Tensor, "*d #P q M"], Float[Tensor, "*d q"]]:
        """m(X), (A k)ᵀ and k(x, x) of all rows in one product."""
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
        """c(A, B)."""
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
