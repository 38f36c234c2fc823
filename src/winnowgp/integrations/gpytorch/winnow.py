"""A user's own GPyTorch model, with as few inducing points as it needs."""

import warnings
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Generic, final

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.variational import VariationalStrategy
from jaxtyping import Bool, Float
from torch import Tensor

from winnowgp.errors import InputError, ToleranceWarning
from winnowgp.integrations.gpytorch.choice import StrategyChoice, sizes
from winnowgp.integrations.gpytorch.copied import copied
from winnowgp.integrations.gpytorch.evidence import Evidence
from winnowgp.integrations.gpytorch.gaussian_q import GaussianQ
from winnowgp.integrations.gpytorch.pruned import Same, kept_points, pruned, put_points
from winnowgp.integrations.gpytorch.refit import Refit, refitted
from winnowgp.integrations.gpytorch.refusals import check_likelihood
from winnowgp.integrations.gpytorch.rows import Rows
from winnowgp.integrations.gpytorch.strategies import inducing_strategies
from winnowgp.selection import Selection
from winnowgp.training import FixedAlpha, Goal, MaxPoints, Tolerance

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
    def given_up(self) -> float:
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
        nats = f"bound {self.bound:.1f} nats, {self.given_up:.1f} below all points"
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
        ToleranceWarning,
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
    alpha = goal.alpha if isinstance(goal, FixedAlpha) else None
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
