"""Selection of the inducing points of GPyTorch models."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Generic, final

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.variational import (
    DeltaVariationalDistribution,
    MeanFieldVariationalDistribution,
    VariationalStrategy,
)
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.errors import ConvergenceWarning, InputError, NotPositiveDefiniteError
from winnowgp.integrations.gpytorch.checks import Rows, check_likelihood
from winnowgp.integrations.gpytorch.distribution import Frame, GaussianQ
from winnowgp.integrations.gpytorch.pruning import Same, copied, kept_points, pruned, put_points
from winnowgp.integrations.gpytorch.sites import Evidence, SiteTotals
from winnowgp.integrations.gpytorch.strategies import inducing_strategies
from winnowgp.point_processes import SquaredCardinality
from winnowgp.selection import (
    Frontier,
    SearchObjective,
    Selection,
    alpha_at,
    elimination_frontier,
    fit_inclusion,
)
from winnowgp.selection.frontier import MIN_ALPHA, largest_alpha
from winnowgp.training import FixedAlpha, Goal, MaxPoints, Tolerance

# How many points each strategy keeps, and which.


# Subsets drawn at most to learn the probabilities of inclusion of a set.
_SUBSETS = 60


@final
@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """What the sets of one strategy are worth; its tensors ask for as many points in each."""

    statistics: tuple[SearchObjective, ...]
    frontiers: tuple[Frontier, ...]

    @classmethod
    def of(cls, totals: SiteTotals, bound: float) -> "StrategyChoice":
        """Backward elimination in every set, O(K³) each."""
        statistics = totals.statistics(bound)
        return cls(statistics, tuple(elimination_frontier(each) for each in statistics))

    @property
    def together(self) -> Frontier:
        """Bounds of all sets with M points each; the masks are the first one's."""
        first = self.frontiers[0]
        bounds = torch.stack([each.bounds for each in self.frontiers]).sum(0)
        return Frontier(bounds, first.masks, first.N)

    def size(self, alpha: float) -> int:
        """The M ≥ 1 that is best under the prior exp(−α M²) on every set."""
        found = self.together.best_for_alpha(len(self.frontiers) * alpha)
        return max(1, int(found.mask.sum()))

    def keep(self, M: int) -> Bool[Tensor, "G K"]:
        """The best M points found of each set."""
        return torch.stack([each.masks[M] for each in self.frontiers])

    def selections(
        self, M: int, *, alpha: float | None, generator: torch.Generator
    ) -> tuple[Selection, ...]:
        """The sets of M points, and the probability of every candidate.

        Args:
            alpha: of the prior; the one that prefers M points if None.
        """
        implied = alpha_at(self.together, M) / len(self.frontiers)
        strength = implied if alpha is None else alpha
        # Where more points only cost, no α > 0 says how strong a prior is.
        strength = max(strength, MIN_ALPHA)
        pairs = zip(self.statistics, self.frontiers, strict=True)
        return tuple(_selection(*pair, M, strength, generator) for pair in pairs)


def _selection(
    statistics: SearchObjective,
    frontier: Frontier,
    M: int,
    alpha: float,
    generator: torch.Generator,
) -> Selection:
    learnt = fit_inclusion(
        statistics,
        prior=SquaredCardinality(statistics.K, alpha),
        generator=generator,
        start=frontier.masks[M],
        max_steps=_SUBSETS,
    )
    return Selection(learnt.q.inclusion, frontier.masks[M], learnt.trace, alpha, frontier)


def sizes(choices: Sequence[StrategyChoice], goal: Goal) -> list[int]:
    """Points in each set of every strategy, one at least.

    A nat costs the same wherever it is bought: a tolerance over several strategies is the
    strongest prior, the same for all sets, that stays within it.
    """
    if isinstance(goal, FixedAlpha):
        return [choice.size(goal.strength) for choice in choices]
    if isinstance(goal, MaxPoints) or len(choices) == 1:
        frontiers = [choice.together for choice in choices]
        return [max(1, goal.size(f, reference=f.bounds.max().item())) for f in frontiers]
    assert isinstance(goal, Tolerance)
    budget = goal.nats * choices[0].together.N

    def within(alpha: float) -> bool:
        lost = [
            c.together.bounds.max().item() - c.together.bounds[c.size(alpha)].item()
            for c in choices
        ]
        return sum(lost) <= budget

    alpha = largest_alpha(within)
    return [choice.size(alpha) for choice in choices]


# q(u) made as good as it gets, with everything else held.


# Nats an observation that a step must promise and gain for another one to be tried.
_GAIN = 1e-5

_SHORTEST, _STEPS = 0.05, 30


@final
@dataclass(frozen=True, slots=True)
class Refit:
    """A model with the best q(u) found, its bound in nats, and its sites."""

    evidence: Evidence
    bound: float
    totals: tuple[SiteTotals, ...]


@torch.no_grad()
def refitted(evidence: Evidence, bound: float, *, steps: int = _STEPS) -> Refit:
    """Natural-gradient steps on the q(u) of all strategies at once, while the bound rises.

    A full step goes to the best q(u) for the sites of the present one: with a Gaussian likelihood
    and functions that are seen alone that is the optimum. A step that lowers the bound is tried
    again, shorter; the last one that raised it is kept.

    Args:
        evidence: of a model with some q(u).
        bound: of it.
        steps: at most.
    """
    rate, totals = 1.0, evidence.totals()
    for _ in range(steps):
        best = [each.best_q() for each in totals]
        if _promised(totals, best) < _GAIN * evidence.N:
            break
        tried, rate = _uphill(evidence, best, bound, rate)
        if tried is None:
            break
        gained, (evidence, bound) = tried[1] - bound, tried
        totals, rate = evidence.totals(), min(1.0, 2 * rate)
        if gained < _GAIN * evidence.N:
            break
    return Refit(evidence, bound, totals)


def _promised(totals: Sequence[SiteTotals], best: Sequence[GaussianQ]) -> float:
    """What full steps gain if the sites stay as they are: Σ_f KL[q ‖ best], in nats."""
    total = 0.0
    for each, q in zip(totals, best, strict=True):
        kind, now = each.frame.found.q, each.frame.read()
        if isinstance(kind, MeanFieldVariationalDistribution):
            return float("inf")  # the best full q is not the best diagonal one
        total += each.excess(now, q.mean, point=isinstance(kind, DeltaVariationalDistribution))
    return total


def _uphill(
    evidence: Evidence, best: Sequence[GaussianQ], bound: float, rate: float
) -> tuple[tuple[Evidence, float] | None, float]:
    """As much of a step as raises the bound, and how much that was; None where none does."""
    while rate >= _SHORTEST:
        try:
            stepped = _stepped(evidence, best, rate)
            new = stepped.bound()
        except NotPositiveDefiniteError:
            rate *= 0.5
            continue
        if new > bound:
            return (stepped, new), rate
        rate *= 0.5
    return None, rate


def _stepped(evidence: Evidence, best: Sequence[GaussianQ], rate: float) -> Evidence:
    stepped = evidence.with_model(copied(evidence.model))
    for found, q in zip(stepped.strategies, best, strict=True):
        frame = Frame.of(found)
        point = isinstance(found.q, DeltaVariationalDistribution)
        frame.write(frame.read().towards(q, rate, apart=point or found.roles == 2))
    return stepped


# A user's own GPyTorch model, with as few inducing points as it needs.


# Tries to stay within a tolerance.
_TRIES = 4


@final
@dataclass(frozen=True, slots=True)
class WinnowedSet:
    """One set of inducing points, and what was chosen of it."""

    name: str
    """The strategy's place in the model, with the number of the set where it has several."""
    candidates: Float[Tensor, "K D"]
    """Where its points were."""
    selection: Selection

    @property
    def n_inducing(self) -> int:
        """Number of points kept."""
        return self.selection.M


@final
@dataclass(frozen=True, slots=True)
class Winnowed(Generic[Same]):
    """A model with fewer points, and how they were chosen."""

    model: Same
    """The same class with the same parameters, but for inducing points and q(u)."""
    sets: tuple[WinnowedSet, ...]
    """One for each set of locations: a layer, a task, a role."""
    bound: float
    """Of `model`, in nats: Σ E[log p(y | f)] − KL[q(u) ‖ p(u)]."""
    reference: float
    """The same with all points and the best q(u) found for them."""
    original: float
    """The same with all points and the q(u) that was given."""

    @property
    def elbo_gap(self) -> float:
        """Nats below what all points reach."""
        return max(self.reference - self.bound, 0.0)

    @property
    def n_inducing(self) -> int:
        """Number of points kept, in all sets together."""
        return sum(each.n_inducing for each in self.sets)

    @property
    def inclusion(self) -> Float[Tensor, " K"]:
        """Probability of every candidate, those of all sets in one row."""
        return torch.cat([each.selection.inclusion for each in self.sets])

    def __str__(self) -> str:
        lines = [f"{s.name}: {s.selection.K} points, {s.n_inducing} kept" for s in self.sets]
        nats = f"bound {self.bound:.1f} nats, {self.elbo_gap:.1f} below all points"
        return "\n".join([*lines, nats])


@torch.inference_mode(False)
def winnow(
    model: Same,
    likelihood: Likelihood,
    data: tuple[Tensor, Tensor] | Tensor,
    *,
    alpha: float | str = "auto",
    tolerance: float = 0.01,
    max_points: int | None = None,
    generator: torch.Generator | None = None,
) -> Winnowed[Same]:
    """The same model with fewer inducing points; what was given stays as it was.

    Kernel, mean, likelihood and all other parameters are untouched, bit for bit. The points that
    stay are where they were; their q(u) is inferred anew by natural-gradient steps. Train on with
    your own loop if you like: it is an ordinary GPyTorch model.

    Every function that has inducing points is seen as Gaussian regression on what your own bound
    asks of it row by row (Khan & Lin 2017), which gives the worth of all candidates at once:
    exactly for a Gaussian likelihood and functions that are observed one by one, to first order for
    other likelihoods, mixed tasks and hidden layers. O(N K²) a pass for each function, O(K³) to
    choose.

    Args:
        model: an ApproximateGP (multitask or batched ones too), a DeepGP or a BayesianGPLVM,
            trained or half-trained.
        likelihood: the one it was trained with.
        data: `(train_x, train_y)`; of a BayesianGPLVM its table alone.
        alpha: strength of the prior exp(−α M²) on every set; "auto" derives it from `tolerance`.
        tolerance: nats an observation that all sets together may give up.
        max_points: in every set, instead of a tolerance.
        generator: of the subsets drawn to learn inclusion, and of the samples that deep and latent
            models draw.

    >>> import gpytorch
    >>> class Line(gpytorch.models.ApproximateGP):
    ...     def __init__(self, Z):
    ...         q = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
    ...         super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q))
    ...         self.mean_module = gpytorch.means.ConstantMean()
    ...         self.covar_module = gpytorch.kernels.RBFKernel()
    ...
    ...     def forward(self, x):
    ...         mean, covariance = self.mean_module(x), self.covar_module(x)
    ...         return gpytorch.distributions.MultivariateNormal(mean, covariance)
    >>> x = torch.linspace(0, 4, 60)
    >>> result = winnow(Line(x[::2]), gpytorch.likelihoods.GaussianLikelihood(), (x, torch.sin(x)))
    >>> 2 < result.n_inducing < 8, type(result.model).__name__
    (True, 'Line')
    """
    goal = _goal(alpha, tolerance, max_points)
    draws = _checked_generator(generator)
    rows = Rows.of(model, data)
    check_likelihood(likelihood, rows)
    seed = int(torch.randint(2**31, (), generator=draws, device=draws.device))
    given = Evidence.of(model, likelihood, rows.x, rows.y, seed=seed)
    original = given.bound()
    whole = refitted(given, original)
    choices = [StrategyChoice.of(totals, whole.bound) for totals in whole.totals]
    found = _pruned_to(goal, whole, choices)
    return Winnowed(
        model=_returned(model, found),
        sets=_sets(model, choices, found, goal, torch.Generator().manual_seed(seed)),
        bound=found.bound,
        reference=whole.bound,
        original=original,
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """A choice that was tried."""

    sizes: list[int]
    keep: list[Bool[Tensor, "G K"]]
    evidence: Evidence
    bound: float


def _pruned_to(goal: Goal, whole: Refit, choices: list[StrategyChoice]) -> _Found:
    """The model pruned and its q(u) inferred anew; again with more points where too much is lost.

    What sites of all points promise of few is exact or too much. Warns where no try sufficed.
    """
    if not isinstance(goal, Tolerance):
        return _tried(sizes(choices, goal), whole, choices)
    tried: list[_Found] = []
    for attempt in range(_TRIES):
        asked = Tolerance(goal.nats * 0.5**attempt)
        found = _tried(sizes(choices, asked), whole, choices)
        if whole.bound - found.bound <= goal.nats * whole.evidence.N:
            return found
        tried.append(found)
    best = max(tried, key=lambda each: each.bound)
    lost = (whole.bound - best.bound) / whole.evidence.N
    points = sum(int(mask.sum()) for mask in best.keep)
    warnings.warn(
        f"the tolerance of {goal.nats:g} nats an observation was not kept: with {points} points, "
        f"the best of {_TRIES} tries, {lost:.3g} are given up. Scores are of first order for this "
        "model; ask for a smaller `tolerance`, or say `max_points`.",
        ConvergenceWarning,
        # Beyond `winnow`, and what torch has around it.
        stacklevel=4,
    )
    return best


def _tried(kept: list[int], whole: Refit, choices: list[StrategyChoice]) -> _Found:
    keep = [choice.keep(M) for choice, M in zip(choices, kept, strict=True)]
    device = whole.evidence.y.device
    marginal = pruned(whole.evidence.model, [mask.to(device) for mask in keep])
    smaller = whole.evidence.with_model(marginal)
    # The marginal is only a start: that of the given q(u) was up to 0.18 nats a test row worse.
    refit = refitted(smaller, smaller.bound())
    return _Found(kept, keep, refit.evidence, refit.bound)


def _returned(model: Same, found: _Found) -> Same:
    """A copy of the user's model, in its own precision, with what was found."""
    result = copied(model)
    pairs = zip(inducing_strategies(result), found.keep, found.evidence.strategies, strict=True)
    for place, keep, source in pairs:
        put_points(place, kept_points(place, keep.to(place.locations.device)))
        GaussianQ.of(source.q).put_into(place.q)
        # Else the first call would start q(u) at the prior,
        place.strategy.variational_params_initialized.fill_(1)
        if isinstance(place.strategy, VariationalStrategy):
            # or whiten it once more, if it came from a file of before GPyTorch whitened.
            place.strategy.get_buffer("updated_strategy").fill_(True)
    return result


def _sets(
    model: Same,
    choices: list[StrategyChoice],
    found: _Found,
    goal: Goal,
    generator: torch.Generator,
) -> tuple[WinnowedSet, ...]:
    alpha = goal.strength if isinstance(goal, FixedAlpha) else None
    sets = []
    for place, choice, M in zip(inducing_strategies(model), choices, found.sizes, strict=True):
        selections = choice.selections(M, alpha=alpha, generator=generator)
        for g, (Z, selection) in enumerate(zip(place.locations, selections, strict=True)):
            name = place.name if len(selections) == 1 else f"{place.name}[{g}]"
            sets.append(WinnowedSet(name, Z.clone(), selection))
    return tuple(sets)


def _checked_generator(generator: object) -> torch.Generator:
    if generator is None:
        return torch.Generator().manual_seed(0)
    if not isinstance(generator, torch.Generator):
        raise InputError(
            f"`generator` must be a torch.Generator or None; got {generator!r}. Of a seed it is "
            "`torch.Generator().manual_seed(seed)`."
        )
    return generator


def _goal(alpha: float | str, tolerance: float, max_points: int | None) -> Goal:
    for name, value, kind, need in (
        ("alpha", alpha, Real | str, "positive or 'auto'"),
        ("tolerance", tolerance, Real, "positive nats per observation"),
        ("max_points", max_points, Integral | None, "a whole number, at least 1"),
    ):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f"`{name}` must be {need}; got {value!r}.")
    if isinstance(alpha, str) and alpha != "auto":
        raise InputError(
            f"`alpha` must be positive or 'auto'; got {alpha!r}. Larger values keep fewer points."
        )
    if not isinstance(alpha, str) and max_points is not None:
        raise InputError(
            "say how many points in one way only: a number for `alpha`, or `max_points`."
        )
    if max_points is not None:
        return MaxPoints(max_points)
    return Tolerance(tolerance) if isinstance(alpha, str) else FixedAlpha(alpha)
