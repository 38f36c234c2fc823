"""Drawn functions against the exact mean and covariance of the posterior."""

from typing import Any

import pytest
import torch
from gpytorch import kernels
from gpytorch.likelihoods import GaussianLikelihood, PoissonLikelihood
from gpytorch.means import ConstantMean
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.estimators.kernels import kernel_from
from winnowgp.models import Posterior
from winnowgp.models.kernels import covariance
from winnowgp.models.pathwise import PosteriorPaths

DRAWS = 4000
X = torch.randn(4, 2, generator=torch.Generator().manual_seed(3)).double()
Z = torch.randn(3, 2, generator=torch.Generator().manual_seed(4)).double()


def posterior(kernel: Any, *, points: int = 3, P: int = 1, level: float = 0.7) -> Posterior:
    g = torch.Generator().manual_seed(5)
    mean = ConstantMean().double()
    mean.constant = level
    factor = torch.randn(P, points, points, generator=g).double().tril() / 2
    return Posterior(
        kernel.double(),
        Z[:points],
        mean=mean,
        likelihood=GaussianLikelihood(),
        q_mean=torch.randn(points, P, generator=g).double(),
        q_factor=factor,
    )


def z_scores(values: Tensor, mean: Tensor, cov: Tensor) -> Tensor:
    """Return those of all means and second moments of draws `[S N]`."""
    errors = values - mean
    second = errors[:, :, None] * errors[:, None, :]
    scale = values.shape[0] ** 0.5
    first = scale * errors.mean(0) / errors.std(0)
    return torch.cat([first, (scale * (second.mean(0) - cov) / second.std(0)).flatten()])


SUMS = [
    "rbf",
    "matern12",
    "matern32",
    "matern52",
    "rq",
    "periodic(period=1.7)",
    "linear",
    "constant",
]
SUMS += [
    "rbf[1] + matern52[0] + linear",
    "rbf * periodic(period=0.9) * rq",
    "(rbf + constant) * rbf",
]


@pytest.mark.parametrize("expression", SUMS)
def test_paths_have_mean_and_covariance_of_the_posterior(expression: str) -> None:
    """At new rows and at inducing points, for any number of frequencies: 24 z-scores."""
    kernel = kernel_from(expression, 2, scale=torch.ones(2))
    # A linear or constant kernel has rank two or one.
    points = {"linear": 2, "constant": 1}.get(expression, 3)
    q = posterior(kernel, points=points)
    rows = torch.cat([X[:3], Z[:1]])
    paths = PosteriorPaths(q, DRAWS, frequencies=3, generator=torch.Generator().manual_seed(0))
    scores = z_scores(paths(rows)[..., 0], q.predict(rows).mean[:, 0], q.covariance(rows)[0])
    known = scores.isfinite()
    assert known.sum() >= 4
    assert scores[known].abs().max() < 4.5


def test_z_scores_see_a_prior_that_is_too_wide() -> None:
    q = posterior(kernel_from("rbf", 2))
    paths = PosteriorPaths(q, DRAWS, frequencies=3, generator=torch.Generator().manual_seed(0))
    cov = q.covariance(X)[0]
    assert z_scores(1.1 * paths(X)[..., 0], q.predict(X).mean[:, 0], cov).abs().max() > 5


def test_paths_are_nearly_normal_with_many_frequencies() -> None:
    q = posterior(kernel_from("matern52", 2))
    values = PosteriorPaths(q, DRAWS, generator=torch.Generator().manual_seed(0))(X)[..., 0]
    errors = (values - values.mean(0)) / values.std(0)
    # The standard error of a normal fourth moment is √(96/S).
    assert ((errors**4).mean(0) - 3).abs().max() < 5 * (96 / DRAWS) ** 0.5


def test_paths_of_several_outputs_are_independent() -> None:
    q = posterior(kernel_from("rbf", 2), P=2)
    values = PosteriorPaths(q, DRAWS, frequencies=3, generator=torch.Generator().manual_seed(1))(X)
    for output in range(2):
        mean, cov = q.predict(X).mean[:, output], q.covariance(X)[output]
        assert z_scores(values[..., output], mean, cov).abs().max() < 4.5
    one, two = (values - values.mean(0)).unbind(-1)
    both = one * two
    assert (DRAWS**0.5 * both.mean(0) / both.std(0)).abs().max() < 4


def test_paths_are_functions() -> None:
    """Values depend neither on the other rows, nor on batches, nor on the call."""
    q = posterior(kernel_from("rbf + linear", 2), P=2)
    paths = PosteriorPaths(q, 5, generator=torch.Generator().manual_seed(1))
    values = paths(X)
    torch.testing.assert_close(paths(X[1:3]), values[:, 1:3])
    torch.testing.assert_close(
        paths(X.reshape(2, 1, 2, 2)), values.reshape(5, 2, 2, 2).transpose(0, 1)
    )
    # One function for each of as many batches of rows.
    each = [0, 1, 2, 3, 0]
    torch.testing.assert_close(paths(X[each][:, None])[:, 0], values[range(5), each])


def test_paths_are_differentiable() -> None:
    q = posterior(kernel_from("matern52 + linear", 2))
    paths = PosteriorPaths(q, 3, generator=torch.Generator().manual_seed(1))
    rows = X.clone().requires_grad_(True)
    assert torch.autograd.gradcheck(paths, rows)


def test_paths_of_a_nearly_singular_kernel_pass_through_the_inducing_points() -> None:
    close = torch.linspace(0, 1, 12).double()[:, None]
    kernel = kernels.ScaleKernel(kernels.RBFKernel()).double()
    eye = 1e-3 * torch.eye(12).double()
    q = Posterior(
        kernel,
        close,
        mean=ConstantMean().double(),
        likelihood=PoissonLikelihood(),
        q_mean=torch.ones(12, 1).double(),
        q_factor=eye[None],
    )
    paths = PosteriorPaths(q, 200, generator=torch.Generator().manual_seed(1))
    expected = covariance(kernel, close, close) @ q.weights
    torch.testing.assert_close(paths(close).mean(0), expected, atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (kernels.PolynomialKernel(power=2), "PolynomialKernel"),
        (kernels.RBFKernel(active_dims=(0,)) * kernels.LinearKernel(active_dims=(1,)), "product"),
    ],
)
def test_paths_of_another_kernel_are_refused(kernel: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PosteriorPaths(posterior(kernel), 2)


def test_paths_of_rows_with_other_columns_are_refused() -> None:
    with pytest.raises(InputError, match=r"must be \[..., N, 2\]"):
        PosteriorPaths(posterior(kernel_from("rbf", 2)), 2)(X[:, :1])
