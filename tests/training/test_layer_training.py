"""Layerwise training of deep GPs, Adam with natural gradients, and minibatches."""

from copy import deepcopy

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator import to_dense
from torch import Tensor
from torch.distributions import MultivariateNormal

from helpers.deep_problems import deep, normal, rows, started, step_data
from winnowgp.data import Dataset
from winnowgp.models import DeepGP
from winnowgp.models.deep_sites import deep_sites
from winnowgp.training import Progress
from winnowgp.training.adam import Minibatches
from winnowgp.training.callbacks import as_callbacks
from winnowgp.training.initialization import trainable_lengthscales
from winnowgp.training.layer_training import (
    LayerTraining,
    start_from_shallow,
    train_layerwise,
)
from winnowgp.training.schedules import TrainingContext


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def trained(model: DeepGP, data: Dataset, *, steps: int = 20, told=(), size=None) -> None:
    generator = seeded()
    train_layerwise(
        model,
        Minibatches(data, size, generator),
        training=LayerTraining(0.03, natural_rate=0.5),
        steps=steps,
        context=TrainingContext(generator, as_callbacks(told)),
    )


def hidden_mean(model: DeepGP, inputs: Tensor, number: int = 0) -> Tensor:
    layer = model.layers[number]
    return layer.marginals(inputs, layer.points()).mean.detach()


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


def test_train_layerwise_hidden_layer_learns_targets() -> None:
    data = step_data()
    model = started(hidden_mean="zero")
    assert hidden_mean(model, data.X).abs().max() == 0
    trained(model, data, size=20)
    found = hidden_mean(model, data.X)[:, 0]
    assert correlation(found, data.Y[:, 0]) > 0.9
    # The targets are standardised.
    assert 0.6 < found.std() < 1.3


def test_train_layerwise_spare_outputs_learn_components() -> None:
    X = normal(40, 3, seed=1) @ torch.diag(torch.tensor([0.3, 2.0, 0.6], dtype=torch.float64))
    data = Dataset.of(X, torch.sin(X[:, 1]))
    model = started(data=data, widths=(2,), hidden_mean="zero", K=20)
    trained(model, data, steps=60)
    found = hidden_mean(model, X)
    assert correlation(found[:, 0], data.Y[:, 0]) > 0.9
    centred = X - X.mean(0)
    component = torch.linalg.eigh(centred.mT @ centred).eigenvectors[:, -1]
    assert abs(correlation(found[:, 1], X @ component)) > 0.9


def test_train_layerwise_learns_one_column_per_class() -> None:
    data = step_data("softmax")
    model = started("softmax", widths=(3,), hidden_mean="zero")
    trained(model, data)
    found = hidden_mean(model, data.X)
    for c in range(3):
        assert correlation(found[:, c], (data.Y[:, 0] == c).double()) > 0.85


def test_train_layerwise_skips_layers_with_linear_mean() -> None:
    data, model = step_data(), started(widths=(1, 1))
    before = [{k: v.clone() for k, v in each.state_dict().items()} for each in model.layers]
    trained(model, data, steps=5)
    changed = [
        {name for name, value in each.state_dict().items() if not torch.equal(value, old[name])}
        for each, old in zip(model.layers, before, strict=True)
    ]
    assert changed[0] == set()
    assert changed[1] == {"candidates"}
    assert {"q_mean", "q_factor", "candidates", "level"} <= changed[2]


@pytest.mark.parametrize("skip_connections", [False, True])
def test_train_layerwise_initialises_points_at_layer_inputs(skip_connections: bool) -> None:
    data, model = step_data(), started(hidden_mean="zero", skip_connections=skip_connections)
    seen: list[Tensor] = []

    def watch(progress: Progress) -> None:
        if progress.phase == "layer 2" and progress.step == 1:
            seen.append(progress.candidates[0])

    trained(model, data, steps=5, told=watch)
    inputs = hidden_mean(model, data.X)
    if skip_connections:
        inputs = torch.cat([inputs, data.X], dim=1)
    (points,) = seen
    distance = (points[:, None] - inputs[None]).abs().amax(-1)
    assert (distance.min(1).values < 1e-12).all()
    # Eight different rows.
    assert len(distance.argmin(1).unique()) == 8


def test_train_layerwise_more_points_than_rows() -> None:
    data = step_data(N=40)
    few = Dataset.of(data.X[::8], data.Y[::8])
    model = started(hidden_mean="zero")
    before = model.layers[1].candidates.detach().clone()
    trained(model, few, steps=1)
    assert model.layers[1].K == 8
    assert (model.layers[1].candidates[5:] - before[5:]).abs().max() < 0.1


def test_train_layerwise_trains_last_layer_and_likelihood() -> None:
    data, model = step_data(), started()
    before = model.bound(data, generator=seeded()).item()
    assert isinstance(model.likelihood, GaussianLikelihood)
    noise = model.likelihood.noise.item()
    trained(model, data)
    assert model.likelihood.noise.item() < noise
    assert model.bound(data, generator=seeded()).item() > before + 5


def test_train_layerwise_frozen_points_stay() -> None:
    data, model = step_data(), started(hidden_mean="zero")
    for layer in model.layers:
        layer.candidates.requires_grad_(False)
    before = [layer.candidates.clone() for layer in model.layers]
    trained(model, data, steps=3)
    for layer, points in zip(model.layers, before, strict=True):
        assert torch.equal(layer.candidates, points)


def test_train_layerwise_zero_steps_change_nothing() -> None:
    data, model = step_data(), started()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained(model, data, steps=0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_train_layerwise_leaves_a_trained_model_unchanged() -> None:
    model, data = started(hidden_mean="zero"), step_data()
    with torch.no_grad():
        model.layers[-1].q_mean[0] = 0.1
    before = deepcopy(model.state_dict())
    trained(model, data, steps=3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_train_layerwise_reports_layers_in_order() -> None:
    told: list[Progress] = []
    trained(started(hidden_mean="zero"), step_data(), steps=2, told=told.append)
    assert [(p.phase, p.step, p.steps) for p in told] == [
        ("layer 1", 1, 2),
        ("layer 1", 2, 2),
        ("layer 2", 1, 2),
        ("layer 2", 2, 2),
    ]


def test_start_from_shallow_has_the_hyperparameters_of_the_exact_gp() -> None:
    """The evidence of a dense GP is stationary at the kernel and noise of the last layer."""
    X = normal(60, 2, seed=1)
    data = Dataset.of(X, torch.sin(2 * X[:, 0]) + 0.1 * normal(60, seed=2))
    model = started(data=data, widths=(2, 2), K=10)
    start_from_shallow(model, data, seed=0)
    last, likelihood = model.layers[-1], model.likelihood
    assert isinstance(likelihood, GaussianLikelihood)

    def evidence() -> Tensor:
        covariance = to_dense(last.kernel(X)) + likelihood.noise * torch.eye(60)
        return MultivariateNormal(torch.zeros(60).double(), covariance).log_prob(data.Y[:, 0])

    parameters = [*last.kernel.parameters(), *likelihood.parameters()]
    gradient = torch.autograd.grad(evidence(), parameters)
    # Nats for a change of a raw parameter by one, of 60 rows; far more before.
    assert max(each.abs().max() for each in gradient) < 3
    assert 0.05 < likelihood.noise.sqrt().item() < 0.2
    lengthscales = [trainable_lengthscales(each.kernel)[0].lengthscale for each in model.layers]
    assert lengthscales[-1][0, 0] < 0.5 * lengthscales[-1][0, 1]
    for each in lengthscales[:-1]:
        torch.testing.assert_close(each, lengthscales[-1])


@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("untrained", [False, True])
def test_layer_training_natural_steps_match_sites(size: int | None, untrained: bool) -> None:
    """At a learning rate of zero only the last layer's q changes; at first by rate 1, then ½."""
    model, data = deep(), rows(N=10)
    with torch.no_grad():
        model.layers[-1].q_mean.mul_(0.0 if untrained else 1.0)
    twin = deepcopy(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    training = LayerTraining(0.0, samples=2, natural_rate=0.4)
    parts = Minibatches(data, size, seeded(1))
    training.run(model, parts, "x", steps=3, context=TrainingContext(seeded(2)))
    g, parts = seeded(2), Minibatches(data, size, seeded(1))
    for rate in (1.0, 0.5, 0.4) if untrained else (0.4, 0.4, 0.4):
        part = parts.next()
        sites = deep_sites(twin, part, total=parts.total, eps=twin.base_samples(part.N, 2, g))
        better = sites[-1].improved(twin.layers[-1], rate=rate)
        twin = twin.with_layers([*twin.layers[:-1], better])
    ours, theirs = model.layers[-1].points(), twin.layers[-1].points()
    torch.testing.assert_close(ours.q_mean, theirs.q_mean, rtol=1e-6, atol=1e-8)
    spread = [p.q_factor.detach() @ p.q_factor.detach().mT for p in (ours, theirs)]
    torch.testing.assert_close(*spread, rtol=1e-6, atol=1e-8)
    for name, parameter in model.named_parameters():
        moved = name.startswith("_layers.1.q_")
        assert torch.equal(parameter, before[name]) is not moved, name


@pytest.mark.parametrize("seen", ["gaussian", "softmax"])
@pytest.mark.parametrize("size", [None, 5])
def test_layer_training_hidden_covariances_follow_sites(seen: str, size: int | None) -> None:
    """At a learning rate of zero the covariances of hidden layers move towards their sites'."""
    settings = {"widths": (2, 2), "K": (4, 3, 3), "skip_connections": True}
    model, twin, data = deep(seen, **settings), deep(seen, **settings), rows(seen, N=10)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    training = LayerTraining(0.0, samples=2, hidden_rate=0.2, cooling=0.1)
    parts = Minibatches(data, size, seeded(1))
    training.run(model, parts, "x", steps=3, context=TrainingContext(seeded(2)))
    g, parts = seeded(2), Minibatches(data, size, seeded(1))
    # The rate falls over the last third of the steps, to a tenth after the last one.
    for rate in (0.2, 0.2, 0.2):
        part = parts.next()
        sites = deep_sites(twin, part, total=parts.total, eps=twin.base_samples(part.N, 2, g))
        hidden = [
            layer.with_q(layer.candidates, layer.q_mean, each.improved(layer, rate=rate).q_factor)
            for layer, each in zip(twin.layers[:-1], sites, strict=False)
        ]
        twin = twin.with_layers([*hidden, twin.layers[-1]])
    for ours, theirs in zip(model.layers, twin.layers, strict=True):
        a, b = (layer.q_factor.detach().tril() for layer in (ours, theirs))
        torch.testing.assert_close(a @ a.mT, b @ b.mT, rtol=1e-6, atol=1e-8)
    for name, parameter in model.named_parameters():
        moved = name in ("_layers.0.q_factor", "_layers.1.q_factor")
        assert torch.equal(parameter, before[name]) is not moved, name


def test_layer_training_natural_rates_fall_with_the_learning_rate() -> None:
    """With a rate that falls to zero, the last of four steps changes almost nothing."""
    model, data = deep(), rows(N=10)
    changes, last = [], model.layers[-1]
    before = last.q_mean.detach().clone()

    def watch(progress: Progress) -> None:
        changes.append((last.q_mean.detach() - before).abs().max().item())
        before.copy_(last.q_mean.detach())

    training = LayerTraining(0.0, samples=2, natural_rate=0.9, hidden_rate=0.9, cooling=1e-12)
    factor = model.layers[0].q_factor.detach().clone()
    context = TrainingContext(seeded(2), (watch,))
    training.run(model, Minibatches(data, None, seeded(1)), "x", steps=30, context=context)
    assert changes[0] > 0.1
    assert not torch.equal(model.layers[0].q_factor, factor)
    assert changes[-1] < 0.1 * changes[0]


def test_layer_training_adam_excludes_natural_parameters() -> None:
    model, data = deep(), rows(N=10)
    sites = deep_sites(model, data, eps=model.base_samples(10, 1, seeded(2)))
    better = sites[-1].improved(model.layers[-1], rate=0.4)
    level = model.layers[0].level.detach().clone()
    LayerTraining(0.05, natural_rate=0.4).run(
        model,
        Minibatches(data, None, seeded()),
        "x",
        steps=1,
        context=TrainingContext(seeded(2)),
    )
    torch.testing.assert_close(model.layers[-1].q_mean, better.q_mean, rtol=1e-8, atol=1e-8)
    assert not torch.equal(model.layers[0].level, level)


def test_layer_training_without_natural_steps_uses_adam() -> None:
    model, data = deep(), rows(N=10)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    training, told = LayerTraining(0.02), []
    parts = Minibatches(data, None, seeded())
    training.run(model, parts, "x", steps=40, context=TrainingContext(seeded(), (told.append,)))
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    values = [p.objective for p in told]
    assert sum(values[-10:]) > sum(values[:10])


def test_layer_training_frozen_parameters_stay() -> None:
    model, data = deep(), rows(N=10)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.requires_grad_(False).layers[0].q_mean.requires_grad_()
    LayerTraining(0.02).run(
        model,
        Minibatches(data, 4, seeded()),
        "x",
        steps=2,
        context=TrainingContext(seeded()),
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) is (name != "_layers.0.q_mean"), name


@pytest.mark.parametrize("frozen", ["all the rest", "the factor"])
def test_layer_training_adam_learns_q_where_it_is_alone(frozen: str) -> None:
    """Natural steps are not taken without Adam's, and frozen parameters stay."""
    model, data = deep(), rows(N=10)
    last = model.layers[-1]
    if frozen == "all the rest":
        model.requires_grad_(False)
        last.q_mean.requires_grad_()
    last.q_factor.requires_grad_(frozen == "all the rest")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parts, context = Minibatches(data, None, seeded()), TrainingContext(seeded())
    # One step only: with so few rows, noise can look like divergence.
    LayerTraining(0.02, natural_rate=0.4).run(model, parts, "x", steps=1, context=context)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) is not parameter.requires_grad, name


def test_minibatches_sizes_and_totals() -> None:
    data = rows(N=10)
    whole = Minibatches(data, None, seeded())
    assert whole.total is None
    assert whole.next().N == 10
    assert Minibatches(data, 10, seeded()).total is None
    some = Minibatches(data, 4, seeded())
    assert (some.total, some.scale) == (10, 20.0)
    assert [some.next().N for _ in range(3)] == [4, 4, 4]
    others = some.with_data(rows(N=7))
    assert (others.data.N, others.total, others.next().N) == (7, 7, 4)
