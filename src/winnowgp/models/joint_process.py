"""q(f) at batches of rows jointly, and what it becomes once more rows are observed."""

from copy import deepcopy
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.linalg import definite_cholesky, solve_lower
from winnowgp.models.cross_covariance import cross_covariance
from winnowgp.models.kernel_blocks import covariance, prior_mean
from winnowgp.models.posterior import Posterior

# Of the prior variance, added to that of each row: without it, rounding makes the covariance of
# rows that nearly coincide indefinite, and whoever draws from it stumbles.
_JITTER = {torch.float64: 1e-10, torch.float32: 1e-5}


@final
class JointProcess(nn.Module):
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
    ) -> "JointProcess":
        """The process that has observed these rows as well."""
        return JointProcess(
            self.posterior,
            X=_appended(self.X, X),
            Y=_appended(self.Y, Y),
            noise=_appended(self.noise, noise),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "JointProcess":
        """With the same rows, and without what these were computed from.

        PyTorch refuses to copy tensors that have a history.
        """
        X, Y, noise = (tensor.detach().clone() for tensor in (self.X, self.Y, self.noise))
        copy = JointProcess(deepcopy(self.posterior, memo), X=X, Y=Y, noise=noise)
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
