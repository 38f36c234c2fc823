"""Updates of GPyTorch models by more rows, without those that they were trained on."""

from typing import Any

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from gpytorch.models.gplvm import BayesianGPLVM
from gpytorch.variational import DeltaVariationalDistribution, MeanFieldVariationalDistribution
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.integrations.gpytorch.checks import (
    TrainingData,
    check_likelihood,
    checked_goal,
    drawn_seed,
)
from winnowgp.integrations.gpytorch.distribution import (
    EarlierRows,
    GaussianQ,
    Same,
    Whitening,
    root,
    set_points,
)
from winnowgp.integrations.gpytorch.selection import Winnowed, select_points
from winnowgp.integrations.gpytorch.sites import ModelELBO
from winnowgp.integrations.gpytorch.strategies import (
    InducingStrategy,
    copy_module,
    inducing_strategies,
)
from winnowgp.linalg import solve_lower

MOST_ROWS = 4096
"""Largest number of rows of one update."""


@torch.inference_mode(False)
def update_winnowed(
    result: Winnowed[Same],
    likelihood: Likelihood,
    data: tuple[Tensor, Tensor],
    *,
    alpha: float | str = "auto",
    tolerance: float = 0.01,
    max_points: int | None = None,
    n_candidates: int = 128,
    generator: torch.Generator | None = None,
) -> Winnowed[Same]:
    """Return a model that has learnt from more rows, without those it was trained on.

    Rows of the batch with the largest conditional variance become inducing points. Points that are
    no longer needed are dropped, old and new, by the marginal gain for all rows so far. Kernel,
    mean and likelihood are unchanged, bit for bit. The earlier rows are remembered through
    q(u), which `winnow` has optimised (Bui, Nguyen and Turner 2017): exactly, given the inducing
    points, if the likelihood is Gaussian.

    Args:
        result: what `winnow` or this function returned. Its model must not have been trained since.
        likelihood: the likelihood.
        data: `(new_x, new_y)`, at most 4,096 rows.
        alpha: as for `winnow`.
        tolerance: ELBO gap in nats per observation that all selections so far, that of `winnow`
            included, may have together.
        max_points: number of points at most, instead of a tolerance.
        n_candidates: number of rows that may become inducing points, at most.
        generator: as for `winnow`.

    Returns: a result like that of `winnow`, whose `model` is the updated one.

    Raises:
        InputError: the model is deep or has latent inputs, several sets of points, or a q(u)
            without a full covariance.
    """
    goal, seed = checked_goal(alpha, tolerance, max_points), drawn_seed(generator)
    if not isinstance(result, Winnowed):
        raise InputError(
            f"`result` must be what `winnow` returned; got a {type(result).__name__}. Call "
            "`winnow(model, likelihood, data)` first."
        )
    if not isinstance(n_candidates, int) or n_candidates < 0:
        raise InputError(f"`n_candidates` must be an integer of at least 0; got {n_candidates!r}.")
    _check_model(result.model)
    rows = TrainingData.of(result.model, data)
    check_likelihood(likelihood, rows)
    if rows.N > MOST_ROWS:
        raise InputError(
            f"`data` must have at most {MOST_ROWS} rows; got {rows.N}. Pass them in several calls."
        )
    before = ModelELBO.of(result.model, likelihood, rows.x, rows.y, seed=seed)
    (old,) = before.strategies
    assert rows.x is not None
    candidates = torch.cat([old.locations[0], _unknown_rows(old, rows.x, n_candidates)])
    wider = _with_candidates(result.model, candidates)
    elbo = ModelELBO.of(wider, likelihood, rows.x, rows.y, seed=seed)
    q, whitening = Whitening.of(old).read(), Whitening.of(elbo.strategies[0])
    earlier = EarlierRows.of(q, whitening, bound=result.bound, N=result.N)
    whitening.write(_extended(q, len(candidates)))
    streamed = ModelELBO(elbo.model, elbo.likelihood, elbo.x, elbo.y, seed, earlier)
    return select_points(wider, streamed, goal, given_up=result.elbo_gap)


def _check_model(model: Any) -> None:
    if not isinstance(model, ApproximateGP) or isinstance(model, BayesianGPLVM):
        raise InputError(
            "`update_winnowed` needs an ApproximateGP of observed inputs; got a "
            f"{type(model).__name__}, whose other layers or latent inputs depend on earlier rows. "
            "Train it on all rows."
        )
    (inducing,) = inducing_strategies(model)
    if inducing.roles > 1 or len(inducing.locations) > 1:
        raise InputError(
            "`update_winnowed` needs one set of inducing points for all functions; "
            f"`{inducing.name}` has {len(inducing.locations)}. Give the strategy inducing points "
            "[M D]."
        )
    if isinstance(inducing.q, DeltaVariationalDistribution | MeanFieldVariationalDistribution):
        raise InputError(
            "`update_winnowed` needs a q(u) with a full covariance, which says what earlier rows "
            f"taught; got a {type(inducing.q).__name__}. Use CholeskyVariationalDistribution."
        )


@torch.no_grad()
def _unknown_rows(
    inducing: InducingStrategy, x: Float[Tensor, "B D"], count: int
) -> Float[Tensor, "J D"]:
    """Return the rows of greatest conditional variance, each given the points and those before it.

    The variance is a mean over functions. Rows that the points determine up to the jitter are left.
    """
    points, K = inducing.locations[0], inducing.K
    prior = inducing.strategy.model.forward(torch.cat([points, x]))
    joint = prior.lazy_covariance_matrix.to_dense()
    joint = joint.reshape(-1, *joint.shape[-2:])
    V = solve_lower(root(joint[:, :K, :K], inducing.jitter), joint[:, :K, K:])
    S = (joint[:, K:, K:] - V.mT @ V).mean(0)
    chosen: list[int] = []
    for _ in range(min(count, len(x))):
        variance, i = S.diagonal().max(0)
        if variance <= inducing.jitter:
            break
        chosen.append(int(i))
        S = S - torch.outer(S[:, i], S[:, i]) / variance
    return x[chosen]


def _with_candidates(model: Same, candidates: Float[Tensor, "K D"]) -> Same:
    """Return a copy with other inducing points, whose q(u) is that of the prior."""
    wider = copy_module(model)
    (inducing,) = inducing_strategies(wider)
    set_points(inducing, candidates[None])
    K, F = len(candidates), inducing.F
    like = inducing.strategy.inducing_points
    prior = GaussianQ(like.new_zeros(F, K), torch.eye(K).to(like).expand(F, -1, -1))
    prior.write_to(inducing.q)
    inducing.strategy.variational_params_initialized.fill_(1)
    return wider


def _extended(q: GaussianQ, K: int) -> GaussianQ:
    """Return q(v) of more points, which follow the prior given the first ones."""
    F, M = q.mean.shape
    mean, factor = q.mean.new_zeros(F, K), torch.eye(K).to(q.mean).repeat(F, 1, 1)
    mean[:, :M], factor[:, :M, :M] = q.mean, q.factor
    return GaussianQ(mean, factor)
