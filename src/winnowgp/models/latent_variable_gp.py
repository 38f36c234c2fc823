"""The Bayesian GP-LVM with candidates for its inducing points."""

from copy import deepcopy
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ZeroMean
from jaxtyping import Float, Int
from torch import Tensor, nn

from winnowgp.bounds import (
    Columns,
    Moments,
    latent_bound,
    latent_moments,
    latent_posterior,
    moment_bound,
    whitening,
)
from winnowgp.data import Entries
from winnowgp.errors import InputError
from winnowgp.models.column_noise import gaussian_noise
from winnowgp.models.expected_kernel import expected_kernel
from winnowgp.models.expected_posterior import ExpectedPosterior
from winnowgp.models.inducing_model import check_parts
from winnowgp.models.latent_model import LatentModel
from winnowgp.models.latent_objective import LatentObjective
from winnowgp.models.latents import Latents
from winnowgp.models.posterior import Posterior
from winnowgp.selection import SubsetStatistics, subset_statistics
from winnowgp.typing import Mask, Scalar


@final
class LatentVariableGP(LatentModel):
    """P columns as functions of Q latent inputs a row, with Gaussian noise (Titsias & Lawrence
    2010).

    The columns share kernel and K candidate inducing points. q(x_i) is a Gaussian a row, averaged
    over in closed form; q(u) is always the best one, so the parameters are latents, kernel, noise
    and locations. Missing entries are left out exactly.

    Args:
        kernel: a GPyTorch RBFKernel (one lengthscale a dimension tells which dimensions matter) or
            LinearKernel, scaled or not; copied.
        latents: where the rows start, `[N Q]`, or a `Latents`; copied.
        candidates: where inducing points may be, `[K Q]`; copied, and learnt unless frozen.
        noise: starting variance, a number for all columns or `[P]` for one each.

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> angle = torch.linspace(0, 3, 20, dtype=torch.float64)
    >>> table = Entries.of(torch.stack([angle.sin(), angle.cos()], 1))
    >>> X = (angle - angle.mean())[:, None]
    >>> model = LatentVariableGP(ScaleKernel(RBFKernel()), X, candidates=X[::4], noise=0.1)
    >>> model.bound(table).item() < 0 and model.K == 5
    True
    """

    def __init__(
        self,
        kernel: Kernel,
        latents: Float[Tensor, "N Q"] | Latents,
        *,
        candidates: Float[Tensor, "K Q"],
        noise: float | Float[Tensor, " P"] = 0.1,
    ) -> None:
        super().__init__()
        check_parts(kernel, candidates)
        self.latents = deepcopy(latents) if isinstance(latents, Latents) else Latents(latents)
        self.kernel = deepcopy(kernel).to(candidates)
        start = torch.as_tensor(noise, dtype=candidates.dtype, device=candidates.device)
        self.likelihood = gaussian_noise(start.reshape(-1))
        self.candidates = nn.Parameter(candidates.detach().clone())
        expected_kernel(self.kernel, self.latents.Q)

    @property
    def noise(self) -> Float[Tensor, " columns"]:
        """Noise variance of each column, or one for all."""
        assert isinstance(self.likelihood, GaussianLikelihood)
        return self.likelihood.noise

    def bound(
        self,
        table: Entries,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """Lower bound on log p(Y) with all candidates and the best q(u), in nats; draws nothing."""
        _refuse_part(rows)
        kernel, columns = expected_kernel(self.kernel, self.latents.Q), self._columns(table)
        psi = kernel.psi(
            self.latents.mean, self.latents.variance, Z=self.candidates, weights=columns.weights
        )
        Kuu = kernel.uu(self.candidates)
        fit = latent_bound(Kuu, psi.psi1, psi.psi2, psi0=psi.psi0, columns=columns)
        return fit - self.latents.kl()

    def subset_objective(
        self,
        table: Entries,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> LatentObjective:
        """What is the bound, in nats, if only this subset of the candidates is used?"""
        _refuse_part(rows)
        kernel, columns = expected_kernel(self.kernel, self.latents.Q), self._columns(table)
        psi = kernel.psi(
            self.latents.mean, self.latents.variance, Z=self.candidates, weights=columns.weights
        )
        return LatentObjective(kernel.uu(self.candidates), psi, columns, self.latents.kl())

    @torch.no_grad()
    def subset_statistics(self, table: Entries) -> SubsetStatistics:
        """The same question at fixed parameters, less the latents' KL, without the table.

        With missing entries or a noise for each column there are statistics for each of them.
        """
        return subset_statistics(*self._moments(table))

    @torch.no_grad()
    def fixed_bound(self, table: Entries) -> float:
        """The bound as a number, also where rounding keeps `bound` from being computed."""
        fits = [moment_bound(m) for m in self._moments(table)[1:]]
        return (torch.stack(fits).sum() - self.latents.kl()).item()

    def with_candidates(self, candidates: Float[Tensor, "J Q"]) -> "LatentVariableGP":
        """A new model with the same parameters and other candidates."""
        copied = deepcopy(self)
        learnt = self.candidates.requires_grad
        copied.candidates = nn.Parameter(candidates.detach().clone(), requires_grad=learnt)
        return copied

    def prune(self, mask: Mask) -> "LatentVariableGP":
        """A new model with the same parameters and only the candidates that `mask` keeps."""
        return self.with_candidates(self.candidates[mask])

    @torch.no_grad()
    def posterior(self, table: Entries) -> ExpectedPosterior:
        """q(f) given the table, small and independent of it from then on."""
        L, *moments = self._moments(table)
        q_mean, q_factor = latent_posterior(moments)
        function = Posterior(
            self.kernel,
            self.candidates.detach(),
            mean=ZeroMean(),
            likelihood=self.likelihood,
            q_mean=q_mean,
            q_factor=q_factor,
            L=L,
        )
        return ExpectedPosterior(function)

    def _moments(self, table: Entries) -> tuple[Tensor, *tuple[Moments, ...]]:
        """The factor of the candidates' covariance, and the table's moments whitened with it."""
        objective = self.subset_objective(table)
        L = whitening(objective.Kuu)
        return L, *latent_moments(L, objective.psi, objective.columns)

    def _columns(self, table: Entries) -> Columns:
        self.check(table)
        observed, pattern = table.patterns()
        return Columns(table.filled(), observed.to(table.Y.dtype), pattern, self.noise)


def _refuse_part(rows: Tensor | None) -> None:
    if rows is not None:
        raise InputError(
            "the collapsed bound needs all rows at once; leave `rows` (or the batch size) out, or "
            "use `SampledLatentGP`."
        )
