"""Layers of deep GPs against dense marginals, and their initial state."""

import pytest
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator import to_dense
from torch import Tensor

from helpers.deep_problems import dense_kl, dense_marginals, dense_q, layer, normal, rows
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.models import DeepGP, DeepLayer, deep_layers
from winnowgp.models.deep_layer import linear_map

KERNELS = {
    "rbf": lambda: None,
    "matern": lambda: ScaleKernel(MaternKernel(nu=1.5)),
    "sum": lambda: ScaleKernel(RBFKernel()) + ScaleKernel(MaternKernel(nu=0.5)),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
def test_deep_layer_marginals_equal_definition(kernel) -> None:
    made, X = layer(2, 3, kernel=kernel()), 2 * normal(7, 2, seed=5)
    found = made.marginals(X, made.points())
    mean, variance = dense_marginals(made, X)
    torch.testing.assert_close(found.mean.detach(), mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.variance.detach(), variance, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(made.points().kl().detach(), dense_kl(made), rtol=1e-9, atol=1e-9)


def test_deep_layer_grown_has_the_same_q_f() -> None:
    made, X = layer(2, 3), 2 * normal(7, 2, seed=5)
    grown = made.grown(normal(3, 2, seed=9))
    assert grown.K == made.K + 3
    before, after = dense_marginals(made, X), dense_marginals(grown, X)
    torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(dense_kl(grown), dense_kl(made), rtol=1e-8, atol=1e-8)
    # The new points matter once their q(u) moves.
    with torch.no_grad():
        grown.q_mean[-1] += 1.0
    assert (dense_marginals(grown, X)[0] - before[0]).abs().max() > 1e-3


def test_deep_layer_batched_inputs_equal_flat_rows() -> None:
    made, X = layer(2, 3), normal(5, 4, 6, 2, seed=5)
    points = made.points()
    together = made.marginals(X, points)
    alone = made.marginals(X.reshape(-1, 2), points)
    assert together.mean.shape == (5, 4, 6, 3)
    torch.testing.assert_close(together.mean.reshape(-1, 3), alone.mean)
    torch.testing.assert_close(together.variance.reshape(-1, 3), alone.variance)


def test_deep_layer_ignores_upper_triangle_of_factor() -> None:
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


def test_deep_layer_subset_uses_marginal_of_u() -> None:
    made, X = layer(2, 3), normal(6, 2, seed=5)
    points = made.subset_points(MASKS)
    found = made.marginals(X, points)
    kl = points.kl().detach()
    for number, keep in enumerate(MASKS):
        mean, variance = dense_marginals(made, X, keep)
        torch.testing.assert_close(found.mean[number].detach(), mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.variance[number].detach(), variance, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(kl[number], dense_kl(made, keep), rtol=1e-9, atol=1e-9)


def test_deep_layer_indexing_whitened_q_differs() -> None:
    """An implementation that takes sub-vectors of v has other marginals."""
    made, X, keep = layer(2, 3), normal(6, 2, seed=5), MASKS[4]
    wrong = made.with_q(
        made.candidates[keep], made.q_mean[keep], made.q_factor.tril()[:, keep][:, :, keep]
    )
    mean, variance = dense_marginals(made, X, keep)
    twin = wrong.marginals(X, wrong.points())
    assert (twin.mean.detach() - mean).abs().max() > 0.01
    assert (twin.variance.detach() - variance).abs().max() > 0.01


def test_deep_layer_no_points_is_prior_all_is_layer() -> None:
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


def test_deep_layer_prune_keeps_marginal_of_u() -> None:
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


def test_deep_layer_new_layer_is_prior_around_linear_map() -> None:
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


def test_deep_layer_subsets_are_differentiable() -> None:
    made, X = layer(2, 3), normal(6, 2, seed=5)
    points = made.subset_points(MASKS)
    found = made.marginals(X, points)
    (found.mean.square().sum() + found.variance.sum() + points.kl().sum()).backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_deep_layer_invalid_arguments_raise() -> None:
    kernel, Z = ScaleKernel(RBFKernel()), normal(4, 2, seed=0)
    with pytest.raises(InputError, match=r"`slope` must be \[2 3\].*got shape \[2, 2\]"):
        DeepLayer(kernel, Z, outputs=3, slope=torch.zeros(2, 2))
    with pytest.raises(InputError, match="`candidates` must be finite"):
        DeepLayer(kernel, Z * float("nan"), outputs=1)
    with pytest.raises(InputError, match="batch shape"):
        DeepLayer(RBFKernel(batch_shape=torch.Size([2])), Z, outputs=1)


X = normal(12, 3, seed=0) @ torch.diag(torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)) + 1
Z = X[:5]


def rbf(*given: int) -> Kernel:
    """Build layers of the given widths; `kernel` gets the number of inputs."""
    return ScaleKernel(RBFKernel(ard_num_dims=given[-1]))


def layers(*widths: int, **options) -> list[DeepLayer]:
    return deep_layers(X, Z, kernel=rbf, widths=widths, **options)


def mean(layer: DeepLayer, inputs: Tensor) -> Tensor:
    return layer.marginals(inputs, layer.points()).mean.detach()


def test_deep_layers_hidden_start_as_certain_identity() -> None:
    first, second, last = layers(3, 3, 2)
    assert [(each.D, each.P, each.K) for each in (first, second, last)] == [
        (3, 3, 5),
        (3, 3, 5),
        (3, 2, 5),
    ]
    torch.testing.assert_close(mean(first, X), X)
    torch.testing.assert_close(mean(second, X), X)
    assert not last.slope.any()
    for each in (first, second):
        assert torch.equal(each.q_factor[0], 1e-3 * torch.eye(5).double())
        assert torch.equal(each.candidates, Z)
        assert not each.level.requires_grad
    assert torch.equal(last.q_factor[1], torch.eye(5).double())
    assert last.level.requires_grad


def test_deep_layers_widths_pad_or_use_principal_components() -> None:
    wide, _ = layers(4, 1)
    torch.testing.assert_close(mean(wide, X), torch.cat([X, torch.zeros(12, 1).double()], 1))
    narrow, last = layers(2, 1)
    A = narrow.slope
    torch.testing.assert_close(A.mT @ A, torch.eye(2).double())
    centred = X - X.mean(0)
    # The plane projection of largest variance: the two largest eigenvalues.
    kept = (centred @ A).square().sum()
    torch.testing.assert_close(kept, torch.linalg.eigvalsh(centred.mT @ centred)[-2:].sum())
    torch.testing.assert_close(last.candidates.detach(), Z @ A)


def test_deep_layers_skip_connections_follow_hidden_outputs() -> None:
    first, second, last = layers(2, 4, 1, skip_connections=True)
    assert [each.D for each in (first, second, last)] == [3, 5, 7]
    torch.testing.assert_close(second.candidates.detach(), torch.cat([Z @ first.slope, Z], dim=1))
    seen = torch.cat([X @ first.slope, X], dim=1)
    image = torch.cat([second.candidates.detach() @ second.slope, Z], dim=1)
    torch.testing.assert_close(last.candidates.detach(), image)
    torch.testing.assert_close(mean(second, seen)[:, :4], (seen @ second.slope)[:, :4])
    model = DeepGP([first, second, last], likelihood=GaussianLikelihood(), skip_connections=True)
    data = rows(D=3)
    assert torch.isfinite(model.bound(type(data).of(data.X, data.Y[:, 0])))


def test_deep_layers_zero_mean_has_no_slope() -> None:
    first, last = layers(2, 1, hidden_mean="zero", q_scale=0.1)
    assert not first.slope.any()
    assert torch.equal(first.q_factor[1], 0.1 * torch.eye(5).double())
    assert last.D == 2


def test_deep_layers_one_width_is_shallow() -> None:
    (only,) = layers(2)
    assert not only.slope.any()
    assert torch.equal(only.q_factor[0], torch.eye(5).double())


def test_linear_map_of_no_outputs_is_empty() -> None:
    assert linear_map(X, 0).shape == (3, 0)
    assert torch.equal(linear_map(X, 3), torch.eye(3).double())


def test_deep_layers_invalid_widths_and_means_raise() -> None:
    for widths in ((), (2, 0), (-1, 1)):
        with pytest.raises(
            InputError, match=r"`widths` must be one positive number per layer; got"
        ):
            layers(*widths)
    with pytest.raises(InputError, match=r"`hidden_mean` must be one of identity, zero; got 'id'"):
        layers(2, 1, hidden_mean="id")
