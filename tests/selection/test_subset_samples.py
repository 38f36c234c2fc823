"""Diagnostics of Markov chains on series whose answers are known, and summaries of samples."""

import pytest
import torch
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.selection.subset_samples import SubsetSamples, effective_samples, r_hat


def autoregressive(correlation: float, *, chains: int = 4, draws: int = 2_000) -> Tensor:
    """Stationary series x_t = ρ x_{t−1} + √(1 − ρ²) ε of unit variance."""
    g = torch.Generator().manual_seed(0)
    eps = torch.randn(draws, chains, generator=g, dtype=torch.float64)
    series = [eps[0]]
    for noise in eps[1:]:
        series.append(correlation * series[-1] + (1 - correlation**2) ** 0.5 * noise)
    return torch.stack(series, dim=1)


@pytest.mark.parametrize("correlation", [-0.3, 0.0, 0.5, 0.9])
def test_effective_samples_of_autoregression_match_theory(correlation: float) -> None:
    # Σ_t ρ^t = ρ/(1 − ρ): an effective number of n (1 − ρ)/(1 + ρ).
    expected = 8_000 * (1 - correlation) / (1 + correlation)
    assert effective_samples(autoregressive(correlation)) == pytest.approx(expected, rel=0.15)


def test_r_hat_is_one_if_chains_agree_and_large_if_not() -> None:
    draws = autoregressive(0.2)
    assert r_hat(draws) == pytest.approx(1.0, abs=0.005)
    shift = torch.tensor([0.0, 0.0, 2.0, 2.0], dtype=torch.float64)
    # Means of variance 8/7 over half-chains, unit variance within: R̂² ≈ 1 + 8/7.
    assert r_hat(draws + shift[:, None]) == pytest.approx((1 + 8 / 7) ** 0.5, rel=0.03)
    trend = draws + torch.linspace(0, 3, 2_000, dtype=torch.float64)
    assert r_hat(trend) > 1.2
    assert effective_samples(draws + shift[:, None]) < 20


def test_diagnostics_of_constant_draws() -> None:
    constant = torch.ones(3, 10, dtype=torch.float64)
    assert r_hat(constant) == 1.0
    assert effective_samples(constant) == 30.0
    assert r_hat(constant * torch.arange(3)[:, None]) == float("inf")


def samples() -> SubsetSamples:
    masks = torch.tensor(
        [[[1, 0, 0], [1, 1, 0], [1, 0, 1], [1, 1, 0]], [[0, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 1]]]
    ).bool()
    bounds = torch.arange(8, dtype=torch.float64).reshape(2, 4)
    inclusion = torch.tensor([[0.9, 0.5, 0.2], [0.7, 0.7, 0.4]], dtype=torch.float64)
    weights = torch.tensor([0.0, -1.0, -2.0, -3.0], dtype=torch.float64)
    return SubsetSamples(masks, bounds, inclusion, weights)


def test_subset_samples_summaries() -> None:
    drawn = samples()
    assert drawn.sizes.tolist() == [[1, 2, 2, 2], [0, 3, 2, 2]]
    torch.testing.assert_close(drawn.inclusion, torch.tensor([0.8, 0.6, 0.3]).double())
    assert drawn.pairwise_inclusion()[0, 1].item() == 0.5
    assert drawn.best.score == 5.0
    assert drawn.best.mask.tolist() == [True, False, True]
    assert drawn.credible_size(0.5) == (1, 2)
    assert drawn.credible_size(0.99) == (0, 3)
    with pytest.raises(InputError, match="between 0 and 1"):
        drawn.credible_size(90)
