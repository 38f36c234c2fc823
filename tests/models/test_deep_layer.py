"""One layer against dense matrices in u-space: marginals, subsets, and what is refused."""

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from linear_operator import to_dense

from helpers.deep_problems import dense_kl, dense_marginals, dense_q, layer, normal
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.models import DeepLayer

KERNELS = {
    "rbf": lambda: None,
    "matern": lambda: ScaleKernel(MaternKernel(nu=1.5)),
    "sum": lambda: ScaleKernel(RBFKernel()) + ScaleKernel(MaternKernel(nu=0.5)),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_marginals_are_those_of_the_definition(kernel) -> None:
    made, X = layer(2, 3, kernel=kernel()), 2 * normal(7, 2, seed=5)
    found = made.marginals(X, made.points())
    mean, variance = dense_marginals(made, X)
    torch.testing.assert_close(found.mean.detach(), mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.variance.detach(), variance, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(made.points().kl().detach(), dense_kl(made), rtol=1e-9, atol=1e-9)


def test_batches_of_inputs_are_so_many_rows() -> None:
    made, X = layer(2, 3), normal(5, 4, 6, 2, seed=5)
    points = made.points()
    together = made.marginals(X, points.over_samples())
    alone = made.marginals(X.reshape(-1, 2), points)
    assert together.mean.shape == (5, 4, 6, 3)
    torch.testing.assert_close(together.mean.reshape(-1, 3), alone.mean)
    torch.testing.assert_close(together.variance.reshape(-1, 3), alone.variance)


def test_above_the_diagonal_of_a_factor_there_is_nothing() -> None:
    made, X = layer(2, 2), normal(5, 2, seed=5)
    before = made.marginals(X, made.points())
    subset = made.subset_points(all_masks(4)[[0b0101]])
    with torch.no_grad():
        made.q_factor.add_(torch.ones_like(made.q_factor).triu(1))
    after = made.marginals(X, made.points())
    torch.testing.assert_close(after.variance, before.variance)
    again = made.subset_points(all_masks(4)[[0b0101]])
    torch.testing.assert_close(again.q_factor, subset.q_factor)


# Sizes 0, 1, 2, 3 and 4 in one padded batch.
MASKS = all_masks(4)[[0b0000, 0b0100, 0b1001, 0b0110, 0b1101, 0b1111]]


def test_subsets_use_the_marginal_of_u_whatever_else_is_in_the_batch() -> None:
    made, X = layer(2, 3), normal(6, 2, seed=5)
    points = made.subset_points(MASKS)
    found = made.marginals(X, points)
    kl = points.kl().detach()
    for number, keep in enumerate(MASKS):
        mean, variance = dense_marginals(made, X, keep)
        torch.testing.assert_close(found.mean[number].detach(), mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.variance[number].detach(), variance, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(kl[number], dense_kl(made, keep), rtol=1e-9, atol=1e-9)


def test_whitened_coordinates_may_not_be_indexed() -> None:
    """The twin that takes sub-vectors of v would be told apart by these numbers."""
    made, X, keep = layer(2, 3), normal(6, 2, seed=5), MASKS[4]
    wrong = made.with_q(
        made.candidates[keep], made.q_mean[keep], made.q_factor.tril()[:, keep][:, :, keep]
    )
    mean, variance = dense_marginals(made, X, keep)
    twin = wrong.marginals(X, wrong.points())
    assert (twin.mean.detach() - mean).abs().max() > 0.01
    assert (twin.variance.detach() - variance).abs().max() > 0.01


def test_no_points_are_the_prior_and_all_are_the_ordinary_layer() -> None:
    made, X = layer(2, 3), normal(6, 2, seed=5)
    empty = made.subset_points(MASKS[:1])
    found = made.marginals(X, empty)
    torch.testing.assert_close(found.mean[0], made.centre(X))
    torch.testing.assert_close(found.variance[0], torch.full((6, 3), 0.8).double())
    assert empty.kl().item() == 0
    whole, points = made.points(), made.subset_points(MASKS[-1:])
    torch.testing.assert_close(points.L[0], whole.L, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(points.q_mean[0], whole.q_mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(points.kl()[0], whole.kl(), rtol=1e-9, atol=1e-9)
    ours, theirs = made.marginals(X, points), made.marginals(X, whole)
    torch.testing.assert_close(ours.mean[0], theirs.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.variance[0], theirs.variance, rtol=1e-8, atol=1e-9)


def test_pruning_keeps_the_marginal_of_u_and_all_else() -> None:
    made, keep = layer(2, 3), MASKS[4]
    made.candidates.requires_grad_(False)
    pruned = made.prune(keep)
    m, S, _ = dense_q(made, keep)
    ours = dense_q(pruned)
    torch.testing.assert_close(ours[0], m, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours[1], S, rtol=1e-9, atol=1e-9)
    assert (pruned.K, pruned.D, pruned.P) == (3, 2, 3)
    assert torch.equal(pruned.candidates, made.candidates[keep])
    assert not pruned.candidates.requires_grad
    assert torch.equal(pruned.level, made.level)
    assert torch.equal(pruned.slope, made.slope)
    assert made.K == 4


def test_a_new_layer_is_its_prior_around_a_linear_map() -> None:
    X, slope = normal(6, 2, seed=5), normal(2, 3, seed=6)
    made = DeepLayer(ScaleKernel(RBFKernel()), normal(4, 2, seed=0), outputs=3, slope=slope)
    found = made.marginals(X, made.points())
    torch.testing.assert_close(found.mean, X @ slope)
    variance = to_dense(made.kernel(X)).diagonal()
    torch.testing.assert_close(found.variance, variance[:, None].expand(6, 3))
    # KL of N(0, s² I) from N(0, I), three outputs of four points.
    doubtless = DeepLayer(made.kernel, made.candidates.detach(), outputs=3, q_scale=0.1)
    expected = 12 * 0.5 * (0.1**2 - 1 - 2 * torch.tensor(0.1).log().item())
    assert doubtless.points().kl().item() == pytest.approx(expected)


def test_subsets_are_differentiable_in_every_parameter() -> None:
    made, X = layer(2, 3), normal(6, 2, seed=5)
    points = made.subset_points(MASKS)
    found = made.marginals(X, points)
    (found.mean.square().sum() + found.variance.sum() + points.kl().sum()).backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_bad_parts_are_named() -> None:
    kernel, Z = ScaleKernel(RBFKernel()), normal(4, 2, seed=0)
    with pytest.raises(InputError, match=r"`slope` must be \[2 3\].*got shape \[2, 2\]"):
        DeepLayer(kernel, Z, outputs=3, slope=torch.zeros(2, 2))
    with pytest.raises(InputError, match="`candidates` must be finite"):
        DeepLayer(kernel, Z * float("nan"), outputs=1)
    with pytest.raises(InputError, match="batch shape"):
        DeepLayer(RBFKernel(batch_shape=torch.Size([2])), Z, outputs=1)
