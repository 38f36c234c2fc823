"""Sums over graded nodes against closed forms."""

import pytest
import torch

from winnowgp.models.quadrature import graded_nodes


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("shift", [-4.0, 0.0, 3.0])
def test_moments_are_those_of_the_gaussian(shift: float, scale: float) -> None:
    """Wherever the nodes are dense, within a few deviations of the mean."""
    mean, deviation = (torch.full((2, 1), v, dtype=torch.float64) for v in (5.0, 20.0))
    centre = mean + shift * deviation
    nodes = graded_nodes(
        mean, deviation, centre=centre, scale=torch.full_like(mean, scale), count=256
    )
    weight = nodes.log_weight.exp()
    for power, moment in ((0, 1.0), (1, 0.0), (2, 1.0), (4, 3.0)):
        found = (weight * nodes.z**power).sum(0)
        torch.testing.assert_close(found, torch.full_like(mean, moment), rtol=0, atol=1e-8)


@pytest.mark.parametrize("width", [1e-3, 1.0, 1e4])
def test_a_narrow_bump_is_seen(width: float) -> None:
    """∫ N(f; 0, 100²) N(c; f, w²) df = N(c; 0, 100² + w²)."""
    zero = torch.zeros(1, dtype=torch.float64)
    deviation, centre = zero + 100, zero + 150
    nodes = graded_nodes(zero, deviation, centre=centre, scale=zero + width, count=256)
    bump = torch.distributions.Normal(centre, width).log_prob(deviation * nodes.z)
    found = (nodes.log_weight + bump).logsumexp(0)
    wide = torch.distributions.Normal(zero, (deviation**2 + width**2).sqrt())
    torch.testing.assert_close(found, wide.log_prob(centre), rtol=0, atol=1e-8)
