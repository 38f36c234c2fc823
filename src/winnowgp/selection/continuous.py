"""Sampling of inducing points at arbitrary locations, and of their number.

The candidates of the other samplers are finite; here a point may lie anywhere. The prior is a
Poisson process with intensity κ h(z), a density h times an expected number κ, reweighted by the
prior's log weights w of the number of points. The optimal posterior then has the density

    q*(Z) ∝ κ^m exp(w(m) + L(Z)),   m = |Z|,

relative to the unit-rate process h, that is κ^m/m! Π_i h(z_i) exp(w(m) + L(Z)) for ordered points.
It is the limit of K = κ candidates that are drawn from h, as both grow.

A chain alternates between two moves that leave q* as it is:

- *Birth and death*: fresh locations A are drawn from a Poisson process of intensity η h. Given the
  union C of Z and A, Z is a subset of C with probability ∝ exp(L(Z) + w(m) + m log(κ/η)): a finite
  problem, on which a Gibbs sweep with exact marginal gains decides every point of C. No birth is
  rejected for lack of a good proposal, and points that are left out are forgotten.
- *Moves*: all points move along the gradient of L + log h in their locations, with noise, and are
  accepted or rejected together (Metropolis-adjusted Langevin; Roberts and Tweedie 1996).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.point_processes import Budget
from winnowgp.selection.chains import Chains
from winnowgp.selection.gibbs import TemperedPosterior, gibbs_sweep
from winnowgp.selection.objective import SubsetStatistics
from winnowgp.selection.subset_samples import effective_samples, r_hat
from winnowgp.typing import Nats, Scalar, SizeTable

_ACCEPTANCE = 0.57  # the best rate of Langevin moves (Roberts and Rosenthal 1998)
_ADAPT = 0.3  # change of the log step size for each acceptance during burn-in


@runtime_checkable
class LocationObjective(Protocol):
    """L(Z) as a function of locations; `winnowgp.models.ModelLocations` for a `SparseGP`."""

    def statistics(self, Z: Float[Tensor, "K D"]) -> SubsetStatistics:
        """Return the bounds of all subsets of some locations."""
        ...

    def bound_and_gradient(self, Z: Float[Tensor, "M D"]) -> tuple[Scalar, Float[Tensor, "M D"]]:
        """Return L(Z) in nats, and its gradient in the locations."""
        ...


class LocationDensity(ABC):
    """Interface of densities h(z) of locations."""

    @abstractmethod
    def sample(self, n: int, *, generator: torch.Generator) -> Float[Tensor, "n D"]:
        """Return `n` independent locations."""

    @abstractmethod
    def log_density(self, Z: Float[Tensor, "M D"]) -> Float[Tensor, " M"]:
        """Return log h(z) of each location, in nats; −∞ where the density is zero."""


@final
@dataclass(frozen=True, slots=True)
class Box(LocationDensity):
    """The uniform density between the corners `low` and `high`."""

    low: Float[Tensor, " D"]
    high: Float[Tensor, " D"]

    def __post_init__(self) -> None:
        if self.low.shape != self.high.shape or not bool((self.low < self.high).all()):
            raise InputError(
                "`low` must be below `high` in every column; got "
                f"{self.low.tolist()} and {self.high.tolist()}."
            )

    def sample(self, n: int, *, generator: torch.Generator) -> Float[Tensor, "n D"]:
        u = torch.rand((n, len(self.low)), generator=generator, dtype=self.low.dtype)
        return self.low + u * (self.high - self.low)

    def log_density(self, Z: Float[Tensor, "M D"]) -> Float[Tensor, " M"]:
        inside = ((self.low <= Z) & (self.high >= Z)).all(1)
        nats = -(self.high - self.low).log().sum()
        return torch.where(inside, nats, -torch.inf)


@final
@dataclass(frozen=True, slots=True)
class RowDensity(LocationDensity):
    """A density of the rows: Gaussians of one standard deviation around each of them.

    Attributes:
        rows: rows `[N D]`; a few hundred are enough.
        deviation: standard deviation in each column.
    """

    rows: Float[Tensor, "N D"]
    deviation: Float[Tensor, " D"]

    def __post_init__(self) -> None:
        if not len(self.rows) or not bool((self.deviation > 0).all()):
            raise InputError(
                "`rows` must not be empty and `deviation` must be positive; got "
                f"{len(self.rows)} rows and {self.deviation.tolist()}."
            )

    def sample(self, n: int, *, generator: torch.Generator) -> Float[Tensor, "n D"]:
        centre = self.rows[torch.randint(len(self.rows), (n,), generator=generator)]
        return centre + self.deviation * _normal(centre, generator)

    def log_density(self, Z: Float[Tensor, "M D"]) -> Float[Tensor, " M"]:
        scaled = (Z[:, None] - self.rows) / self.deviation
        constant = 2 * self.deviation.log() + torch.tensor(2 * torch.pi).log()
        each = -0.5 * (scaled.square() + constant).sum(2)
        return torch.logsumexp(each, 1) - torch.tensor(float(len(self.rows))).log()


@final
@dataclass(frozen=True, slots=True)
class LocationSamples:
    """Sets of inducing points of C chains, T from each.

    Attributes:
        locations: the points `[M D]` of each sample, T of the first chain, then of the next.
        bounds: L(Z) of each, in nats.
        acceptance: share of the moves along the gradient that were accepted after burn-in.
    """

    locations: tuple[Float[Tensor, "_ D"], ...]
    bounds: Float[Tensor, "C T"]
    acceptance: float

    @property
    def sizes(self) -> Int[Tensor, "C T"]:
        """Number of inducing points of each sample."""
        return torch.tensor([len(Z) for Z in self.locations]).reshape(self.bounds.shape)

    @property
    def r_hat(self) -> dict[str, float]:
        """R-hat of size and bound; 1 if the chains agree."""
        return {"size": r_hat(self.sizes.to(self.bounds)), "bound": r_hat(self.bounds)}

    @property
    def effective_samples(self) -> dict[str, float]:
        """Effective number of independent samples of size and bound."""
        return {
            "size": effective_samples(self.sizes.to(self.bounds)),
            "bound": effective_samples(self.bounds),
        }


def sample_locations(
    objective: LocationObjective,
    *,
    density: LocationDensity,
    intensity: float,
    log_weights: SizeTable,
    generator: torch.Generator,
    chains: int = 4,
    sweeps: int = 200,
    burn_in: int | None = None,
    fresh: float = 20.0,
    step: float = 0.1,
    moves: int = 1,
) -> LocationSamples:
    """Sample sets of inducing points at arbitrary locations from the optimal q*(Z).

    Each sweep draws fresh locations, decides every point and every fresh location by a Gibbs sweep,
    and moves the points along the gradient. It costs O(N (M + fresh)²).

    Args:
        objective: L(Z) as a function of locations.
        density: h(z), the density of locations under the prior.
        intensity: κ, the number of points of a Poisson process before the weights of sizes; about
            the number of candidates of a finite problem.
        log_weights: w(0..most) of the prior; larger sets are impossible.
        generator: source of randomness, on the CPU.
        chains: number of independent chains, each started with a draw of fresh locations.
        sweeps: number of samples per chain.
        burn_in: number of sweeps before the first sample; a quarter of `sweeps` if not given.
        fresh: expected number η of fresh locations in each sweep.
        step: first standard deviation of the moves; adapted during burn-in.
        moves: number of moves along the gradient in each sweep.
    """
    finite = bool(torch.isfinite(log_weights[:1]).all()) if len(log_weights) else False
    if chains < 1 or sweeps < 4 or not min(intensity, fresh, step) > 0 or not finite:
        raise InputError(
            "`chains` must be at least 1, `sweeps` at least 4, `intensity`, `fresh` and `step` "
            "positive and the first of `log_weights` finite; got "
            f"{chains}, {sweeps}, {intensity}, {fresh}, {step} and {log_weights[:1].tolist()}."
        )
    burn_in = sweeps // 4 if burn_in is None else burn_in
    locations: list[Tensor] = []
    bounds: list[Nats] = []
    accepted = 0
    for _ in range(chains):
        Z, size = density.sample(0, generator=generator), step
        for sweep in range(burn_in + sweeps):
            Z = birth_and_death(
                objective,
                Z,
                density=density,
                log_ratio=torch.tensor(intensity / fresh).log().item(),
                fresh=fresh,
                log_weights=log_weights,
                generator=generator,
            )
            for _ in range(moves):
                Z, moved = langevin_move(
                    objective, Z, density=density, step=size, generator=generator
                )
                if sweep < burn_in:
                    size *= torch.tensor(_ADAPT * (moved - _ACCEPTANCE)).exp().item()
                else:
                    accepted += moved
            if sweep >= burn_in:
                locations.append(Z)
                bounds.append(objective.bound_and_gradient(Z)[0])
    return LocationSamples(
        tuple(locations),
        torch.stack(bounds).reshape(chains, sweeps),
        accepted / max(chains * sweeps * moves, 1),
    )


def birth_and_death(
    objective: LocationObjective,
    Z: Float[Tensor, "M D"],
    *,
    density: LocationDensity,
    log_ratio: float,
    fresh: float,
    log_weights: SizeTable,
    generator: torch.Generator,
) -> Float[Tensor, "J D"]:
    """Return the points after a Gibbs sweep over them and over fresh locations.

    Args:
        log_ratio: log(κ/η).
        fresh: η.
    """
    mean = torch.tensor(fresh, dtype=torch.float64)
    A = density.sample(int(torch.poisson(mean, generator=generator)), generator=generator)
    C = torch.cat([Z, A])
    if not len(C):
        return Z
    sizes = torch.arange(len(C) + 1)
    beyond = log_weights.new_full((max(len(C) + 1 - len(log_weights), 0),), -torch.inf)
    weights = torch.cat([log_weights, beyond])[: len(C) + 1] + sizes * log_ratio
    statistics = objective.statistics(C)
    chain = Chains.at(statistics, (torch.arange(len(C)) < len(Z))[None])
    target = TemperedPosterior.of(statistics, Budget(weights), chains=1)
    gibbs_sweep(target, chain, generator=generator)
    return C[chain.included[0].cpu()]


def langevin_move(
    objective: LocationObjective,
    Z: Float[Tensor, "M D"],
    *,
    density: LocationDensity,
    step: float,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "M D"], bool]:
    """Return the points after a move along the gradient, and whether it was accepted.

    z' = z + ½ s² ∇(L + log h) + s ε, with the acceptance probability of Metropolis and Hastings.
    """
    if not len(Z):
        return Z, False

    def evaluated(points: Tensor) -> tuple[Tensor, Tensor]:
        bound, gradient = objective.bound_and_gradient(points)
        with torch.enable_grad():
            leaf = points.detach().clone().requires_grad_(True)
            log_h = density.log_density(leaf).sum()
            slope = torch.zeros_like(points)
            if log_h.requires_grad:
                (slope,) = torch.autograd.grad(log_h, leaf)
        return bound + log_h.detach(), points + 0.5 * step**2 * (gradient + slope)

    def log_proposal(points: Tensor, centre: Tensor) -> Tensor:
        return -0.5 * ((points - centre) / step).square().sum()

    nats, centre = evaluated(Z)
    proposed = centre + step * _normal(Z, generator)
    if not bool(torch.isfinite(density.log_density(proposed)).all()):
        return Z, False
    other, back = evaluated(proposed)
    log_accept = other + log_proposal(Z, back) - nats - log_proposal(proposed, centre)
    u = torch.rand((), generator=generator, dtype=torch.float64)
    accepted = bool(u.log() < log_accept)
    return (proposed if accepted else Z), accepted


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)
