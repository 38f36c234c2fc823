"""Bayesian GP-LVM: Gaussian processes of latent inputs with q(X), collapsed or sampled."""

from abc import abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ZeroMean
from jaxtyping import Float, Int
from torch import Tensor, nn

from winnowgp.bounds.collapsed import Moments, Subset, masked_blocks, moment_bound, moment_posterior
from winnowgp.bounds.gplvm import (
    ObservedColumns,
    Psi,
    gplvm_bound,
    gplvm_moments,
    latent_kl,
    whitening_factor,
)
from winnowgp.data import Dataset, MaskedMatrix
from winnowgp.errors import InputError
from winnowgp.models.base import SelectableModel, check_kernel, copy_with
from winnowgp.models.gplvm_posterior import ExpectedPosterior, LatentPosterior, SampledPosterior
from winnowgp.models.kernels import expected_kernel, kernel_blocks, prior_mean
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.observations import fill_with_observed, gaussian_noise
from winnowgp.models.posterior import Posterior
from winnowgp.models.svgp import UncollapsedObjective, VariationalGP
from winnowgp.selection import SubsetStatistics
from winnowgp.selection.objective import RelaxedObjective, subset_statistics
from winnowgp.typing import Masks, Nats, Scalar, Weights


@final
class Latents(nn.Module):
    """Latent positions q(x_i) = N(μ_i, diag s_i) of N rows in Q dimensions, with prior N(0, I).

    Args:
        mean: μ, `[N Q]`; copied and learnt.
        variance: s, one number or `[N Q]`; its logarithm is learnt.
    """

    def __init__(self, mean: Float[Tensor, "N Q"], *, variance: float | Tensor = 0.1) -> None:
        super().__init__()
        spread = torch.as_tensor(variance, dtype=mean.dtype, device=mean.device).expand(mean.shape)
        if mean.dim() != 2 or not mean.dtype.is_floating_point or not torch.isfinite(mean).all():
            raise InputError(
                "`mean` must be finite floating-point numbers [N Q]; "
                f"got {mean.dtype} of shape {list(mean.shape)}."
            )
        if not bool((spread > 0).all()):
            raise InputError(f"`variance` must be positive; got {spread.min().item()}.")
        self.mean = nn.Parameter(mean.detach().clone())
        self.log_variance = nn.Parameter(spread.detach().log())

    @property
    def N(self) -> int:
        """Number of rows."""
        return self.mean.shape[0]

    @property
    def Q(self) -> int:
        """Number of latent dimensions."""
        return self.mean.shape[1]

    @property
    def variance(self) -> Float[Tensor, "N Q"]:
        """Variances s of the latent positions."""
        return self.log_variance.exp()

    def kl(self) -> Scalar:
        """Return Σ_i KL[q(x_i) ‖ N(0, I)] in nats."""
        return latent_kl(self.mean, self.variance).sum()

    def at(self, rows: Int[Tensor, " B"] | None) -> tuple[Tensor, Tensor]:
        """Return means and variances of some rows, or of all rows if None."""
        if rows is None:
            return self.mean, self.variance
        return self.mean[rows], self.log_variance[rows].exp()

    def sample(
        self, rows: Int[Tensor, " B"] | None = None, *, generator: torch.Generator
    ) -> Float[Tensor, "B Q"]:
        """Return one sample of each row, differentiable in mean and variance."""
        mean, variance = self.at(rows)
        normal = torch.randn(
            mean.shape, generator=generator, dtype=mean.dtype, device=generator.device
        )
        return mean + variance.sqrt() * normal.to(mean.device)


class LatentModel(SelectableModel[MaskedMatrix]):
    """A latent-variable model: the columns of a table as functions of latent inputs with q(X).

    Unlike an `InducingModel`, it learns the inputs, so that its data are a table of targets.
    """

    kernel: Kernel
    latents: Latents
    candidates: nn.Parameter

    @property
    def candidate_sets(self) -> tuple[nn.Parameter, ...]:
        """Locations of the candidates, one tensor `[K Q]`."""
        return (self.candidates,)

    @property
    def K(self) -> int:
        """Number of candidates."""
        return self.candidates.shape[0]

    @abstractmethod
    def bound(
        self,
        data: MaskedMatrix,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """Return a lower bound on log p(Y) with all candidates, in nats, differentiable.

        Args:
            rows: a minibatch of rows; if it is random, the result is an unbiased estimate of the
                bound of all rows.
            generator: source of randomness for models that sample the latents; the result is then
                an unbiased estimate.
        """

    @abstractmethod
    def subset_objective(
        self,
        data: MaskedMatrix,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> RelaxedObjective:
        """Return the bound in nats as a function of the subset of candidates that is used."""

    @abstractmethod
    def posterior(self, data: MaskedMatrix) -> LatentPosterior:
        """Return q(f), which does not depend on the table afterwards."""

    def check(self, data: MaskedMatrix) -> None:
        """Raise an `InputError` if the table does not match the latents."""
        if data.N != self.latents.N:
            raise InputError(
                f"the model has latents for {self.latents.N} rows and the table has {data.N}; "
                "make them the same."
            )
        if data.Y.dtype != self.candidates.dtype or data.Y.device != self.candidates.device:
            raise InputError(
                f"the model is {self.candidates.dtype} on {self.candidates.device} and the table "
                f"{data.Y.dtype} on {data.Y.device}; make them the same."
            )


@final
@dataclass(frozen=True, slots=True)
class LatentObjective(RelaxedObjective):
    """The collapsed bound of any subset, differentiable in latents, kernel, noise and locations.

    Psi statistics are evaluated once for all candidates, O(N K² Q). A subset then costs O(M³) for
    each pattern of missing entries, for any N.
    """

    Kuu: Float[Tensor, "K K"]
    psi: Psi
    columns: ObservedColumns
    kl: Scalar
    """KL divergence of the latents, the same for every subset."""

    @property
    def K(self) -> int:
        return self.Kuu.shape[0]

    def value(self, mask: Masks) -> Nats:
        subset = Subset.of(mask)
        return self.bound(
            subset.square(self.Kuu), subset.rows(self.psi.psi1), subset.block(self.psi.psi2)
        )

    def relaxed_value(self, weights: Weights) -> Nats:
        Kuu, psi1 = masked_blocks(self.Kuu, self.psi.psi1, weights)
        outer = (weights[:, :, None] * weights[:, None, :]).unsqueeze(1)
        return self.bound(Kuu, psi1, outer * self.psi.psi2)

    def bound(self, Kuu: Tensor, psi1: Tensor, psi2: Tensor) -> Float[Tensor, "*batch"]:
        """Return the bound of given kernel blocks, in nats."""
        bound = gplvm_bound(Kuu, psi1, psi2, psi0=self.psi.psi0, columns=self.columns)
        return torch.sub(bound, self.kl)


@final
class LatentVariableGP(LatentModel):
    """Bayesian GP-LVM with Gaussian noise: P columns as functions of Q latent inputs per row.

    The columns share kernel and K candidate inducing points. Expectations over the Gaussian q(x_i)
    of each row are closed-form (Titsias & Lawrence 2010); q(u) is always the optimal one, so that
    the parameters are latents, kernel, noise and locations. Missing entries are marginalised
    exactly.

    Args:
        kernel: a GPyTorch RBFKernel (with one lengthscale per dimension, inactive dimensions get
            long ones) or LinearKernel, scaled or not; copied.
        latents: initial latent means, `[N Q]`, or a `Latents`; copied.
        candidates: locations of the candidates, `[K Q]`; copied, and learnt unless frozen.
        noise: initial noise variance, one number for all columns or `[P]` for one per column.

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> angle = torch.linspace(0, 3, 20, dtype=torch.float64)
    >>> table = MaskedMatrix.of(torch.stack([angle.sin(), angle.cos()], 1))
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
        check_kernel(kernel, candidates)
        self.latents = deepcopy(latents) if isinstance(latents, Latents) else Latents(latents)
        self.kernel = deepcopy(kernel).to(candidates)
        start = torch.as_tensor(noise, dtype=candidates.dtype, device=candidates.device)
        self.likelihood = gaussian_noise(start.reshape(-1))
        self.candidates = nn.Parameter(candidates.detach().clone())
        expected_kernel(self.kernel, self.latents.Q)

    @property
    def noise(self) -> Float[Tensor, " columns"]:
        """Noise variance of each column, or one for all columns."""
        assert isinstance(self.likelihood, GaussianLikelihood)
        return self.likelihood.noise

    def bound(
        self,
        data: MaskedMatrix,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """Return the collapsed bound on log p(Y) with all candidates, in nats; deterministic."""
        objective = self.subset_objective(data, rows=rows)
        return objective.bound(objective.Kuu, objective.psi.psi1, objective.psi.psi2)

    def subset_objective(
        self,
        data: MaskedMatrix,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> LatentObjective:
        """Return the bound in nats as a function of the subset of candidates that is used."""
        _refuse_minibatch(rows)
        self.check(data)
        observed, pattern = data.patterns()
        columns = ObservedColumns(data.filled(), observed.to(data.Y.dtype), pattern, self.noise)
        kernel = expected_kernel(self.kernel, self.latents.Q)
        psi = kernel.psi(
            self.latents.mean, self.latents.variance, Z=self.candidates, weights=columns.weights
        )
        return LatentObjective(kernel.uu(self.candidates), psi, columns, self.latents.kl())

    @torch.no_grad()
    def subset_statistics(self, table: MaskedMatrix) -> SubsetStatistics:
        """Return statistics that score subsets at fixed parameters, without the latents' KL.

        They have one term for each pattern of missing entries, or for each column if columns have
        noise variances of their own.
        """
        return subset_statistics(*self._moments(table))

    @torch.no_grad()
    def fixed_bound(self, table: MaskedMatrix) -> float:
        """Return the bound as a number; more robust to rounding than `bound`."""
        terms = [moment_bound(m) for m in self._moments(table)[1:]]
        return (torch.stack(terms).sum() - self.latents.kl()).item()

    def with_candidates(self, candidates: Float[Tensor, "J Q"]) -> "LatentVariableGP":
        """Return a new model with the same parameters and other candidates."""
        return copy_with(self, candidates)

    def _pruned(self, *masks: Tensor) -> "LatentVariableGP":
        return self.with_candidates(self.candidates[masks[0]])

    @torch.no_grad()
    def posterior(self, data: MaskedMatrix) -> ExpectedPosterior:
        """Return q(f) given the table, on which it does not depend afterwards."""
        L, *moments = self._moments(data)
        q_mean, q_factor = moment_posterior(*moments)
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

    def _moments(self, table: MaskedMatrix) -> tuple[Tensor, *tuple[Moments, ...]]:
        """Return the Cholesky factor of K_uu, and the moments of the table whitened with it."""
        objective = self.subset_objective(table)
        L = whitening_factor(objective.Kuu)
        return L, *gplvm_moments(L, objective.psi, objective.columns)


def _refuse_minibatch(rows: Tensor | None) -> None:
    if rows is not None:
        raise InputError(
            "the collapsed bound needs all rows at once; leave `rows` (or the batch size) out, or "
            "use `SampledLatentGP`."
        )


@final
class SampledLatentGP(LatentModel):
    """GP-LVM for any kernel and likelihood: a `VariationalGP` of inputs sampled from q(X).

        scale · Σ_i { Σ_p E_q(f)[log p(y_ip | f_p(x_i))] − KL[q(x_i) ‖ N(0, I)] } − KL[q(u) ‖ p(u)]

    is estimated with one sample x_i ~ q(x_i) per step (Lalchand et al. 2022), reparametrised:
    unbiased in value and gradient, also on minibatches of rows. Missing entries are left out.

    Args:
        function: kernel, likelihood, candidates and q(u) of the columns; copied.
        latents: initial latent means, `[N Q]`, or a `Latents`; copied.

    >>> from gpytorch.kernels import MaternKernel, ScaleKernel
    >>> from gpytorch.likelihoods import PoissonLikelihood
    >>> X = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    >>> counts = MaskedMatrix.of((4 * X + 4).round().repeat(1, 3))
    >>> kernel, likelihood = ScaleKernel(MaternKernel()), PoissonLikelihood()
    >>> function = VariationalGP(kernel, X[::3], likelihood=likelihood, targets=3)
    >>> SampledLatentGP(function, X).bound(counts).item() < 0
    True
    """

    def __init__(self, function: VariationalGP, latents: Float[Tensor, "N Q"] | Latents) -> None:
        super().__init__()
        self.latents = deepcopy(latents) if isinstance(latents, Latents) else Latents(latents)
        # The modules of the function, under the names that every latent model has.
        self.function = deepcopy(function)
        self.kernel, self.likelihood = self.function.kernel, self.function.likelihood
        self.candidates = self.function.candidates

    def bound(
        self,
        data: MaskedMatrix,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """Return an unbiased estimate of the bound at this q(u), from one sample of the latents."""
        return self.subset_objective(data, rows=rows, generator=generator).whole()

    def subset_objective(
        self,
        data: MaskedMatrix,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> UncollapsedObjective:
        """Return the bound of any subset at its marginal q(u), for one sample of the latents."""
        self.check(data)
        observation_model(self.likelihood).check_targets(fill_with_observed(data))
        part = data if rows is None else data.rows(rows)
        generator = generator or torch.Generator(device=self.candidates.device).manual_seed(0)
        X = self.latents.sample(rows, generator=generator)
        return UncollapsedObjective(
            blocks=kernel_blocks(self.kernel, self.candidates, X),
            q_mean=self.function.q_mean,
            q_factor=self.function.q_factor.tril(),
            expected_log_prob=self._expected(part, X, latent_kl(*self.latents.at(rows))),
            scale=data.N / part.N,
        )

    def _pruned(self, *masks: Tensor) -> "SampledLatentGP":
        return SampledLatentGP(self.function.prune(masks), self.latents)

    def posterior(self, data: MaskedMatrix) -> SampledPosterior:
        """Return q(f) of this q(u), which has been learnt from the table already."""
        nothing = Dataset(self.candidates[:0].detach(), data.Y[:0])
        return SampledPosterior(self.function.posterior(nothing))

    def _expected(
        self, part: MaskedMatrix, X: Tensor, kl: Float[Tensor, " B"]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        centre, Y = prior_mean(self.function.mean, X), fill_with_observed(part)
        observations = observation_model(self.likelihood)

        def expected(mean: Tensor, variance: Tensor) -> Tensor:
            nats = observations.expected_log_prob(Y, centre + mean, variance)
            # The KL of each row is spread over its entries, and scaled with them.
            return nats * part.observed - kl[:, None] / part.P

        return expected
