"""Selection of the inducing points of GPyTorch models: `winnow` and its subset objective."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, final

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.variational import (
    DeltaVariationalDistribution,
    MeanFieldVariationalDistribution,
    VariationalStrategy,
)
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.errors import ConvergenceWarning
from winnowgp.integrations.gpytorch import distribution
from winnowgp.integrations.gpytorch.checks import (
    TrainingData,
    check_likelihood,
    checked_goal,
    drawn_seed,
)
from winnowgp.integrations.gpytorch.sites import ModelELBO, StrategySites
from winnowgp.integrations.gpytorch.strategies import copy_module, inducing_strategies
from winnowgp.models.site_updates import backtrack
from winnowgp.point_processes import SquaredCardinality
from winnowgp.report.summary import counted
from winnowgp.selection import (
    Frontier,
    SubsetObjective,
    alpha_at,
    elimination_frontier,
    fit_inclusion,
)
from winnowgp.selection.frontier import MIN_ALPHA, Selection, largest_alpha
from winnowgp.selection.objective import SubsetStatistics
from winnowgp.training import FixedAlpha, Goal, MaxPoints, Tolerance
from winnowgp.typing import Masks, Nats

# Subsets sampled at most to learn the inclusion probabilities of a set.
_SUBSETS = 60
# Nats per observation that an update of q(u) must promise and gain for another one to follow.
_GAIN = 1e-5
# Shortest step of an update, and updates at most.
_SHORTEST, _STEPS = 0.05, 30
# Attempts to stay within a tolerance.
_TRIES = 4
# Nats per observation below which differences of bounds are rounding errors.
_ROUNDING = 1e-9


@final
@dataclass(frozen=True, slots=True)
class WinnowedSet:
    """One set of inducing points of the original model, and the selection from it."""

    name: str
    """Name of the strategy in the model, with the number of the set if it has several."""
    candidates: Float[Tensor, "K D"]
    """Locations of all points of the original model."""
    selection: Selection

    @property
    def n_inducing(self) -> int:
        """Number of selected points."""
        return self.selection.M


@final
@dataclass(frozen=True, slots=True)
class Winnowed(Generic[distribution.Same]):
    """A model with fewer inducing points, and how they were selected."""

    model: distribution.Same
    """Model of the same class with the same parameters, except for inducing points and q(u)."""
    sets: tuple[WinnowedSet, ...]
    """One entry per set of locations: a layer, a task, or a role."""
    bound: float
    """ELBO of `model`, in nats: Σ E[log p(y | f)] − KL[q(u) ‖ p(u)]."""
    reference: float
    """ELBO with all points and the best q(u) that was found for them; after an update, plus the
    ELBO gap of earlier selections."""
    original: float
    """ELBO with all points and the original q(u)."""
    N: int | float
    """Number of rows, those of earlier calls included."""

    @property
    def elbo_gap(self) -> float:
        """Nats below the ELBO of all points."""
        return max(self.reference - self.bound, 0.0)

    @property
    def n_inducing(self) -> int:
        """Number of selected points, summed over sets."""
        return sum(each.n_inducing for each in self.sets)

    @property
    def inclusion(self) -> Float[Tensor, " K"]:
        """Inclusion probability of every candidate, concatenated over sets."""
        return torch.cat([each.selection.inclusion for each in self.sets])

    def __str__(self) -> str:
        lines = [
            f"{s.name}: {s.n_inducing} of {counted(s.selection.K)} selected" for s in self.sets
        ]
        nats = f"ELBO {self.bound:.1f} nats, {self.elbo_gap:.1f} below that of all inducing points"
        return "\n".join([*lines, nats])


@torch.inference_mode(False)
def winnow(
    model: distribution.Same,
    likelihood: Likelihood,
    data: tuple[Tensor, Tensor] | Tensor,
    *,
    alpha: float | str = "auto",
    tolerance: float = 0.01,
    max_points: int | None = None,
    generator: torch.Generator | None = None,
) -> Winnowed[distribution.Same]:
    """Return a copy of a GPyTorch model with fewer inducing points.

    Kernel, mean, likelihood and all other parameters are unchanged, bit for bit. The selected
    points keep their locations, and their q(u) is inferred by natural-gradient steps. The result
    is an ordinary GPyTorch model, which can be trained further.

    Every function with inducing points is treated as Gaussian regression on the sites of the ELBO
    (Khan & Lin 2017), which gives the marginal gains of all candidates at once: exactly for a
    Gaussian likelihood and functions that are observed one by one, to first order for other
    likelihoods, mixed tasks and hidden layers. O(N K²) per pass and function, O(K³) to select.

    Args:
        model: an ApproximateGP (also multitask or batched), a DeepGP or a BayesianGPLVM, at any
            stage of training.
        likelihood: the likelihood it was trained with.
        data: `(train_x, train_y)`; for a BayesianGPLVM its table alone.
        alpha: strength of the prior exp(−α M²) on every set; "auto" derives it from `tolerance`.
        tolerance: ELBO gap in nats per observation that all sets together may have.
        max_points: number of points per set at most, instead of a tolerance.
        generator: source of randomness for subsets that are sampled to learn inclusion
            probabilities, and for samples of deep and latent-variable models.

    Returns: a result whose `model` has the class of the original; `n_inducing`, `elbo_gap` in nats
        and `inclusion` describe the selection.

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
    goal, seed = checked_goal(alpha, tolerance, max_points), drawn_seed(generator)
    rows = TrainingData.of(model, data)
    check_likelihood(likelihood, rows)
    return select_points(model, ModelELBO.of(model, likelihood, rows.x, rows.y, seed=seed), goal)


def select_points(
    model: distribution.Same, elbo: ModelELBO, goal: Goal, *, given_up: float = 0.0
) -> Winnowed[distribution.Same]:
    """Return a copy of a model with the inducing points that a goal selects.

    Args:
        model: the model.
        elbo: its ELBO.
        goal: rule for the number of points.
        given_up: ELBO gap of earlier selections in nats; a tolerance is for all of them together.
    """
    if isinstance(goal, Tolerance):
        # Points that cost nothing but rounding errors may always leave.
        goal = Tolerance(max(goal.nats - given_up / elbo.observations, _ROUNDING))
    original = elbo.bound()
    whole = refit_q(elbo, original)
    frontiers = [StrategyFrontiers.of(sites, whole.bound) for sites in whole.sites]
    pruned = _pruned_to(goal, whole, frontiers)
    return Winnowed(
        model=_result(model, pruned),
        sets=_sets(model, frontiers, pruned, goal, torch.Generator().manual_seed(elbo.seed)),
        bound=pruned.bound,
        reference=whole.bound + given_up,
        original=original,
        N=elbo.observations,
    )


@torch.inference_mode(False)
def subset_objective(
    model: Any, likelihood: Likelihood, data: tuple[Tensor, Tensor] | Tensor, *, seed: int = 0
) -> "PrunedObjective":
    """Return the ELBO of a GPyTorch model as a function of the inducing points that it uses.

    Args:
        model: the model, as for `winnow`.
        likelihood: the likelihood it was trained with.
        data: `(train_x, train_y)`; for a BayesianGPLVM its table alone.
        seed: seed of the samples of deep and latent-variable models, the same for every subset.
    """
    rows = TrainingData.of(model, data)
    check_likelihood(likelihood, rows)
    return PrunedObjective(ModelELBO.of(model, likelihood, rows.x, rows.y, seed=seed))


@final
@dataclass(frozen=True, slots=True)
class PrunedObjective(SubsetObjective):
    """The ELBO of a GPyTorch model with some of its inducing points, at their marginal q(u).

    The candidates of all strategies are concatenated; a strategy with several sets of locations
    drops the same entries of each. Each value is one evaluation of the model on all rows. All
    gradient estimators of `winnowgp.gradients` can be used; parameters get no gradient.
    """

    elbo: ModelELBO

    @property
    def K(self) -> int:
        return sum(inducing.K for inducing in self.elbo.strategies)

    def value(self, mask: Masks) -> Nats:
        return torch.tensor([self._bound(row) for row in mask], dtype=torch.float64)

    def _bound(self, mask: Tensor) -> float:
        strategies = self.elbo.strategies
        masks = mask.split([inducing.K for inducing in strategies])
        keep = [
            m.expand(len(inducing.locations), -1)
            for inducing, m in zip(strategies, masks, strict=True)
        ]
        return self.elbo.with_model(distribution.prune_model(self.elbo.model, keep)).bound()


@final
@dataclass(frozen=True, slots=True)
class RefittedModel:
    """A model with the best q(u) found, its ELBO in nats, and its sites."""

    elbo: ModelELBO
    bound: float
    sites: tuple[StrategySites, ...]


@torch.no_grad()
def refit_q(elbo: ModelELBO, bound: float, *, steps: int = _STEPS) -> RefittedModel:
    """Take natural-gradient steps of the q(u) of all strategies while the ELBO rises.

    A full step goes to the optimal q(u) for the sites of the current one: the optimum for a
    Gaussian likelihood and functions that are observed alone. A step that lowers the ELBO is
    halved; the last one that raised it is kept.

    Args:
        elbo: model with an initial q(u).
        bound: its ELBO.
        steps: number of steps at most.
    """
    rate, sites = 1.0, elbo.sites()
    for _ in range(steps):
        best = [each.best_q() for each in sites]
        if _promised(sites, best) < _GAIN * elbo.N:
            break

        def attempt(
            rate: float, elbo: ModelELBO = elbo, best: list[distribution.GaussianQ] = best
        ) -> tuple[ModelELBO, float]:
            moved = _moved(elbo, best, rate)
            return moved, moved.bound()

        moved, rate = backtrack(
            attempt,
            accept=lambda result, bound=bound: result[1] > bound,
            rate=rate,
            shortest=_SHORTEST,
        )
        if moved is None:
            break
        gained, (elbo, bound) = moved[1] - bound, moved
        sites, rate = elbo.sites(), min(1.0, 2 * rate)
        if gained < _GAIN * elbo.N:
            break
    return RefittedModel(elbo, bound, sites)


def _promised(sites: Sequence[StrategySites], best: Sequence[distribution.GaussianQ]) -> float:
    """Return the gain of full steps if the sites stay as they are: Σ_f KL[q ‖ best], in nats."""
    total = 0.0
    for each, q in zip(sites, best, strict=True):
        kind, now = each.whitening.inducing.q, each.whitening.read()
        if isinstance(kind, MeanFieldVariationalDistribution):
            return float("inf")  # the best full q is not the best diagonal one
        total += each.excess(now, q.mean, point=isinstance(kind, DeltaVariationalDistribution))
    return total


def _moved(elbo: ModelELBO, best: Sequence[distribution.GaussianQ], rate: float) -> ModelELBO:
    """Return a copy whose q(u) has moved a part of the way to the best one."""
    moved = elbo.with_model(copy_module(elbo.model))
    for inducing, q in zip(moved.strategies, best, strict=True):
        whitening = distribution.Whitening.of(inducing)
        point = isinstance(inducing.q, DeltaVariationalDistribution)
        whitening.write(whitening.read().towards(q, rate, apart=point or inducing.roles == 2))
    return moved


@final
@dataclass(frozen=True, slots=True)
class StrategyFrontiers:
    """Frontiers of the sets of one strategy, which must all have the same number of points."""

    statistics: tuple[SubsetStatistics, ...]
    frontiers: tuple[Frontier, ...]

    @classmethod
    def of(cls, sites: StrategySites, bound: float) -> "StrategyFrontiers":
        """Run backward elimination in every set, O(K³) each."""
        statistics = sites.statistics(bound)
        return cls(statistics, tuple(elimination_frontier(each) for each in statistics))

    @property
    def together(self) -> Frontier:
        """Bounds of all sets with M points each; the masks are those of the first set."""
        first = self.frontiers[0]
        bounds = torch.stack([each.bounds for each in self.frontiers]).sum(0)
        return Frontier(bounds, first.masks, first.N)

    def size(self, alpha: float) -> int:
        """Return the best M ≥ 1 under the prior exp(−α M²) on every set."""
        best = self.together.best_for_alpha(len(self.frontiers) * alpha)
        return max(1, int(best.mask.sum()))

    def keep(self, M: int) -> Bool[Tensor, "G K"]:
        """Return the masks of the best M points of each set."""
        return torch.stack([each.masks[M] for each in self.frontiers])

    def selections(
        self, M: int, *, alpha: float | None, generator: torch.Generator
    ) -> tuple[Selection, ...]:
        """Return the sets of M points, with the inclusion probability of every candidate.

        Args:
            alpha: strength of the prior; if None, the one whose optimum has M points.
        """
        implied = alpha_at(self.together, M) / len(self.frontiers)
        strength = implied if alpha is None else alpha
        # If more points lower the bound, no α > 0 is implied.
        strength = max(strength, MIN_ALPHA)
        pairs = zip(self.statistics, self.frontiers, strict=True)
        return tuple(_selection(*pair, M, strength, generator) for pair in pairs)


def _selection(
    statistics: SubsetStatistics,
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


def _sizes(frontiers: Sequence[StrategyFrontiers], goal: Goal) -> list[int]:
    """Return the number of points, at least one, in each set of every strategy.

    All sets share one α. A tolerance over several strategies determines it: the largest α whose
    ELBO gap, summed over the strategies, is within the tolerance.
    """
    if isinstance(goal, FixedAlpha):
        return [each.size(goal.single_alpha) for each in frontiers]
    if isinstance(goal, MaxPoints) or len(frontiers) == 1:
        together = [each.together for each in frontiers]
        return [max(1, goal.size(f, reference=f.bounds.max().item())) for f in together]
    assert isinstance(goal, Tolerance)
    budget = goal.nats * frontiers[0].together.N

    def within(alpha: float) -> bool:
        lost = [
            f.together.bounds.max().item() - f.together.bounds[f.size(alpha)].item()
            for f in frontiers
        ]
        return sum(lost) <= budget

    alpha = largest_alpha(within)
    return [each.size(alpha) for each in frontiers]


@dataclass(frozen=True, slots=True)
class _PrunedModel:
    """A model with fewer points, and the masks that it was pruned by."""

    sizes: list[int]
    keep: list[Bool[Tensor, "G K"]]
    elbo: ModelELBO
    bound: float


def _pruned_to(
    goal: Goal, whole: RefittedModel, frontiers: list[StrategyFrontiers]
) -> _PrunedModel:
    """Prune the model and infer its q(u); retry with more points if the tolerance is exceeded.

    Sites of all points may overstate the bound of few points. Issues a `ConvergenceWarning` if no
    attempt suffices.
    """
    if not isinstance(goal, Tolerance):
        return _attempt(_sizes(frontiers, goal), whole, frontiers)
    attempts: list[_PrunedModel] = []
    for number in range(_TRIES):
        stricter = Tolerance(goal.nats * 0.5**number)
        pruned = _attempt(_sizes(frontiers, stricter), whole, frontiers)
        if whole.bound - pruned.bound <= goal.nats * whole.elbo.observations:
            return pruned
        attempts.append(pruned)
    best = max(attempts, key=lambda each: each.bound)
    lost = (whole.bound - best.bound) / whole.elbo.observations
    points = sum(int(mask.sum()) for mask in best.keep)
    warnings.warn(
        f"the tolerance of {goal.nats:g} nats per observation was exceeded: with {points} inducing "
        f"points, the best of {_TRIES} tries, the ELBO gap is {lost:.3g}. Scores are of first "
        "order for this model; pass a smaller `tolerance`, or `max_points`.",
        ConvergenceWarning,
        # The caller of `winnow` and of torch's decorator around it.
        stacklevel=5,
    )
    return best


def _attempt(
    sizes: list[int], whole: RefittedModel, frontiers: list[StrategyFrontiers]
) -> _PrunedModel:
    keep = [each.keep(M) for each, M in zip(frontiers, sizes, strict=True)]
    device = whole.elbo.y.device
    marginal = distribution.prune_model(whole.elbo.model, [mask.to(device) for mask in keep])
    smaller = whole.elbo.with_model(marginal)
    # The marginal q(u) is only a start: it was up to 0.18 nats per test row worse.
    refit = refit_q(smaller, smaller.bound())
    return _PrunedModel(sizes, keep, refit.elbo, refit.bound)


def _result(model: distribution.Same, pruned: _PrunedModel) -> distribution.Same:
    """Return a copy of the user's model, in its own precision, with the points and q(u) found."""
    result = copy_module(model)
    pairs = zip(inducing_strategies(result), pruned.keep, pruned.elbo.strategies, strict=True)
    for inducing, keep, source in pairs:
        distribution.set_points(
            inducing, distribution.selected_points(inducing, keep.to(inducing.locations.device))
        )
        distribution.GaussianQ.of(source.q).write_to(inducing.q)
        # Else the first call would initialise q(u) at the prior,
        inducing.strategy.variational_params_initialized.fill_(1)
        if isinstance(inducing.strategy, VariationalStrategy):
            # or whiten it again, if it comes from a file written before GPyTorch whitened.
            inducing.strategy.get_buffer("updated_strategy").fill_(True)
    return result


def _sets(
    model: distribution.Same,
    frontiers: list[StrategyFrontiers],
    pruned: _PrunedModel,
    goal: Goal,
    generator: torch.Generator,
) -> tuple[WinnowedSet, ...]:
    alpha = goal.single_alpha if isinstance(goal, FixedAlpha) else None
    sets = []
    for inducing, each, M in zip(inducing_strategies(model), frontiers, pruned.sizes, strict=True):
        selections = each.selections(M, alpha=alpha, generator=generator)
        for g, (Z, selection) in enumerate(zip(inducing.locations, selections, strict=True)):
            name = inducing.name if len(selections) == 1 else f"{inducing.name}[{g}]"
            sets.append(WinnowedSet(name, Z.clone(), selection))
    return tuple(sets)
