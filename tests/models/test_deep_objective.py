"""What subsets of all layers at once are worth, and the gradient of its expectation."""

import math

import pytest
import torch
from torch import Tensor

from helpers.deep_problems import deep, dense_bound, rows
from winnowgp.data import Dataset
from winnowgp.gradients import Enumeration, ScoreFunction, all_masks
from winnowgp.models import DeepGP
from winnowgp.models.deep_gp import DeepObjective
from winnowgp.point_processes import Bernoulli


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def objective(
    model: DeepGP, data: Dataset, *, samples: int = 3, total: int | None = None
) -> DeepObjective:
    return model.subset_objective(data, samples=samples, total=total, generator=seeded())


# Of a layer of four and a layer of three candidates: nothing, one layer empty, all sizes, all.
MASKS = torch.tensor(
    [
        [0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 1],
        [1, 0, 1, 1, 0, 0, 0],
        [0, 1, 0, 0, 1, 1, 1],
        [1, 1, 0, 1, 0, 1, 0],
        [1, 1, 1, 1, 0, 0, 1],
        [1, 1, 1, 1, 1, 1, 1],
    ]
).bool()


@pytest.mark.parametrize("seen", ["gaussian", "bernoulli", "softmax"])
@pytest.mark.parametrize("skip_connections", [False, True])
def test_subsets_score_what_the_pruned_model_scores(seen: str, skip_connections: bool) -> None:
    model, data = deep(seen, skip_connections=skip_connections), rows(seen)
    noise = model.noise(data.N, 3, seeded())
    subsets = objective(model, data, total=30)
    assert subsets.K == 7
    together = subsets.value(MASKS).detach()
    for mask, value in zip(MASKS, together, strict=True):
        parts = list(mask.split(model.sizes))
        exact = dense_bound(model, data, noise, parts, scale=30 / data.N)
        torch.testing.assert_close(value, exact, rtol=1e-8, atol=1e-8)
        pruned = model.prune(parts)
        assert pruned.sizes == tuple(int(part.sum()) for part in parts)
        bound = pruned.evaluated(data, total=30, noise=noise).bound.detach()
        torch.testing.assert_close(bound, value, rtol=1e-8, atol=1e-8)
    whole = model.evaluated(data, total=30, noise=noise).bound.detach()
    torch.testing.assert_close(together[-1], whole, rtol=1e-9, atol=1e-9)


def test_three_layers_and_a_kernel_of_any_kind() -> None:
    model = deep(widths=(2, 3), K=(2, 3, 2), matern=True)
    data = rows()
    noise = model.noise(data.N, 3, seeded())
    found = objective(model, data).value(MASKS).detach()
    exact = [dense_bound(model, data, noise, list(mask.split(model.sizes))) for mask in MASKS]
    torch.testing.assert_close(found, torch.stack(exact), rtol=1e-8, atol=1e-8)


def test_one_value_a_mask_whatever_else_is_in_the_batch() -> None:
    subsets = objective(deep(), rows())
    alone = torch.cat([subsets.value(mask[None]) for mask in MASKS])
    torch.testing.assert_close(subsets.value(MASKS), alone, rtol=1e-9, atol=1e-9)
    assert subsets.value(MASKS[:0]).shape == (0,)


def test_permuting_the_candidates_of_a_layer_changes_nothing() -> None:
    model, data = deep(), rows()
    order = torch.tensor([2, 0, 3, 1])
    first = model.layers[0]
    with torch.no_grad():
        # The same q(u), whitened in the new order.
        Kuu = first.kernel(first.candidates).to_dense()
        L, again = torch.linalg.cholesky(Kuu), torch.linalg.cholesky(Kuu[order][:, order])
        m = again.inverse() @ (L @ first.q_mean)[order]
        F = again.inverse() @ (L @ first.q_factor.tril())[:, order]
        S = torch.linalg.cholesky(F @ F.mT)
    moved = model.with_layers([first.with_q(first.candidates[order], m, S), *model.layers[1:]])
    columns = torch.cat([order, torch.arange(4, 7)])
    torch.testing.assert_close(
        objective(moved, data).value(MASKS[:, columns]),
        objective(model, data).value(MASKS),
        rtol=1e-8,
        atol=1e-8,
    )


def test_all_masks_and_all_calls_meet_the_same_samples() -> None:
    model, data = deep(), rows()
    subsets = objective(model, data, samples=1)
    twice = subsets.value(MASKS[[4, 4]])
    assert twice[0].item() == pytest.approx(twice[1].item(), rel=1e-12)
    assert torch.equal(subsets.value(MASKS), subsets.value(MASKS))
    other = model.subset_objective(data, generator=seeded(1))
    assert (other.value(MASKS) - subsets.value(MASKS)).abs().min() > 1e-3


def test_scores_are_differentiable_in_every_parameter() -> None:
    model = deep(skip_connections=True)
    objective(model, rows()).value(MASKS[[3, 4]]).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def small() -> tuple[DeepObjective, Tensor, Tensor]:
    """Two layers of two candidates: the objective, logits, and the dense scores of all subsets."""
    model, data = deep(K=(2, 2)), rows(N=8)
    noise = model.noise(8, 2, seeded())
    table = [dense_bound(model, data, noise, list(mask.split(2))) for mask in all_masks(4)]
    logits = torch.tensor([0.6, -0.8, 0.2, 1.0], dtype=torch.float64, requires_grad=True)
    return objective(model, data, samples=2), logits, torch.stack(table)


def exact_gradient(logits: Tensor, table: Tensor) -> Tensor:
    """Of Σ_Z q(Z) L(Z), in the logits of both layers."""
    probability = Bernoulli(logits).log_prob(all_masks(4)).exp()
    return torch.autograd.grad((probability * table).sum(), logits)[0]


def test_the_expectation_and_its_gradient_are_sums_over_all_subsets() -> None:
    subsets, logits, table = small()
    found = Enumeration().step(Bernoulli(logits), subsets.value).surrogate
    (gradient,) = torch.autograd.grad(found, logits)
    torch.testing.assert_close(gradient, exact_gradient(logits, table), rtol=1e-8, atol=1e-8)


def z_scores(*, biased: bool = False) -> Tensor:
    """Of 1,000 score-function gradients of 4 samples each, for every logit."""
    subsets, logits, table = small()
    with torch.no_grad():
        values = subsets.value(all_masks(4))

    def value(mask: Tensor) -> Tensor:
        # Looked up for speed. The twin takes the layers' masks for each other's.
        seen = mask.roll(2, 1) if biased else mask
        return values[(seen * 2 ** torch.arange(4)).sum(1)]

    estimator, g = ScoreFunction(samples=4), seeded(2)
    state, found = estimator.init(), []
    for _ in range(1000):
        step = estimator.step(Bernoulli(logits), value, state=state, generator=g)
        state = step.state
        found.append(torch.autograd.grad(step.surrogate, logits)[0])
    samples = torch.stack(found)
    error = samples.mean(0) - exact_gradient(logits, table)
    return error / (samples.std(0) / math.sqrt(len(samples)))


def test_the_score_function_is_unbiased_in_the_logits_of_both_layers() -> None:
    assert (z_scores().abs() < 4).all()


def test_the_same_check_is_red_on_a_biased_twin() -> None:
    assert (z_scores(biased=True).abs() > 4).any()
