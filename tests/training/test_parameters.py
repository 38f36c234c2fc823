"""A model's parameters as a vector: read, written and differentiated."""

from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.kernels import Kernel, LinearKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.models import SparseGP
from winnowgp.training.coordinates import Coordinates

LIMIT = 1e-6
close: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}


def data(N: int = 20, D: int = 2) -> Dataset:
    g = torch.Generator().manual_seed(0)
    X = 3 * torch.rand(N, D, generator=g, dtype=torch.float64)
    return Dataset.of(X, torch.sin(X).sum(1) + 0.3)


def kernel() -> ScaleKernel:
    """A positive scale and lengthscales between two limits."""
    base = RBFKernel(ard_num_dims=2, lengthscale_constraint=Interval(0.05, 5.0))
    scaled = ScaleKernel(base)
    scaled.outputscale = 1.7
    base.lengthscale = torch.tensor([0.6, 2.0])
    return scaled


def model(rows: Dataset, k: Kernel | None = None) -> SparseGP:
    """One parameter of every kind: above 0, above 1e-6, between limits, free, and locations."""
    mean = ConstantMean()
    mean.constant = 0.4
    return SparseGP(k or kernel(), rows.X[:4] + 0.1, mean=mean, noise=0.2)


def parameters(gp: SparseGP) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in gp.named_parameters()}


def slopes(value: Callable[[Tensor], float], x: Tensor, h: float = 1e-5) -> Tensor:
    """Central differences, one coordinate at a time."""
    steps = h * torch.eye(len(x), dtype=x.dtype)
    return torch.tensor([(value(x + e) - value(x - e)) / (2 * h) for e in steps], dtype=x.dtype)


def test_coordinates_of_each_parameter_kind() -> None:
    rows = data()
    gp = model(rows)
    base = gp.kernel.get_submodule("base_kernel")
    spread, centre = torch.std_mean(rows.X, dim=0, correction=0)
    expected = [
        torch.tensor([1.7], dtype=torch.float64).log(),
        base.get_parameter("raw_lengthscale").detach().flatten(),
        torch.tensor([0.4], dtype=torch.float64),
        torch.tensor([0.2 - LIMIT], dtype=torch.float64).log(),
        ((gp.candidates.detach() - centre) / (spread * sqrt(2))).flatten(),
    ]
    # 1.7, 0.4 and 0.2 went through float32 where GPyTorch made them.
    torch.testing.assert_close(
        Coordinates(gp, rows.X).read(), torch.cat(expected), rtol=1e-6, atol=0
    )


def test_coordinates_write_after_read_changes_nothing() -> None:
    rows = data()
    gp = model(rows)
    before = parameters(gp)
    coordinates = Coordinates(gp, rows.X)
    coordinates.write(coordinates.read())
    for name, parameter in gp.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], **close)


def test_coordinates_read_after_write_round_trips(generator: torch.Generator) -> None:
    rows = data()
    gp = model(rows)
    coordinates = Coordinates(gp, rows.X)
    size = len(coordinates.read())
    for _ in range(20):
        x = 3 * torch.randn(size, generator=generator, dtype=torch.float64)
        coordinates.write(x)
        torch.testing.assert_close(coordinates.read(), x, rtol=1e-9, atol=1e-9)
        assert gp.noise > LIMIT


def test_coordinates_noise_near_limit_round_trips() -> None:
    rows = data()
    gp = SparseGP(kernel(), rows.X[:0], noise=LIMIT + 1e-10)
    coordinates = Coordinates(gp, rows.X)
    x = coordinates.read()
    assert abs(x[-1].exp().item() / 1e-10 - 1) < 1e-4
    coordinates.write(x)
    torch.testing.assert_close(coordinates.read(), x, rtol=1e-8, atol=0)


def test_coordinates_other_constraints_are_logarithmic() -> None:
    """Above 0.5, and kept there by exp rather than softplus."""
    rows = data()
    exponential: dict[str, Any] = {"transform": torch.exp, "inv_transform": torch.log}
    constraint = GreaterThan(0.5, **exponential)
    base = RBFKernel(lengthscale_constraint=constraint).initialize(lengthscale=2.5)
    gp = SparseGP(base, rows.X[:0])
    coordinates = Coordinates(gp, rows.X)
    torch.testing.assert_close(coordinates.read()[0].exp().item(), 2.0, rtol=1e-6, atol=0)
    coordinates.write(torch.tensor([0.0, 0.0], dtype=torch.float64))
    raw = gp.kernel.get_parameter("raw_lengthscale").detach()
    assert constraint.transform(raw).item() == pytest.approx(1.5, rel=1e-12)


def test_coordinates_ignore_frozen_parameters() -> None:
    rows = data()
    gp = model(rows)
    gp.candidates.requires_grad_(False)
    gp.kernel.get_parameter("base_kernel.raw_lengthscale").requires_grad_(False)
    gp.likelihood.raw_noise.requires_grad_(False)
    coordinates = Coordinates(gp, rows.X)
    before = parameters(gp)
    assert len(coordinates.read()) == 2
    coordinates.write(torch.tensor([1.0, -2.0], dtype=torch.float64))
    moved = {n for n, p in gp.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert moved == {"kernel.raw_outputscale", "mean.raw_constant"}


def test_coordinates_frozen_model_is_empty() -> None:
    rows = data()
    gp = model(rows).requires_grad_(False)
    coordinates = Coordinates(gp, rows.X)
    assert coordinates.read().shape == (0,)
    coordinates.write(rows.X.new_zeros(0))
    assert coordinates.gradient().shape == (0,)


def test_coordinates_gradient_matches_finite_differences() -> None:
    rows = data()
    gp = model(rows, kernel() + LinearKernel())
    coordinates = Coordinates(gp, rows.X)

    def value(x: Tensor) -> float:
        coordinates.write(x)
        return gp.bound(rows).item()

    x = coordinates.read()
    expected = slopes(value, x)
    coordinates.write(x)
    gp.bound(rows).backward()
    torch.testing.assert_close(coordinates.gradient(), expected, rtol=1e-6, atol=1e-6)


def test_coordinates_gradient_at_extreme_values() -> None:
    rows = data()
    gp = model(rows)
    coordinates = Coordinates(gp, rows.X)
    x = coordinates.read()
    x[0], x[4] = 4.0, -9.0  # outputscale e⁴, noise 1e-6 + e⁻⁹

    def value(x: Tensor) -> float:
        coordinates.write(x)
        return gp.bound(rows).item()

    expected = slopes(value, x, h=1e-4)
    coordinates.write(x)
    gp.bound(rows).backward()
    torch.testing.assert_close(coordinates.gradient(), expected, rtol=1e-4, atol=1e-3)


def test_coordinates_unused_parameter_has_zero_gradient() -> None:
    rows = data()
    gp = model(rows)
    coordinates = Coordinates(gp, rows.X)
    gp.noise.log().backward()
    gradient = coordinates.gradient()
    # ∂ log σ² / ∂ log(σ² − l) = (σ² − l)/σ²
    assert abs(gradient[4].item() - (1 - LIMIT / gp.noise.item())) < 1e-12
    assert gradient.count_nonzero() == 1


def test_coordinates_unit_step_scales_locations() -> None:
    rows = data()
    X = torch.cat([rows.X, torch.full_like(rows.X[:, :1], 7.0)], dim=1)
    gp = SparseGP(ScaleKernel(RBFKernel()), X[:2]).requires_grad_(False)
    gp.candidates.requires_grad_(True)
    before = gp.candidates.detach().clone()
    coordinates = Coordinates(gp, X)
    coordinates.write(coordinates.read() + 1)
    spread = rows.X.std(0, correction=0) * sqrt(3)
    expected = torch.cat([spread, spread.new_ones(1)]).expand(2, 3)
    torch.testing.assert_close(gp.candidates.detach() - before, expected, rtol=1e-12, atol=1e-12)
