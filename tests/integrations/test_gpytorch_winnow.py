"""Models of GPyTorch's users go through the door and come out smaller."""

from copy import deepcopy
from math import log, pi
from typing import Any, cast

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    MultitaskGaussianLikelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
)
from gpytorch.means import ConstantMean
from gpytorch.models import ApproximateGP, ExactGP
from gpytorch.models.deep_gps import DeepGP
from gpytorch.models.deep_gps.dspp import DSPP
from gpytorch.variational import (
    BatchDecoupledVariationalStrategy,
    CholeskyVariationalDistribution,
    CiqVariationalStrategy,
    DeltaVariationalDistribution,
    GridInterpolationVariationalStrategy,
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    NNVariationalStrategy,
    OrthogonallyDecoupledVariationalStrategy,
    TrilNaturalVariationalDistribution,
    UnwhitenedVariationalStrategy,
    VariationalStrategy,
)
from torch import Tensor

from gpytorch_models import (
    Deep,
    Latent,
    Model,
    curve,
    elbo,
    gaussian,
    state,
    tasks,
    with_random_q,
)
from winnowgp.data import Dataset, Standardiser, load_table
from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.integrations.gpytorch import winnow
from winnowgp.integrations.gpytorch.evidence import Evidence, _hidden, _sites
from winnowgp.integrations.gpytorch.pruned import pruned
from winnowgp.integrations.gpytorch.refit import Refit, refitted
from winnowgp.models import SparseGP, VariationalGP

K = 12


def points(count: int = K) -> Tensor:
    return torch.linspace(0, 6, count, dtype=torch.float64)[:, None]


def settled(model: Any, likelihood: Likelihood, x: Any, y: Any, *, steps: int = 50) -> Refit:
    evidence = Evidence.of(model, likelihood, x, y, seed=0)
    return refitted(evidence, evidence.bound(), steps=steps)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def untouched(model: Any) -> dict[str, Tensor]:
    """All but points and q(u)."""
    return {n: v for n, v in state(model).items() if "variational_strategy" not in n}


# Exact where it can be


def twin(model: Model, x: Tensor, y: Tensor, noise: float, mask: Tensor) -> Tensor:
    """log N(y | μ, Q + σ²) − tr(K − Q)/2σ² of one subset, through N by N matrices."""
    Z = model.variational_strategy.inducing_points.detach()[mask]
    with torch.no_grad():
        Kff, Kuf = model.covar_module(x).to_dense(), model.covar_module(Z, x).to_dense()
        Kuu = model.covar_module(Z).to_dense() + 1e-6 * torch.eye(len(Z)).double()
        off = y - model.mean_module(x)
    Q = Kuf.mT @ torch.linalg.solve(Kuu, Kuf)
    S = Q + noise * torch.eye(len(x)).double()
    fit = off @ torch.linalg.solve(S, off) + torch.linalg.slogdet(S).logabsdet
    return -0.5 * (fit + len(x) * log(2 * pi) + (Kff - Q).trace() / noise)


@pytest.mark.parametrize("strategy", [VariationalStrategy, UnwhitenedVariationalStrategy])
def test_with_gaussian_noise_every_subset_is_scored_by_its_collapsed_bound(strategy: Any) -> None:
    x, y = curve(40)
    model = with_random_q(Model(points(5), strategy=strategy))
    found = settled(model, gaussian(), x, y, steps=1)
    (statistics,) = found.totals[0].statistics(found.bound)
    masks = all_masks(5)[1:]
    dense = torch.stack([twin(model, x, y, 0.02, mask) for mask in masks])
    # GPyTorch's jitter on the rows, 1e-6/2σ² a row, is in ours.
    torch.testing.assert_close(statistics.value(masks), dense, rtol=1e-5, atol=2e-3)
    assert found.bound == pytest.approx(dense[-1].item(), abs=2e-3)


def test_one_step_reaches_the_best_q_of_regression() -> None:
    x, y = curve(40)
    model = with_random_q(Model(points(5)))
    first = settled(model, gaussian(), x, y, steps=1)
    best = first.totals[0].best_q()
    now = first.totals[0].frame.read()
    torch.testing.assert_close(now.mean, best.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(now.lower(), best.lower(), rtol=0, atol=1e-6)
    assert first.totals[0].excess(now, best.mean, point=False) == pytest.approx(0, abs=1e-6)


def test_what_a_step_promises_is_what_it_gains() -> None:
    """With Gaussian noise, for the sites stay as they are."""
    x, y = curve(40)
    model = with_random_q(Model(points(5)))
    before = settled(model, gaussian(), x, y, steps=0)
    after = settled(model, gaussian(), x, y, steps=1)
    (totals,) = before.totals
    promised = totals.excess(totals.frame.read(), totals.best_q().mean, point=False)
    assert promised == pytest.approx(after.bound - before.bound, rel=1e-6)


def test_for_other_likelihoods_the_best_q_is_found() -> None:
    x, y = curve(50)
    y = (y > 0).double()
    model = with_random_q(Model(points()))
    bound = settled(model, BernoulliLikelihood(), x, y).bound
    ours = VariationalGP(
        model.covar_module, points(), likelihood=BernoulliLikelihood(), mean=model.mean_module
    )
    # GPyTorch's log Φ is off by up to 2e-3 nats a row near z = −1.
    assert bound == pytest.approx(ours.fixed_bound(Dataset.of(x, y)), abs=0.1)


def test_a_mean_field_q_ends_at_the_best_diagonal() -> None:
    """S_kk = 1/(I + C)_kk maximises log|S| − tr(S (I + C)) among diagonal S."""
    x, y = curve(40)
    model = with_random_q(Model(points(5), distribution=MeanFieldVariationalDistribution))
    found = settled(model, gaussian(), x, y)
    for change in (0.99, 1.01):
        moved = deepcopy(found.evidence.model)
        deviation = moved.get_submodule(found.evidence.strategies[0].name).get_parameter(
            "_variational_distribution._variational_stddev"
        )
        deviation.data[2] *= change
        assert found.evidence.with_model(moved).bound() < found.bound


def test_decoupled_means_and_covariances_are_scored_with_their_own_points() -> None:
    """The bound of any pair of subsets is what refitting the pruned model reaches."""
    x, y = curve(40)
    model = with_random_q(Model(points(5), strategy=BatchDecoupledVariationalStrategy, prior=(1,)))
    found = settled(model, gaussian(), x, y)
    means, covariances = found.totals[0].statistics(found.bound)
    masks = all_masks(5)
    # Subsets of as many points: {0, 1, 2} and {2, 3, 4}, and so on.
    for one, other in ((7, 28), (13, 19), (3, 24)):
        keep = torch.stack([masks[one], masks[other]])
        smaller = found.evidence.with_model(pruned(found.evidence.model, [keep]))
        reached = refitted(smaller, smaller.bound()).bound
        promised = means.value(keep[:1]).item() + covariances.value(keep[1:]).item()
        assert promised == pytest.approx(reached, abs=1e-4)


def test_hidden_precisions_are_squared_slopes_of_what_is_above() -> None:
    """Against a constant added to one hidden function: the change of the top mean of each row."""
    x, y = curve(20)
    model = with_random_q(Deep(6, linear=False))
    seen = Evidence.of(model, gaussian(), x, y, seed=0)

    def evaluated(shift: float, function: int) -> Any:
        constant = seen.model.hidden.mean_module.constant
        constant.data[function] += shift
        with seen._same_draws():
            output, target = next(seen._evaluated(differentiable=True))
            calls = [
                seen.model.hidden.variational_strategy.calls[0],
                seen.model.last.variational_strategy.calls[0],
            ]
            nats = seen._expected(output, target)
        constant.data[function] -= shift
        return nats, calls

    nats, calls = evaluated(0.0, 0)
    assert _hidden(calls) == [0]
    (_, below), (_, above) = _sites(nats, calls)
    for function in (0, 1):
        up, down = (evaluated(s, function)[1][1].mean for s in (1e-5, -1e-5))
        slope = (up - down) / 2e-5
        torch.testing.assert_close(
            below[function], (slope.square() * above)[0].detach(), rtol=1e-4, atol=1e-6
        )
    torch.testing.assert_close(above, torch.full_like(above, 50.0))


# What a user gets


@pytest.mark.parametrize("strategy", [VariationalStrategy, UnwhitenedVariationalStrategy])
@pytest.mark.parametrize(
    "distribution",
    [
        CholeskyVariationalDistribution,
        MeanFieldVariationalDistribution,
        DeltaVariationalDistribution,
        NaturalVariationalDistribution,
        TrilNaturalVariationalDistribution,
    ],
)
def test_kernel_mean_and_likelihood_stay_bit_for_bit(strategy: Any, distribution: Any) -> None:
    x, y = curve(50)
    model = Model(points(24), strategy=strategy, distribution=distribution)
    likelihood = gaussian()
    before, noise, random = state(model), state(likelihood), torch.get_rng_state()
    result = winnow(model, likelihood, (x, y))
    assert all(torch.equal(before[n], v) for n, v in state(model).items())
    assert all(torch.equal(noise[n], v) for n, v in state(likelihood).items())
    assert torch.equal(random, torch.get_rng_state())
    after = untouched(result.model)
    assert after
    assert all(torch.equal(before[n], v) for n, v in after.items())
    assert type(result.model) is Model
    assert type(result.model.variational_strategy) is strategy
    assert type(result.model.variational_strategy._variational_distribution) is distribution
    assert 5 < result.n_inducing < 20
    kept = result.model.variational_strategy.inducing_points
    assert torch.equal(kept, points(24)[result.sets[0].selection.mask])


def test_the_bound_is_that_of_the_model_that_comes_out() -> None:
    x, y = curve(50)
    model, likelihood = Model(points(24)), gaussian()
    result = winnow(model, likelihood, (x, y))
    smaller = result.model.train()
    bound = 50 * elbo(likelihood, smaller, 50)(smaller(x), y).item()
    assert result.bound == pytest.approx(bound, abs=1e-6)
    ours = SparseGP(model.covar_module, smaller.variational_strategy.inducing_points, noise=0.02)
    centred = Dataset.of(x, y - 0.2)
    assert result.bound == pytest.approx(ours.fixed_bound(centred), abs=5e-3)
    assert result.given_up <= 0.01 * 50
    assert result.original < result.reference


def test_words_say_how_many() -> None:
    x, y = curve(50)
    model, likelihood = Model(points(24)), gaussian()
    weak, strong = (winnow(model, likelihood, (x, y), alpha=a) for a in (0.01, 1.0))
    assert strong.n_inducing < weak.n_inducing < 24
    assert strong.sets[0].selection.alpha == 1.0
    assert winnow(model, likelihood, (x, y), max_points=7).n_inducing == 7
    loose = winnow(model, likelihood, (x, y), tolerance=0.5)
    assert loose.n_inducing < weak.n_inducing
    assert loose.given_up <= 0.5 * 50
    selection = loose.sets[0].selection
    assert selection.frontier is not None
    assert selection.frontier.best_for_alpha(0.01).mask.sum() == weak.n_inducing
    assert loose.inclusion.shape == (24,)
    assert ((loose.inclusion >= 0) & (loose.inclusion <= 1)).all()
    assert loose.inclusion[selection.mask].mean() > loose.inclusion[~selection.mask].mean()
    assert f"24 points, {loose.n_inducing} kept" in str(loose)


def test_a_generator_makes_it_repeatable() -> None:
    model, (x, y) = with_random_q(Deep(5)), curve(12)
    runs = [
        winnow(model, gaussian(1.0), (x, y), max_points=3, generator=seeded(s)) for s in (0, 0, 1)
    ]
    assert runs[0].bound == runs[1].bound != runs[2].bound
    assert torch.equal(runs[0].inclusion, runs[1].inclusion)


def test_the_users_own_loop_trains_what_comes_out() -> None:
    x, y = curve(50)
    likelihood = gaussian()
    result = winnow(Model(points(24)), likelihood, (x, y), max_points=6)
    model = result.model.train()
    bound = elbo(likelihood, model, 50)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = -bound(model(x), y)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    fresh = Model(points(6))
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh.eval()(x).mean, model.eval()(x).mean)


def test_locations_that_are_not_learnt_stay_so() -> None:
    x, y = curve(50)
    result = winnow(Model(points(24), learnt=False), gaussian(), (x, y))
    strategy = result.model.variational_strategy
    assert not isinstance(strategy.inducing_points, torch.nn.Parameter)
    assert "variational_strategy.inducing_points" in result.model.state_dict()


def test_single_precision_stays_single() -> None:
    x, y = curve(200, dtype=torch.float32)
    model, likelihood = Model(points(40).float()), gaussian(dtype=torch.float32)
    result = winnow(model, likelihood, (x, y))
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    assert result.n_inducing < 20
    smaller = result.model.train()
    bound = 200 * elbo(likelihood, smaller, 200)(smaller(x), y).item()
    assert bound == pytest.approx(result.bound, abs=0.5)


# Many functions


def independent(strategy: Any) -> Any:
    return IndependentMultitaskVariationalStrategy(strategy, num_tasks=3)


def mixed(strategy: Any) -> Any:
    torch.manual_seed(2)
    return LMCVariationalStrategy(strategy, num_tasks=3, num_latents=3)


def task_noise() -> MultitaskGaussianLikelihood:
    likelihood = MultitaskGaussianLikelihood(num_tasks=3).double()
    likelihood.noise, likelihood.task_noises = 0.01, torch.full((3,), 0.01).double()
    return likelihood


@pytest.mark.parametrize("prior", [[], [3]])
@pytest.mark.parametrize("own", [False, True])
def test_tasks_share_their_points_or_have_as_many_each(prior: list[int], own: bool) -> None:
    x, Y = tasks(60)
    Z = points(20)
    Z = torch.stack([Z, Z + 0.1, Z - 0.1]) if own else Z
    model = Model(Z, batch=[3], prior=prior, around=independent)
    result = winnow(model, task_noise(), (x, Y))
    kept = result.model.variational_strategy.base_variational_strategy.inducing_points
    M = result.sets[0].n_inducing
    assert kept.shape == ((3, M, 1) if own else (M, 1))
    assert len(result.sets) == (3 if own else 1)
    assert 5 < M < 16
    assert result.given_up <= 0.01 * 60
    smaller = result.model.train()
    bound = elbo(task_noise(), smaller, 60)
    # Where tasks are independent, sites are exact and one step is the optimum.
    assert result.bound == pytest.approx(60 * bound(smaller(x), Y).sum().item(), abs=1e-5)


def test_tasks_with_their_own_points_keep_their_own_sets() -> None:
    x, Y = tasks(60)
    model = Model(points(20).repeat(3, 1, 1), batch=[3], prior=[3], around=independent)
    result = winnow(model, task_noise(), (x, Y), max_points=8)
    masks = [each.selection.mask for each in result.sets]
    assert len({tuple(mask.tolist()) for mask in masks}) > 1
    kept = result.model.variational_strategy.base_variational_strategy.inducing_points
    for Z, each in zip(kept, result.sets, strict=True):
        assert torch.equal(Z, each.candidates[each.selection.mask])
    assert [each.name[-3:] for each in result.sets] == ["[0]", "[1]", "[2]"]


def test_mixed_tasks_lose_little() -> None:
    x, Y = tasks(60)
    model = Model(points(20).repeat(3, 1, 1), batch=[3], prior=[3], around=mixed)
    result = winnow(model, task_noise(), (x, Y))
    assert result.original < result.reference
    assert result.sets[0].n_inducing < 18
    assert result.given_up <= 0.01 * 60
    same = result.model.variational_strategy.lmc_coefficients
    assert torch.equal(same, model.variational_strategy.lmc_coefficients)


@pytest.mark.parametrize("name", ["classes", "softmax", "counts", "own"])
def test_other_likelihoods_lose_little(name: str) -> None:
    x, y = curve(80)

    class Own(Likelihood):
        """One that GPyTorch integrates by sampling."""

        def forward(self, f: Tensor, *args: Any, **words: Any) -> torch.distributions.Normal:
            return torch.distributions.Normal(f.tanh(), 0.3)

    cases: dict[str, Any] = {
        "classes": (BernoulliLikelihood(), (y > 0).double()),
        "softmax": (
            SoftmaxLikelihood(num_features=3, num_classes=4),
            (y > -0.4).long() + (y > 0.4).long(),
        ),
        "counts": (PoissonLikelihood(), y.exp().round()),
        "own": (Own(), y),
    }
    likelihood, targets = cases[name]
    words: Any = {"batch": [3], "around": independent} if name == "softmax" else {}
    model = Model(points(20), **words)
    result = winnow(model, likelihood, (x, targets))
    assert result.original < result.reference
    assert result.n_inducing <= 16
    assert result.given_up <= 0.01 * 80


@pytest.mark.parametrize("tolerance", [0.05, 0.5])
def test_a_tolerance_is_kept_where_scores_are_of_first_order(tolerance: float) -> None:
    """Sites promise that five points, and one, will do; the pruned models lose more than that."""
    x, y = curve(80)
    labels = (y > 0).double()
    result = winnow(Model(points(20)), BernoulliLikelihood(), (x, labels), tolerance=tolerance)
    assert result.n_inducing < 20
    assert result.given_up <= tolerance * 80


def trained(model: Any, bound: Any, x: Any, y: Any, steps: int) -> None:
    torch.manual_seed(0)
    optimiser = torch.optim.Adam(bound.parameters(), lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        inputs = model.sample_latent_variable() if x is None else x
        (-bound(model(inputs), y).sum()).backward()
        optimiser.step()


def test_layers_of_a_deep_model_lose_points() -> None:
    x, y = curve(60)
    model, likelihood = Deep(9), gaussian(0.05)
    bound = elbo(likelihood, model, 60)
    trained(model, bound, x - 3, y, 150)
    before = untouched(model)
    result = winnow(model, likelihood, (x - 3, y))
    names = [each.name for each in result.sets]
    assert names == [
        "hidden.variational_strategy[0]",
        "hidden.variational_strategy[1]",
        "last.variational_strategy",
    ]
    sizes = [each.n_inducing for each in result.sets]
    assert sizes[0] == sizes[1] < 9
    assert sizes[2] < 9
    assert result.model.hidden.variational_strategy.inducing_points.shape == (2, sizes[0], 1)
    assert all(torch.equal(before[n], v) for n, v in untouched(result.model).items())
    assert result.given_up <= 0.01 * 60
    assert isinstance(result.model, DeepGP)
    with torch.no_grad(), gpytorch.settings.num_likelihood_samples(50):
        torch.manual_seed(0)
        f, g = (any_model(x - 3).mean.mean(0) for any_model in cast(Any, [model, result.model]))
    assert (f - g).abs().max() < 0.3


def test_columns_of_a_latent_model_lose_points() -> None:
    x, Y = tasks(60)
    model = Latent(x / 3 - 1, 3, 15)
    likelihood = GaussianLikelihood(batch_shape=torch.Size([3])).double()
    bound = elbo(likelihood, model, 60)
    trained(model, bound, None, Y.mT, 100)
    before = state(model)
    result = winnow(model, likelihood, Y)
    assert torch.equal(result.model.X.q_mu, model.X.q_mu)
    assert all(torch.equal(before[n], v) for n, v in state(model).items())
    M = result.sets[0].n_inducing
    assert result.model.variational_strategy.inducing_points.shape == (3, M, 1)
    assert M < 12
    assert result.given_up <= 0.01 * 60


# GPyTorch's own examples, small


def example(batch: int) -> tuple[Any, Any, Any, Any]:
    """SVGP regression with minibatches: model, likelihood, and data for training and testing."""
    torch.manual_seed(0)
    x = torch.rand(700, 2)
    y = torch.sin(6 * x[:, 0]) * torch.cos(4 * x[:, 1]) + 0.1 * torch.randn(700)
    model, likelihood = Model(x[:80].clone()), GaussianLikelihood()
    bound = elbo(likelihood, model, 500)
    optimiser = torch.optim.Adam(bound.parameters(), lr=0.02)
    for _ in range(15):
        for rows in torch.randperm(500).split(batch):
            optimiser.zero_grad()
            (-bound(model(x[rows]), y[rows])).backward()
            optimiser.step()
    return model, likelihood, (x[:500], y[:500]), (x[500:], y[500:])


def log_density(model: Any, likelihood: Any, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return likelihood.eval().log_marginal(y, model.eval()(x)).mean().item()


def test_gpytorchs_regression_example_keeps_its_density_with_half_the_points() -> None:
    model, likelihood, train, test = example(100)
    result = winnow(model, likelihood, train)
    assert result.n_inducing <= 40
    before, after = (log_density(m, likelihood, *test) for m in (model, result.model))
    assert after > before - 0.02


def test_gpytorchs_classification_example_keeps_its_density_with_half_the_points() -> None:
    x, test = torch.linspace(0, 1, 10), torch.linspace(0, 1, 101)
    y, labels = ((torch.cos(4 * torch.pi * v) > 0).float() for v in (x, test))
    torch.manual_seed(0)
    model = Model(x[:, None], strategy=UnwhitenedVariationalStrategy)
    likelihood = BernoulliLikelihood()
    trained(model, elbo(likelihood, model, 10), x[:, None], y, 50)
    result = winnow(model, likelihood, (x, y))
    assert result.n_inducing <= 5
    data = (test[:, None], labels)
    before, after = (log_density(m, likelihood, *data) for m in (model, result.model))
    assert after > before - 0.02


@pytest.mark.slow
def test_gpytorchs_regression_example_on_kin8nm(paper_data: None) -> None:
    """As the documentation has it: 500 points, minibatches of 1,024, four epochs."""
    table = load_table("kin8nm").dataset()
    torch.manual_seed(0)
    order = torch.randperm(table.N)
    x = Standardiser.of(table.X).forward(table.X)[order].float()
    y = Standardiser.of(table.Y).forward(table.Y)[order, 0].float()
    model, likelihood = Model(x[:500].clone()), GaussianLikelihood()
    bound = elbo(likelihood, model, 7000)
    optimiser = torch.optim.Adam(bound.parameters(), lr=0.01)
    for _ in range(4):
        for rows in torch.randperm(7000).split(1024):
            optimiser.zero_grad()
            (-bound(model(x[rows]), y[rows])).backward()
            optimiser.step()
    result = winnow(model, likelihood, (x[:7000], y[:7000]), max_points=250)
    assert result.n_inducing == 250
    data = (x[7000:], y[7000:])
    before, after = (log_density(m, likelihood, *data) for m in (model, result.model))
    assert after > before - 0.02


# Refusals


class Wrapped(ApproximateGP):
    mean_module: Any
    covar_module: Any

    def __init__(self, made: Any) -> None:
        super().__init__(made(self))
        self.mean_module, self.covar_module = ConstantMean(), RBFKernel()

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class OwnStrategy(VariationalStrategy):
    def forward(self, *args: Any, **words: Any) -> Any:
        return super().forward(*args, **words)


class OwnDistribution(CholeskyVariationalDistribution):
    def forward(self) -> Any:
        return super().forward()


def q(count: int = 8) -> CholeskyVariationalDistribution:
    return CholeskyVariationalDistribution(count)


REFUSED: dict[str, Any] = {
    "CiqVariationalStrategy": lambda m: CiqVariationalStrategy(
        m, points(8), NaturalVariationalDistribution(8)
    ),
    "GridInterpolationVariationalStrategy": lambda m: GridInterpolationVariationalStrategy(
        m, 8, [(0.0, 6.0)], q()
    ),
    "NNVariationalStrategy": lambda m: NNVariationalStrategy(
        m, points(8), MeanFieldVariationalDistribution(8), k=2, training_batch_size=4
    ),
    "OrthogonallyDecoupledVariationalStrategy": lambda m: OrthogonallyDecoupledVariationalStrategy(
        VariationalStrategy(m, points(8), q()), points(8), DeltaVariationalDistribution(8)
    ),
    "OwnStrategy": lambda m: OwnStrategy(m, points(8), q()),
    "OwnDistribution": lambda m: VariationalStrategy(m, points(8), OwnDistribution(8)),
}


@pytest.mark.filterwarnings("ignore:Tried to import faiss")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=rf"`variational_strategy` must .*got {name}"):
        winnow(Wrapped(REFUSED[name]), gaussian(), curve(20))


def test_models_without_a_strategy_are_refused_by_name() -> None:
    class Exact(ExactGP):
        pass

    class Mixture(DSPP):
        pass

    class Empty(DeepGP):
        pass

    x, y = curve(20)
    for model, words in (
        (Exact(x, y, gaussian()), "Exact is an ExactGP.*winnowgp.SparseGP"),
        (Mixture(3), "Mixture is a DSPP"),
        (Empty(), "Empty holds no DeepGPLayer"),
        (torch.nn.Linear(1, 1), "`model` must be an ApproximateGP or a DeepGP.*got Linear"),
    ):
        with pytest.raises(InputError, match=words):
            winnow(model, gaussian(), (x, y))  # pyright: ignore[reportArgumentType]


def test_functions_without_a_q_of_their_own_are_refused() -> None:
    x, Y = tasks(20)
    with pytest.raises(InputError, match=r"batch_shape=torch.Size\(\[3\]\)"):
        winnow(Model(points(8), prior=[3]), gaussian(), (x, Y.mT))
    with pytest.raises(InputError, match=r"batch_shape=torch.Size\(\[3\]\)"):
        winnow(Model(points(8).repeat(3, 1, 1)), gaussian(), (x, Y.mT))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (torch.zeros(3), "two tensors"),
        ((torch.zeros(3, 1), torch.zeros(4)), "as many rows"),
        ((torch.zeros(0, 1), torch.zeros(0)), "has no rows"),
        ((torch.full((3, 1), torch.nan), torch.zeros(3)), "`train_x` has entries that are NaN"),
        ((torch.zeros(3, 1), torch.full((3,), torch.inf)), "`train_y` has entries"),
        (([1.0], [2.0]), "two tensors"),
    ],
)
def test_senseless_data_are_refused(data: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        winnow(Model(points(8)), gaussian(), data)


def test_a_latent_model_wants_its_table_alone() -> None:
    x, Y = tasks(20)
    model = Latent(x / 3 - 1, 3, 6)
    with pytest.raises(InputError, match=r"must be its table, a tensor \[N P\]"):
        winnow(model, gaussian(), (x, Y))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"alpha": "much"}, "`alpha` must be positive or 'auto'"),
        ({"alpha": -1.0}, "`alpha` must be positive or 'auto'"),
        ({"tolerance": 0.0}, "`tolerance` must be positive"),
        ({"max_points": 0}, "`max_points` must be at least 1"),
        ({"max_points": 3, "alpha": 0.1}, "in one way only"),
    ],
)
def test_senseless_requests_are_refused(request_: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        winnow(Model(points(8)), gaussian(), curve(20), **request_)
