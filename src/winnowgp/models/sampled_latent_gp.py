"""A latent-variable model for any kernel and likelihood: sampled latents, an explicit q(u)."""

from collections.abc import Callable
from copy import deepcopy
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.bounds import latent_kl, uncollapsed_bound
from winnowgp.data import Dataset, Entries
from winnowgp.models.kernel_blocks import kernel_blocks, prior_mean
from winnowgp.models.latent_model import LatentModel
from winnowgp.models.latents import Latents
from winnowgp.models.observations import check_targets, expected_log_prob
from winnowgp.models.sampled_posterior import SampledPosterior
from winnowgp.models.stand_in import valid
from winnowgp.models.uncollapsed_objective import UncollapsedObjective
from winnowgp.models.variational_gp import VariationalGP
from winnowgp.typing import Mask, Scalar


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
    >>> counts = Entries.of((4 * X + 4).round().repeat(1, 3))
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
        table: Entries,
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
        table: Entries,
        *,
        rows: Int[Tensor, " B"] | None = None,
        generator: torch.Generator | None = None,
    ) -> UncollapsedObjective:
        """What is the marginal q(u) of any subset worth, in nats, at one draw of the latents?"""
        self.check(table)
        check_targets(self.likelihood, valid(table))
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

    def posterior(self, table: Entries) -> SampledPosterior:
        """q(f) of this q(u); the table is in it already."""
        nothing = Dataset(self.candidates[:0].detach(), table.Y[:0])
        return SampledPosterior(self.function.posterior(nothing))

    def _expected(
        self, part: Entries, X: Tensor, kl: Float[Tensor, " B"]
    ) -> Callable[[Tensor, Tensor], Tensor]:
        centre, Y = prior_mean(self.function.mean, X), valid(part)

        def expected(mean: Tensor, variance: Tensor) -> Tensor:
            nats = expected_log_prob(self.likelihood, Y, centre + mean, variance)
            # Each row's own KL, spread over its entries, is scaled with them.
            return nats * part.observed - kl[:, None] / part.P

        return expected
