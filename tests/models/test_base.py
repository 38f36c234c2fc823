"""Contracts of models with candidates and of their subset objectives, over all models."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    SoftmaxLikelihood,
)

from helpers.problems import problem
from winnowgp.data import Dataset, MaskedMatrix
from winnowgp.errors import InputError
from winnowgp.models import (
    DeepGP,
    DeepLayer,
    LatentVariableGP,
    SampledLatentGP,
    SparseGP,
    VariationalGP,
)
from winnowgp.models.base import InducingModel, SelectableModel
from winnowgp.models.heteroscedastic import HeteroscedasticGP, LogVarianceLikelihood
from winnowgp.models.kernels import copy_module
from winnowgp.models.priors import add_weak_priors, log_prior
from winnowgp.selection import MarginalGainObjective, SubsetObjective
from winnowgp.selection.objective import RelaxedObjective


def model(order: torch.Tensor) -> tuple[SparseGP, Dataset]:
    p = problem()
    return SparseGP(ScaleKernel(RBFKernel()), p.Z[order], noise=0.2), Dataset.of(p.X, p.Y)


def direct(order: torch.Tensor) -> SubsetObjective:
    gp, data = model(order)
    return gp.subset_objective(data)


def statistics(order: torch.Tensor) -> SubsetObjective:
    gp, data = model(order)
    return gp.subset_statistics(data)


def variational(
    order: torch.Tensor, likelihood: Likelihood, targets: int = 1
) -> tuple[VariationalGP, Dataset]:
    """Return one variational process with its candidates in any order."""
    p = problem()
    f = p.Y[:, :targets]
    Y = (f > -0.4).double() + (f > 0.4).double()
    data = Dataset.of(p.X, Y if isinstance(likelihood, SoftmaxLikelihood) else (Y > 0).double())
    gp = VariationalGP(ScaleKernel(RBFKernel()), p.Z, likelihood=likelihood, targets=targets)
    return gp.with_best_q(data).with_candidates(p.Z[order]), data


def three_classes() -> Likelihood:
    return SoftmaxLikelihood(num_classes=3, mixing_weights=False)


def uncollapsed(order: torch.Tensor) -> SubsetObjective:
    gp, data = variational(order, BernoulliLikelihood())
    return gp.subset_objective(data)


def uncollapsed_softmax(order: torch.Tensor) -> SubsetObjective:
    gp, data = variational(order, three_classes())
    return gp.subset_objective(data, total=2 * data.N)


def site_statistics(order: torch.Tensor) -> SubsetObjective:
    gp, data = variational(order, BernoulliLikelihood(), targets=2)
    statistics = gp.subset_statistics(data)
    assert len(statistics.terms[0].data) == 2
    return statistics


def softmax_statistics(order: torch.Tensor) -> SubsetObjective:
    gp, data = variational(order, three_classes())
    return gp.subset_statistics(data)


def heteroscedastic(
    function: torch.Tensor, noise: torch.Tensor
) -> tuple[HeteroscedasticGP, Dataset]:
    """Return a function and its log noise with these candidates."""
    p, kernel = problem(P=1), ScaleKernel(RBFKernel())
    log_noise = VariationalGP(kernel, p.Z[noise], likelihood=LogVarianceLikelihood())
    data = Dataset.of(p.X, p.Y * (1 + p.X[:, :1]))
    gp = HeteroscedasticGP(SparseGP(kernel, p.Z[function], noise=0.2), log_noise)
    return gp.with_best_q(data), data


def heteroscedastic_function(order: torch.Tensor) -> SubsetObjective:
    gp, data = heteroscedastic(order, order[:0])
    return gp.subset_objective(data)


def heteroscedastic_noise(order: torch.Tensor) -> SubsetObjective:
    gp, data = heteroscedastic(order[:0], order)
    return gp.subset_objective(data)


OBJECTIVES = {
    "heteroscedastic function": heteroscedastic_function,
    "heteroscedastic noise": heteroscedastic_noise,
    "direct": direct,
    "statistics": statistics,
    "uncollapsed": uncollapsed,
    "uncollapsed softmax": uncollapsed_softmax,
    "site statistics": site_statistics,
    "softmax statistics": softmax_statistics,
}
contract = pytest.mark.parametrize("build", OBJECTIVES.values(), ids=OBJECTIVES.keys())
IN_ORDER = torch.arange(6)


@contract
def test_objective_value_of_mask_ignores_rest_of_batch(build, generator) -> None:
    objective = build(IN_ORDER)
    masks = torch.rand(9, objective.K, generator=generator) < 0.5
    together = objective.value(masks)
    alone = torch.cat([objective.value(mask[None]) for mask in masks])
    assert together.shape == (9,)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


@contract
def test_objective_empty_full_and_no_masks_have_values(build) -> None:
    objective = build(IN_ORDER)
    empty = torch.zeros(1, objective.K, dtype=torch.bool)
    assert torch.isfinite(objective.value(empty)).all()
    assert objective.value(~empty) > objective.value(empty)
    assert objective.value(empty[:0]).shape == (0,)


@contract
def test_objective_permuted_candidates_give_equal_values(build, generator) -> None:
    order = torch.tensor([4, 2, 5, 0, 1, 3])
    masks = torch.rand(9, 6, generator=generator) < 0.5
    torch.testing.assert_close(
        build(IN_ORDER).value(masks), build(order).value(masks[:, order]), rtol=1e-9, atol=1e-9
    )


@contract
def test_objective_relaxed_values_agree_at_corners(build, generator) -> None:
    objective = build(IN_ORDER)
    if not isinstance(objective, RelaxedObjective):
        return
    masks = torch.rand(9, objective.K, generator=generator) < 0.5
    torch.testing.assert_close(
        objective.relaxed_value(masks.double()), objective.value(masks), rtol=1e-9, atol=1e-9
    )


@contract
def test_statistics_gains_equal_differences_of_values(build, generator) -> None:
    objective = build(IN_ORDER)
    if not isinstance(objective, MarginalGainObjective):
        return
    for mask in torch.rand(5, objective.K, generator=generator) < 0.5:
        with_k, without_k = mask.repeat(objective.K, 1), mask.repeat(objective.K, 1)
        with_k.fill_diagonal_(True)
        without_k.fill_diagonal_(False)
        expected = objective.value(with_k) - objective.value(without_k)
        torch.testing.assert_close(objective.marginal_gains(mask), expected, rtol=1e-7, atol=1e-7)


MODELS = {
    "sparse": model,
    "bernoulli": lambda order: variational(order, BernoulliLikelihood(), targets=2),
    "softmax": lambda order: variational(order, three_classes()),
}
models = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())


@models
def test_model_fixed_bound_statistics_and_optimisers_agree(build) -> None:
    """To 1e-5 nats per row, the tolerance of q(u) while hyper-parameters are optimised."""
    gp, data = build(IN_ORDER)
    assert isinstance(gp, InducingModel)
    expected = gp.fixed_bound(data)
    everything = torch.ones(1, gp.K, dtype=torch.bool)
    best = gp.with_best_q(data)
    answers = [
        gp.chunked_bound(data)().item(),
        gp.subset_statistics(data).value(everything).item(),
        best.bound(data).item(),
        best.subset_objective(data).value(everything).item(),
    ]
    assert answers == pytest.approx([expected] * 4, abs=1e-5 * data.N)
    assert gp.bound(data).item() <= expected + 1e-6
    assert expected <= gp.upper_bound(data)
    assert expected <= gp.dense_bound(data)().item()
    assert gp.chunked_cost(data) > 0


@models
def test_prune_keeps_candidates_of_mask(build) -> None:
    gp, data = build(IN_ORDER)
    mask = torch.tensor([True, False, True, True, False, False])
    pruned = gp.prune(mask)
    assert torch.equal(pruned.candidates.detach(), gp.candidates.detach()[mask])
    value = gp.subset_objective(data).value(mask[None])[0]
    torch.testing.assert_close(pruned.bound(data), value, rtol=1e-9, atol=1e-9)
    everywhere = gp.with_candidates(data.X[:4])
    assert torch.equal(everywhere.candidates.detach(), data.X[:4])
    assert gp.K == 6


def test_copied_module_equals_a_deep_copy_and_shares_nothing() -> None:
    gp, data = model(IN_ORDER)
    gp.kernel.register_forward_hook(lambda *_: None)
    copied, expected = copy_module(gp), deepcopy(gp)
    assert copied.bound(data) == expected.bound(data) == gp.bound(data)
    own = {
        id(value)
        for part in gp.modules()
        for value in vars(part).values()
        if isinstance(value, dict)
    }
    for part, other in zip(copied.modules(), expected.modules(), strict=True):
        assert type(part) is type(other)
        assert vars(part).keys() == vars(other).keys()
        for name, value in vars(part).items():
            if isinstance(value, dict):
                assert type(value) is type(vars(other)[name])
                assert value.keys() == vars(other)[name].keys()
                assert id(value) not in own
    tensors = ([*each.parameters(), *each.buffers()] for each in (copied, gp))
    for one, other in zip(*tensors, strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()


def test_copied_module_keeps_ties_and_frozen_parameters() -> None:
    first, second = ScaleKernel(RBFKernel(ard_num_dims=2)), ScaleKernel(MaternKernel(nu=1.5))
    second.raw_outputscale = first.raw_outputscale
    second.base_kernel.requires_grad_(False)
    kernel = first + second
    add_weak_priors(kernel)
    copied: Any = copy_module(kernel)
    one, other = copied.kernels
    assert one.raw_outputscale is other.raw_outputscale
    assert one.raw_outputscale is not first.raw_outputscale
    assert [p.requires_grad for p in copied.parameters()] == [
        p.requires_grad for p in kernel.parameters()
    ]
    # The closures of the priors act on the module that they are called with.
    one.base_kernel.initialize(lengthscale=0.01)
    assert log_prior(copied) < log_prior(kernel)
    assert one.base_kernel.lengthscale_prior is not first.base_kernel.lengthscale_prior


def test_model_with_shared_modules_has_its_own_candidates_only() -> None:
    gp, data = model(IN_ORDER)
    other = gp.with_candidates(data.X[:4], shared=True)
    assert torch.equal(other.candidates.detach(), data.X[:4])
    assert (gp.K, other.K) == (6, 4)
    assert other.kernel is gp.kernel
    assert other.likelihood is gp.likelihood
    own = gp.with_candidates(data.X[:4])
    assert own.kernel is not gp.kernel
    assert other.bound(data) == own.bound(data)


@models
def test_chunked_bound_follows_changed_parameters(build) -> None:
    gp, data = build(IN_ORDER)
    value = gp.chunked_bound(data)
    before = value().item()
    with torch.no_grad():
        gp.kernel.initialize(outputscale=2.5)
    assert value().item() == pytest.approx(gp.fixed_bound(data), abs=1e-5 * data.N)
    assert abs(value().item() - before) > 0.01


def deep_gp() -> tuple[SelectableModel, Dataset]:
    p, kernel = problem(), ScaleKernel(RBFKernel())
    first = DeepLayer(kernel, p.Z, outputs=2, slope=torch.eye(p.Z.shape[1], 2).double())
    last = DeepLayer(kernel, p.Z[:4, :2], outputs=1)
    data = Dataset.of(p.X, p.Y[:, :1])
    return DeepGP([first, last], likelihood=GaussianLikelihood()), data


def latent_gp() -> tuple[SelectableModel, MaskedMatrix]:
    p = problem()
    model = LatentVariableGP(ScaleKernel(RBFKernel()), p.X, candidates=p.Z, noise=0.2)
    return model, MaskedMatrix.of(p.Y)


def sampled_latent_gp() -> tuple[SelectableModel, MaskedMatrix]:
    p, likelihood = problem(), GaussianLikelihood()
    P = p.Y.shape[1]
    function = VariationalGP(ScaleKernel(RBFKernel()), p.Z, likelihood=likelihood, targets=P)
    return SampledLatentGP(function, p.X), MaskedMatrix.of(p.Y)


SELECTABLE = {
    "sparse": lambda: model(IN_ORDER),
    "bernoulli": lambda: variational(IN_ORDER, BernoulliLikelihood()),
    "heteroscedastic": lambda: heteroscedastic(IN_ORDER, IN_ORDER[:4]),
    "deep": deep_gp,
    "latent": latent_gp,
    "sampled latent": sampled_latent_gp,
}


@pytest.mark.parametrize("build", SELECTABLE.values(), ids=SELECTABLE.keys())
def test_selectable_model_prune_equals_subset_objective(build) -> None:
    """For the same random numbers, where the bound is estimated from samples."""
    whole, data = build()
    sizes = [len(Z) for Z in whole.candidate_sets]
    masks = [torch.arange(K) % 3 != 1 for K in sizes]
    pruned = whole.prune(masks)
    for Z, kept, mask in zip(whole.candidate_sets, pruned.candidate_sets, masks, strict=True):
        assert torch.equal(kept.detach(), Z.detach()[mask])
    objective = whole.subset_objective(data, generator=torch.Generator().manual_seed(1))
    assert sum(sizes) == objective.K
    value = objective.value(torch.cat(masks)[None])[0]
    bound = pruned.bound(data, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(bound, value, rtol=1e-8, atol=1e-8)
    assert [len(Z) for Z in whole.candidate_sets] == sizes
    assert sum(p.numel() for p in pruned.posterior(data).parameters()) > 0


@pytest.mark.parametrize("build", SELECTABLE.values(), ids=SELECTABLE.keys())
def test_selectable_model_prune_with_missing_mask_raises(build) -> None:
    whole, _ = build()
    masks = [torch.ones(len(Z), dtype=torch.bool) for Z in whole.candidate_sets]
    with pytest.raises(InputError, match=f"each of the {len(masks)} candidate sets; got"):
        whole.prune(masks[:-1])


@pytest.mark.parametrize("build", SELECTABLE.values(), ids=SELECTABLE.keys())
def test_selectable_model_prune_with_mask_of_other_length_raises(build) -> None:
    whole, _ = build()
    masks = [torch.ones(len(Z), dtype=torch.bool) for Z in whole.candidate_sets]
    K = len(masks[-1])
    with pytest.raises(InputError, match=rf"`masks` must be Boolean of shape \[{K}\]; got"):
        whole.prune([*masks[:-1], masks[-1][:-1]])
    with pytest.raises(InputError, match=rf"shape \[{K}\]; got torch.int64 of shape \[{K}\]"):
        whole.prune([*masks[:-1], torch.arange(K)])
