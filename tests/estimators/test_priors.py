"""Weak priors of `SparseGPRegressor`: where they are used, and what they prevent."""

from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from scipy import stats

from helpers.short_fits import shortest_fits
from winnowgp import SparseGPRegressor, load
from winnowgp.errors import InputError
from winnowgp.models.priors import add_weak_priors, log_prior

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 6))
NOISE = RNG.normal(size=24)


def names(model: Any) -> set[str]:
    parts = [*model.kernel_.modules(), *model.likelihood_.modules()]
    return {name for part in parts for name in getattr(part, "_priors", {})}


def fitted(**settings: Any) -> SparseGPRegressor:
    with shortest_fits():
        return SparseGPRegressor("rbf", inducing_points=X[:3], **settings).fit(X, X[:, 0])


def test_weak_priors_have_their_modes_where_they_should() -> None:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=4)).double()
    add_weak_priors(kernel)
    kernel.outputscale = torch.tensor(2.0)
    kernel.base_kernel.lengthscale = torch.tensor([[6.0, 1.0, 6.0, 30.0]])

    def mode_at(x: float, mode: float, width: float) -> float:
        return float(stats.lognorm.logpdf(x, s=width, scale=mode * np.exp(width**2)))

    # Three standard deviations times √4, and one; longer lengthscales are as probable as the mode.
    expected = sum(mode_at(x, 6.0, 1.0) for x in (6.0, 1.0, 6.0, 6.0)) + mode_at(2.0, 1.0, 2.0)
    assert log_prior(kernel).item() == pytest.approx(expected, rel=1e-6)
    assert mode_at(6.0, 6.0, 1.0) > max(mode_at(5.9, 6.0, 1.0), mode_at(6.1, 6.0, 1.0))


def test_weak_priors_are_on_by_default_and_saved(tmp_path) -> None:
    model = fitted()
    assert names(model) == {"lengthscale_prior", "outputscale_prior", "noise_prior"}
    model.save(tmp_path / "model.winnow")
    again = load(tmp_path / "model.winnow")
    assert names(again) == names(model)
    assert log_prior(again.kernel_).item() == pytest.approx(log_prior(model.kernel_).item())


def test_priors_none_adds_none() -> None:
    assert names(fitted(priors=None)) == set()


def test_weak_priors_leave_given_kernels_and_other_likelihoods_alone() -> None:
    kernel = ScaleKernel(RBFKernel(ard_num_dims=6))
    with shortest_fits():
        given = SparseGPRegressor(kernel, inducing_points=X[:3]).fit(X, X[:, 0])
        counts = SparseGPRegressor("rbf", likelihood="poisson", inducing_points=X[:3])
        counts.fit(X, np.arange(24) % 3)
    assert names(given) == names(counts) == set()


def test_priors_unknown_name_raises() -> None:
    with pytest.raises(InputError, match="`priors` must be 'weak' or None; got 'strong'"):
        fitted(priors="strong")


# A constant is the right model of noise.
@pytest.mark.filterwarnings("ignore::winnowgp.errors.NoInducingPointsWarning")
@pytest.mark.parametrize(
    "settings",
    [{"kernel": "rbf", "hyper": "point"}, pytest.param({}, marks=pytest.mark.slow)],
    ids=["rbf", "default"],
)
@pytest.mark.usefixtures("one_size")
def test_few_rows_of_noise_are_predicted_no_worse_than_by_a_constant(
    settings: dict[str, Any],
) -> None:
    """Without priors and held-out rows the fit interpolated the noise: −3 nats per observation."""
    rng = np.random.default_rng(1)
    fresh, y = rng.normal(size=(300, 6)), rng.normal(size=300)
    model = SparseGPRegressor(**settings, random_state=0).fit(X, NOISE)
    constant = stats.norm.logpdf(y, NOISE.mean(), NOISE.std(ddof=1)).mean()
    assert model.log_density(fresh, y).mean() > constant - 0.05
