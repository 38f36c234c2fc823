import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from torch import Tensor

from winnowgp.bounds import exact_log_marginal
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.models import SparseGP


def data(N: int = 20, P: int = 1, seed: int = 0) -> Dataset:
    g = torch.Generator().manual_seed(seed)
    X = 5 * torch.rand(N, 2, generator=g, dtype=torch.float64)
    Y = torch.sin(X[:, :1] + torch.arange(P)) + 0.1 * torch.randn(
        N, P, generator=g, dtype=torch.float64
    )
    return Dataset.of(X, Y)


def model(candidates: Tensor, **arguments) -> SparseGP:
    return SparseGP(ScaleKernel(RBFKernel(ard_num_dims=2)), candidates, noise=0.2, **arguments)


@pytest.mark.parametrize("P", [1, 3])
def test_a_subset_scores_what_the_pruned_model_scores(P: int) -> None:
    rows = data(P=P)
    gp, masks = model(rows.X[:5]), all_masks(5)
    values = gp.subset_objective(rows).value(masks)
    pruned = torch.stack([gp.prune(mask).bound(rows) for mask in masks])
    torch.testing.assert_close(values, pruned, rtol=1e-10, atol=1e-10)
    weights = gp.subset_objective(rows).relaxed_value(masks.double())
    torch.testing.assert_close(weights, pruned, rtol=1e-10, atol=1e-10)


def test_all_ones_is_the_ordinary_bound() -> None:
    rows = data()
    gp = model(rows.X[:7])
    everything = gp.subset_objective(rows).value(torch.ones(1, 7, dtype=torch.bool))
    torch.testing.assert_close(everything[0], gp.bound(rows))


def test_scores_are_differentiable_in_every_parameter() -> None:
    rows = data()
    gp = model(rows.X[:4], mean=ConstantMean())
    masks = torch.tensor([[True, False, True, True], [False, True, False, False]])
    gp.subset_objective(rows).value(masks).sum().backward()
    for name, parameter in gp.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_bounds_enclose_the_evidence_and_meet_it_at_the_data() -> None:
    rows = data()
    few, all_rows = model(rows.X[:6]), model(rows.X)
    kernel = few.kernel(rows.X).to_dense()
    evidence = exact_log_marginal(kernel, Y=rows.Y, noise=few.noise)
    assert few.bound(rows) < evidence < few.upper_bound(rows)
    torch.testing.assert_close(all_rows.bound(rows), evidence, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "kernel",
    [RBFKernel(), MaternKernel(nu=1.5), LinearKernel(), RBFKernel() + LinearKernel()],
    ids=["rbf", "matern", "linear", "sum"],
)
def test_any_gpytorch_kernel_serves(kernel) -> None:
    rows = data()
    gp = SparseGP(kernel, rows.X[:5])
    assert torch.isfinite(gp.bound(rows))
    assert torch.isfinite(gp.posterior(rows).predict(rows.X).variance).all()


def test_pruning_leaves_the_original_alone() -> None:
    rows = data()
    gp = model(rows.X[:4])
    pruned = gp.prune(torch.tensor([True, False, False, True]))
    with torch.no_grad():
        pruned.candidates.add_(1.0)
        pruned.likelihood.noise = torch.tensor(3.0)
    torch.testing.assert_close(gp.candidates.detach(), rows.X[:4])
    assert gp.noise.item() == pytest.approx(0.2)
    assert pruned.K == 2


def test_duplicate_candidates_are_legal() -> None:
    rows = data()
    once, twice = model(rows.X[:5]), model(rows.X[:5].repeat(2, 1))
    torch.testing.assert_close(once.bound(rows), twice.bound(rows), rtol=1e-8, atol=0)
    assert torch.isfinite(twice.posterior(rows).predict(rows.X).mean).all()


def test_bad_arguments_are_named() -> None:
    good = torch.zeros(3, 2, dtype=torch.float64)
    with pytest.raises(InputError, match="`candidates`"):
        model(good * float("nan"))
    with pytest.raises(InputError, match="batch shape"):
        SparseGP(RBFKernel(batch_shape=torch.Size([2])), good)
    with pytest.raises(InputError, match="`noise`"):
        SparseGP(RBFKernel(), good, noise=-1.0)


def test_the_users_kernel_and_mean_are_copied() -> None:
    kernel, mean = ScaleKernel(RBFKernel()), ConstantMean()
    gp = SparseGP(kernel, torch.zeros(2, 1, dtype=torch.float64), mean=mean)
    assert kernel.raw_outputscale.dtype == torch.float32
    assert mean.raw_constant.dtype == torch.float32
    assert gp.kernel is not kernel
