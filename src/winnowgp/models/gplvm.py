"""Bayesian GP-LVM: latent inputs with q(X), collapsed or sampled."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.likelihoods.noise_models import MultitaskHomoskedasticNoise
from gpytorch.means import ZeroMean
from jaxtyping import Float, Int
from torch import Tensor, nn

from winnowgp.bounds import (
    Moments,
    ObservedColumns,
    Psi,
    Subset,
    latent_bound,
    latent_kl,
    latent_moments,
    latent_posterior,
    masked_blocks,
    moment_bound,
    uncollapsed_bound,
    whitening,
)
from winnowgp.data import Dataset, MaskedMatrix
from winnowgp.errors import InputError
from winnowgp.models.base import check_kernel
from winnowgp.models.gplvm_posterior import ExpectedPosterior, LatentPosterior, SampledPosterior
from winnowgp.models.kernels import expected_kernel, kernel_blocks, prior_mean
from winnowgp.models.likelihoods import fill_with_observed, observation_model
from winnowgp.models.posterior import Posterior
from winnowgp.models.sgpr import LEAST_NOISE
from winnowgp.models.svgp import UncollapsedObjective, VariationalGP
from winnowgp.selection import RelaxedObjective, SubsetStatistics, subset_statistics
from winnowgp.typing import Mask, Masks, Nats, Scalar, Weights

# Gaussian noise of one variance for all columns of a table, or one for each.


def gaussian_noise(start: Float[Tensor, " columns"]) -> GaussianLikelihood:
    """A Gaussian likelihood that learns as many variances as `start` has, one or P.

    Its `noise` is a vector, which stands next to tables `[N P]` column by column.
    """
    if not bool((start > LEAST_NOISE).all()):
        raise InputError(
            f"`noise` is a variance and must exceed {LEAST_NOISE}; got {start.min().item()}."
        )
    likelihood = GaussianLikelihood()
    likelihood.noise_covar = MultitaskHomoskedasticNoise(
        len(start), noise_constraint=GreaterThan(LEAST_NOISE)
    )
    likelihood.to(start)
    likelihood.noise_covar.initialize(noise=start)
    return likelihood


# Where the rows of a table lie in latent space, and how sure we are of it.


@final
class Latents(nn.Module):
    """q(x_i) = N(μ_i, diag s_i) of N rows in Q dimensions, under a prior N(0, I).

    Args:
        mean: μ, `[N Q]`; copied and learnt.
        variance: s, a number for all or `[N Q]`; learnt by its logarithm.
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
        """s."""
        return self.log_variance.exp()

    def kl(self, rows: Int[Tensor, " B"] | None = None) -> Scalar:
        """Σ_i KL[q(x_i) ‖ N(0, I)] in nats, of all rows or of some."""
        mean, variance = self.at(rows)
        return latent_kl(mean, variance).sum()

    def at(self, rows: Int[Tensor, " B"] | None) -> tuple[Tensor, Tensor]:
        """Means and variances of some rows; of all if None."""
        if rows is None:
            return self.mean, self.variance
        return self.mean[rows], self.log_variance[rows].exp()

    def sample(
        self, rows: Int[Tensor, " B"] | None = None, *, generator: torch.Generator
    ) -> Float[Tensor, "B Q"]:
        """One draw of each row, differentiable in mean and variance."""
        mean, variance = self.at(rows)
        normal = torch.randn(
            mean.shape, generator=generator, dtype=mean.dtype, device=generator.device
        )
        return mean + variance.sqrt() * normal.to(mean.device)


# What every latent-variable model can do.


_Same = TypeVar("_Same", bound=nn.Module)


class LatentModel(nn.Module, ABC):
    """A table seen as functions of a few unknown inputs a row, through K candidate points.

    Where an `InducingModel` is given its inputs, a latent model holds q(X) itself: it is asked
    about a table alone.
    """

    kernel: Kernel
    likelihood: Likelihood
    latents: Latents
    candidates: nn.Parameter

    @property
    def K(self) -> int:
        """Number of candidates."""
        return self.candidates.shape[0]

    @abstractmethod
    def bound(
        self,
        table: MaskedMatrix,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """Lower bound on log p(Y) with all candidates, in nats, differentiable.

        Args:
            rows: if given, only these rows are looked at, and the result is an unbiased estimate
                of the bound of all of them where they were drawn at random.
            generator: for draws of the latents, where the model needs any; the result is then an
                unbiased estimate too.
        """

    @abstractmethod
    def subset_objective(
        self,
        table: MaskedMatrix,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> RelaxedObjective:
        """What is the bound, in nats, if only this subset of the candidates is used?"""

    @abstractmethod
    def prune(self: _Same, mask: Mask) -> _Same:
        """A new model with the same parameters and only the candidates that `mask` keeps."""

    @abstractmethod
    def posterior(self, table: MaskedMatrix) -> LatentPosterior:
        """q(f), small and independent of the table from then on."""

    def check(self, table: MaskedMatrix) -> None:
        """An error where the model was made for another table."""
        if table.N != self.latents.N:
            raise InputError(
                f"the model has latents for {self.latents.N} rows and the table has {table.N}; "
                "make them alike."
            )
        if table.Y.dtype != self.candidates.dtype or table.Y.device != self.candidates.device:
            raise InputError(
                f"the model is {self.candidates.dtype} on {self.candidates.device} and the table "
                f"{table.Y.dtype} on {table.Y.device}; make them alike."
            )


Latent = TypeVar("Latent", bound=LatentModel)

"""The kind of latent-variable model that goes into a fit and comes out of it."""


# A latent-variable model as a function of the subset: each score from the psi statistics.


@final
@dataclass(frozen=True, slots=True)
class LatentObjective(RelaxedObjective):
    """The collapsed bound of any subset, differentiable in latents, kernel, noise and locations.

    Psi statistics are evaluated once for all candidates, O(N K² Q); a subset then costs O(M³) for
    each pattern of missing entries, whatever N.
    """

    Kuu: Float[Tensor, "K K"]
    psi: Psi
    columns: ObservedColumns
    kl: Scalar
    """KL of the latents, the same for every subset."""

    @property
    def K(self) -> int:
        return self.Kuu.shape[0]

    def value(self, mask: Masks) -> Nats:
        subset = Subset.of(mask)
        return self._bound(
            subset.square(self.Kuu), subset.rows(self.psi.psi1), subset.block(self.psi.psi2)
        )

    def relaxed_value(self, weights: Weights) -> Nats:
        Kuu, psi1 = masked_blocks(self.Kuu, self.psi.psi1, weights)
        outer = (weights[:, :, None] * weights[:, None, :]).unsqueeze(1)
        return self._bound(Kuu, psi1, outer * self.psi.psi2)

    def _bound(self, Kuu: Tensor, psi1: Tensor, psi2: Tensor) -> Nats:
        bound = latent_bound(Kuu, psi1, psi2, psi0=self.psi.psi0, columns=self.columns)
        return torch.sub(bound, self.kl)


# The Bayesian GP-LVM with candidates for its inducing points.


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
        """Noise variance of each column, or one for all."""
        assert isinstance(self.likelihood, GaussianLikelihood)
        return self.likelihood.noise

    def bound(
        self,
        table: MaskedMatrix,
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
        table: MaskedMatrix,
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
    def subset_statistics(self, table: MaskedMatrix) -> SubsetStatistics:
        """The same question at fixed parameters, less the latents' KL, without the table.

        With missing entries or a noise for each column there are statistics for each of them.
        """
        return subset_statistics(*self._moments(table))

    @torch.no_grad()
    def fixed_bound(self, table: MaskedMatrix) -> float:
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
    def posterior(self, table: MaskedMatrix) -> ExpectedPosterior:
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

    def _moments(self, table: MaskedMatrix) -> tuple[Tensor, *tuple[Moments, ...]]:
        """The factor of the candidates' covariance, and the table's moments whitened with it."""
        objective = self.subset_objective(table)
        L = whitening(objective.Kuu)
        return L, *latent_moments(L, objective.psi, objective.columns)

    def _columns(self, table: MaskedMatrix) -> ObservedColumns:
        self.check(table)
        observed, pattern = table.patterns()
        return ObservedColumns(table.filled(), observed.to(table.Y.dtype), pattern, self.noise)


def _refuse_part(rows: Tensor | None) -> None:
    if rows is not None:
        raise InputError(
            "the collapsed bound needs all rows at once; leave `rows` (or the batch size) out, or "
            "use `SampledLatentGP`."
        )


# A latent-variable model for any kernel and likelihood: sampled latents, an explicit q(u).


@final
class SampledLatentGP(LatentModel):
    """A `VariationalGP` whose inputs are drawn from q(X), one draw a step (Lalchand et al. 2022).

        scale · Σ_i { Σ_p E_q(f)[log p(y_ip | f_p(x_i))] − KL[q(x_i) ‖ N(0, I)] } − KL[q(u) ‖ p(u)]

    with x_i ~ q(x_i) reparametrised: unbiased in value and gradient, on minibatches of rows too.
    Missing entries are left out.

    Args:
        function: kernel, likelihood, candidates and q(u) of the columns; copied.
        latents: where the rows start, `[N Q]`, or a `Latents`; copied.

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
        # Its parts are the function's own, under the names that every latent model has.
        self.function = deepcopy(function)
        self.kernel, self.likelihood = self.function.kernel, self.function.likelihood
        self.candidates = self.function.candidates

    def bound(
        self,
        table: MaskedMatrix,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Scalar:
        """An unbiased estimate of the bound at this q(u), from one draw of the latents."""
        at = self.subset_objective(table, rows=rows, generator=generator)
        return uncollapsed_bound(
            at.blocks.Kuu,
            at.blocks.Kuf,
            kff=at.blocks.kff,
            q_mean=at.q_mean,
            q_factor=at.q_factor,
            expected_log_prob=at.expected_log_prob,
            scale=at.scale,
        )

    def subset_objective(
        self,
        table: MaskedMatrix,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> UncollapsedObjective:
        """What is the marginal q(u) of any subset worth, in nats, at one draw of the latents?"""
        self.check(table)
        observation_model(self.likelihood).check_targets(fill_with_observed(table))
        part = table if rows is None else table.rows(rows)
        generator = generator or torch.Generator(device=self.candidates.device).manual_seed(0)
        X = self.latents.sample(rows, generator=generator)
        return UncollapsedObjective(
            blocks=kernel_blocks(self.kernel, self.candidates, X),
            q_mean=self.function.q_mean,
            q_factor=self.function.q_factor.tril(),
            expected_log_prob=self._expected(part, X, latent_kl(*self.latents.at(rows))),
            scale=table.N / part.N,
        )

    def prune(self, mask: Mask) -> "SampledLatentGP":
        """A new model with only the candidates that `mask` keeps, and the marginal q(u) of them."""
        return SampledLatentGP(self.function.prune(mask), self.latents)

    def posterior(self, table: MaskedMatrix) -> SampledPosterior:
        """q(f) of this q(u); the table is in it already."""
        nothing = Dataset(self.candidates[:0].detach(), table.Y[:0])
        return SampledPosterior(self.function.posterior(nothing))

    def _expected(
        self, part: MaskedMatrix, X: Tensor, kl: Float[Tensor, " B"]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        centre, Y = prior_mean(self.function.mean, X), fill_with_observed(part)

        def expected(mean: Tensor, variance: Tensor) -> Tensor:
            nats = observation_model(self.likelihood).expected_log_prob(Y, centre + mean, variance)
            # Each row's own KL, spread over its entries, is scaled with them.
            return nats * part.observed - kl[:, None] / part.P

        return expected
