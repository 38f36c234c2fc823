"""Updates of GPyTorch models against all rows at once and against dense conditioning."""

from functools import partial
from typing import Any

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor

from helpers.gpytorch_models import (
    Deep,
    Model,
    curve,
    gaussian,
    independent,
    points,
    state,
    task_noise,
    tasks,
)
from winnowgp.errors import InputError
from winnowgp.integrations.gpytorch import update_winnowed, winnow
from winnowgp.integrations.gpytorch.selection import Winnowed

FIRST, SECOND = slice(0, 25), slice(25, 60)
KINDS: dict[str, dict[str, Any]] = {
    "whitened": {},
    "unwhitened": {"strategy": UnwhitenedVariationalStrategy},
    "natural": {"distribution": NaturalVariationalDistribution},
    "tasks": {"batch": [3], "prior": [3], "around": independent},
}


def problem(kind: str) -> tuple[Any, Any, Tensor, Tensor]:
    """Return a new model, its likelihood and rows."""
    several = kind == "tasks"
    x, y = tasks() if several else curve()
    return Model(points(9), **KINDS[kind]), task_noise() if several else gaussian(), x, y


def moments(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        f = model.eval()(x)
    return f.mean, f.variance


@pytest.mark.parametrize("kind", KINDS)
def test_update_held_points_equals_all_rows(kind: str) -> None:
    model, likelihood, x, y = problem(kind)
    first = winnow(model, likelihood, (x[FIRST], y[FIRST]), max_points=9)
    later = update_winnowed(first, likelihood, (x[SECOND], y[SECOND]), max_points=9, n_candidates=0)
    both = winnow(model, likelihood, (x, y), max_points=9)
    assert later.bound == pytest.approx(both.bound, abs=1e-4)
    for found, expected in zip(moments(later.model, x), moments(both.model, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert later.N == 60


@pytest.mark.parametrize("kind", ["whitened", "tasks"])
def test_update_fewer_points_has_the_bound_of_the_frontier(kind: str) -> None:
    model, likelihood, x, y = problem(kind)
    first = winnow(model, likelihood, (x[FIRST], y[FIRST]), max_points=9)
    later = update_winnowed(first, likelihood, (x[SECOND], y[SECOND]), max_points=5, n_candidates=3)
    (only,) = later.sets
    # The frontier has the memory at all candidates, the bound that of the five points.
    assert (only.selection.K, only.n_inducing) == (12, 5)
    assert only.selection.frontier is not None
    expected = only.selection.frontier.bounds[5].item()
    assert later.bound == pytest.approx(expected, abs=1e-3)
    assert later.reference - later.bound > 1


def test_update_with_all_rows_as_points_equals_dense_conditioning() -> None:
    _, likelihood, x, y = problem("whitened")
    model = Model(points(9), strategy=partial(VariationalStrategy, jitter_val=1e-10))
    first = winnow(model, likelihood, (x[FIRST], y[FIRST]), max_points=9)
    new, grid = x[25:33] + 5, torch.linspace(4, 12, 9).double()[:, None]
    later = update_winnowed(first, likelihood, (new, y[25:33]), max_points=17)
    with torch.no_grad():
        joint = first.model.eval()(torch.cat([new, grid]))
    mean, cov = joint.mean, joint.covariance_matrix
    S = cov[:8, :8] + likelihood.noise.detach() * torch.eye(8).double()
    gain = cov[8:, :8] @ S.inverse()
    expected = mean[8:] + gain @ (y[25:33] - mean[:8])
    variance = (cov[8:, 8:] - gain @ cov[:8, 8:]).diagonal()
    found = moments(later.model, grid)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], variance, rtol=1e-5, atol=1e-5)


def test_update_moves_to_new_inputs_and_keeps_the_tolerance() -> None:
    model, likelihood, x, y = problem("whitened")
    before = state(model)
    result: Winnowed[Any] = winnow(model, likelihood, (x, y))
    sizes = [result.n_inducing]
    for step in range(1, 4):
        new, _ = curve(seed=step)
        new = new + 3 * step
        result = update_winnowed(result, likelihood, (new, torch.sin(2 * new[:, 0])))
        sizes.append(result.n_inducing)
        assert 60 * (step + 1) == result.N
        assert 0 <= result.elbo_gap <= 0.01 * result.N
    assert sizes == sorted(sizes)
    test = torch.linspace(0.5, 14.5, 40).double()[:, None]
    assert (moments(result.model, test)[0] - torch.sin(2 * test[:, 0])).abs().max() < 0.15
    assert all(torch.equal(before[name], value) for name, value in state(model).items())


def test_update_of_classes_in_single_precision() -> None:
    x, y = curve(dtype=torch.float32)
    labels = (y > 0).float()
    model = Model(points(9).float(), distribution=CholeskyVariationalDistribution)
    likelihood = BernoulliLikelihood()
    first = winnow(model, likelihood, (x[FIRST], labels[FIRST]), max_points=9)
    later = update_winnowed(first, likelihood, (x[SECOND], labels[SECOND]))
    both = winnow(model, likelihood, (x, labels), max_points=9)
    assert next(later.model.parameters()).dtype == torch.float32
    # Sites of the first rows are those at the posterior of their time.
    assert later.bound == pytest.approx(both.bound, abs=1.0)
    found, expected = (moments(each.model, x)[0] for each in (later, both))
    assert (found - expected).abs().max() < 0.5


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: Model(points(4), distribution=MeanFieldVariationalDistribution),
            "full covariance",
        ),
        (lambda: Model(points(4), distribution=DeltaVariationalDistribution), "full covariance"),
        (lambda: Model(points(4).repeat(3, 1, 1), batch=[3], around=independent), "one set of"),
        (lambda: Deep(), "Train it on all rows"),
    ],
    ids=["mean-field", "delta", "sets", "deep"],
)
def test_update_unsupported_models_raise(model: Any, message: str) -> None:
    result = Winnowed(model(), (), 0.0, 0.0, 0.0, 1)
    with pytest.raises(InputError, match=message):
        update_winnowed(result, gaussian(), curve(5))


def test_update_bad_arguments_raise() -> None:
    model, likelihood, x, y = problem("whitened")
    result = winnow(model, likelihood, (x, y), max_points=3)
    with pytest.raises(InputError, match="what `winnow` returned"):
        update_winnowed(model, likelihood, (x, y))
    with pytest.raises(InputError, match="n_candidates"):
        update_winnowed(result, likelihood, (x, y), n_candidates=-1)
    with pytest.raises(InputError, match="at most 4096 rows"):
        update_winnowed(result, likelihood, (x.repeat(70, 1), y.repeat(70)))
    with pytest.raises(InputError, match="NaN"):
        update_winnowed(result, likelihood, (x, y * torch.nan))
