"""Where deep models start: linear maps without doubt, candidates that are images of each other."""

import pytest
import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from helpers.deep_problems import normal, rows
from winnowgp.errors import InputError
from winnowgp.models import DeepGP, DeepLayer, deep_layers
from winnowgp.models.deep_layer import linear_map

X = normal(12, 3, seed=0) @ torch.diag(torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)) + 1
Z = X[:5]


def rbf(*given: int) -> Kernel:
    """The last number given is that of the inputs."""
    return ScaleKernel(RBFKernel(ard_num_dims=given[-1]))


def layers(*widths: int, **options) -> list[DeepLayer]:
    return deep_layers(X, Z, kernel=rbf, widths=widths, **options)


def mean(layer: DeepLayer, inputs: Tensor) -> Tensor:
    return layer.marginals(inputs, layer.points()).mean.detach()


def test_hidden_layers_start_as_the_identity_without_doubt() -> None:
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


def test_more_outputs_are_padded_by_zeros_and_fewer_are_principal_components() -> None:
    wide, _ = layers(4, 1)
    torch.testing.assert_close(mean(wide, X), torch.cat([X, torch.zeros(12, 1).double()], 1))
    narrow, last = layers(2, 1)
    A = narrow.slope
    torch.testing.assert_close(A.mT @ A, torch.eye(2).double())
    centred = X - X.mean(0)
    # Of all plane projections the one that keeps most of the variance: the two largest eigenvalues.
    kept = (centred @ A).square().sum()
    torch.testing.assert_close(kept, torch.linalg.eigvalsh(centred.mT @ centred)[-2:].sum())
    torch.testing.assert_close(last.candidates.detach(), Z @ A)


def test_connected_layers_see_the_input_after_the_hidden_outputs() -> None:
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


def test_zero_means_are_left_to_be_learnt() -> None:
    first, last = layers(2, 1, hidden_mean="zero", q_scale=0.1)
    assert not first.slope.any()
    assert torch.equal(first.q_factor[1], 0.1 * torch.eye(5).double())
    assert last.D == 2


def test_one_layer_is_shallow() -> None:
    (only,) = layers(2)
    assert not only.slope.any()
    assert torch.equal(only.q_factor[0], torch.eye(5).double())


def test_linear_maps_of_no_outputs_are_empty() -> None:
    assert linear_map(X, 0).shape == (3, 0)
    assert torch.equal(linear_map(X, 3), torch.eye(3).double())


def test_bad_widths_and_means_are_named() -> None:
    for widths in ((), (2, 0), (-1, 1)):
        with pytest.raises(
            InputError, match=r"`widths` must be one positive number per layer; got"
        ):
            layers(*widths)
    with pytest.raises(InputError, match=r"`hidden_mean` must be one of identity, zero; got 'id'"):
        layers(2, 1, hidden_mean="id")
