"""Mixtures of posteriors against explicit averages over their members."""

from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import PoissonLikelihood
from torch import Tensor
from torch.distributions import Normal

from winnowgp import load
from winnowgp.data import Dataset
from winnowgp.errors import InputError, ModelFileError
from winnowgp.io import save
from winnowgp.models import (
    MixturePosterior,
    Posterior,
    SparseGP,
    VariationalGP,
    subset_mixture,
)

G = torch.Generator().manual_seed(0)
X = torch.randn(12, 2, generator=G).double()
Y = torch.stack([X[:, 0].sin(), X.prod(1)], 1) + 0.1 * torch.randn(12, 2, generator=G).double()
NEW = torch.randn(4, 2, generator=G).double()
NEW_Y = torch.randn(4, 2, generator=G).double()
KNOWN = torch.rand(4, 2, generator=G).double()


def member(lengthscale: float, noise: Tensor, *, points: int = 5) -> Posterior:
    kernel: Any = ScaleKernel(RBFKernel())
    kernel.base_kernel.lengthscale = lengthscale
    model = SparseGP(kernel, X[:points], noise=noise)
    return model.posterior(Dataset.of(X, Y))


MEMBERS = [
    member(length, torch.tensor(noise).double())
    for length, noise in ((0.3, (0.5, 0.1)), (1.0, (0.1, 0.3)), (3.0, (0.02, 0.05)))
]
WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
MIXTURE = MixturePosterior(MEMBERS, mode=MEMBERS[1], member_weights=WEIGHTS)


def average(terms: list[Tensor]) -> Tensor:
    return 0.5 * terms[0] + 0.3 * terms[1] + 0.2 * terms[2]


def outer(mean: Any) -> Tensor:
    return torch.einsum("ip,jp->pij", mean, mean)


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("noise", [None, KNOWN])
def test_moments_are_those_of_an_average(observed: bool, noise: Tensor | None) -> None:
    noise = noise if observed else None
    each = [m.predict(NEW, observed=observed, noise=noise) for m in MEMBERS]
    first = average([e.mean for e in each])
    second = average([e.variance + e.mean**2 for e in each])
    prediction = MIXTURE.predict(NEW, observed=observed, noise=noise)
    torch.testing.assert_close(prediction.mean, first)
    torch.testing.assert_close(prediction.variance, second - first**2)
    torch.testing.assert_close(MIXTURE.predict_mean(NEW), first)
    covariance = MIXTURE.covariance(NEW, observed=observed, noise=noise)
    torch.testing.assert_close(covariance.diagonal(dim1=1, dim2=2).mT, prediction.variance)
    products = [
        m.covariance(NEW, observed=observed, noise=noise) + outer(e.mean)
        for m, e in zip(MEMBERS, each, strict=True)
    ]
    torch.testing.assert_close(covariance, average(products) - outer(first))


def test_density_and_quantiles_are_those_of_the_mixture_of_normals() -> None:
    each = [m.predict(NEW, observed=True, noise=KNOWN) for m in MEMBERS]
    normals = [Normal(e.mean, e.variance.sqrt()) for e in each]
    density = average([n.log_prob(NEW_Y).exp() for n in normals]).log()
    torch.testing.assert_close(MIXTURE.log_density(NEW, NEW_Y, noise=KNOWN), density)
    p = torch.tensor([0.05, 0.5, 0.975]).double()
    quantiles = MIXTURE.quantiles(NEW, p, noise=KNOWN)
    cdf = average([n.cdf(quantiles) for n in normals])
    torch.testing.assert_close(cdf, p[:, None, None].expand_as(cdf))


def test_density_of_a_missing_target_is_nan() -> None:
    targets = NEW_Y.clone()
    targets[1, 0] = torch.nan
    density = MIXTURE.log_density(NEW, targets)
    assert torch.isnan(density).nonzero().tolist() == [[1, 0]]


@pytest.mark.parametrize("draw", ["sample", "paths"])
def test_draws_have_the_moments_of_the_mixture(draw: str) -> None:
    g = torch.Generator().manual_seed(1)
    n = 6000
    if draw == "sample":
        values = MIXTURE.sample(NEW, n, generator=g)[..., 0]
    else:
        paths = MIXTURE.paths(n, frequencies=16, generator=g)
        assert paths.n == n
        values = paths(NEW)[..., 0]
    errors = values - MIXTURE.predict(NEW).mean[:, 0]
    second = errors[:, :, None] * errors[:, None, :]
    covariance = MIXTURE.covariance(NEW)[0]
    z = torch.cat(
        [
            n**0.5 * errors.mean(0) / errors.std(0),
            (n**0.5 * (second.mean(0) - covariance) / second.std(0)).flatten(),
        ]
    )
    # 20 z-scores of 6,000 draws.
    assert z.abs().max() < 4
    # Drawn from all members in a random order: neighbours are not of the same member.
    near = (values[1:] - values[:-1]).square().mean() / 2
    assert abs(near / errors.square().mean() - 1) < 0.1


def test_no_draws_have_no_values() -> None:
    assert MIXTURE.sample(NEW, 0).shape == (0, 4, 2)
    paths = MIXTURE.paths(0)
    assert paths.n == 0
    assert paths(NEW).shape == (0, 4, 2)


def test_draws_follow_the_generator() -> None:
    first, second = (
        MIXTURE.sample(NEW, 5, observed=True, generator=torch.Generator().manual_seed(2))
        for _ in range(2)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert first.shape == (5, 4, 2)
    assert MIXTURE.sample(NEW, 0).shape == (0, 4, 2)


def test_attributes_are_those_of_the_mode() -> None:
    assert (MIXTURE.S, MIXTURE.M, MIXTURE.P) == (3, 5, 2)
    assert MIXTURE.kernel is MEMBERS[1].kernel
    assert MIXTURE.likelihood is MEMBERS[1].likelihood
    torch.testing.assert_close(MIXTURE.Z, X[:5])
    torch.testing.assert_close(MIXTURE.noise, torch.tensor([0.284, 0.15]).double())


def test_members_have_equal_weights_by_default() -> None:
    equal = MixturePosterior(MEMBERS, mode=MEMBERS[1])
    mean = sum(m.predict(NEW).mean for m in MEMBERS) / 3
    torch.testing.assert_close(equal.predict_mean(NEW), mean)


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.5, 0.6, -0.1], [0.5, 0.3, 0.1]])
def test_weights_of_no_distribution_raise(weights: list[float]) -> None:
    with pytest.raises(InputError, match="`member_weights` must be 3 positive numbers that sum"):
        MixturePosterior(MEMBERS, mode=MEMBERS[1], member_weights=torch.tensor(weights))


def test_one_member_is_itself() -> None:
    alone = MixturePosterior(MEMBERS[:1], mode=MEMBERS[0])
    torch.testing.assert_close(alone.log_density(NEW, NEW_Y), MEMBERS[0].log_density(NEW, NEW_Y))
    p = torch.tensor([0.1]).double()
    torch.testing.assert_close(alone.quantiles(NEW, p), MEMBERS[0].quantiles(NEW, p))


def test_members_that_do_not_fit_together_raise() -> None:
    counts = VariationalGP(RBFKernel(), X[:5], likelihood=PoissonLikelihood(), targets=2)
    with torch.no_grad():
        poisson = counts.posterior(Dataset.of(X, Y.round().abs()))
    narrow = SparseGP(RBFKernel(), X[:4, :1]).posterior(Dataset.of(X[:, :1], Y))
    for members in ([], [narrow], [poisson]):
        with pytest.raises(InputError, match="`members` must be posteriors with Gaussian noise"):
            MixturePosterior(members, mode=MEMBERS[0])


def test_saved_mixture_predicts_the_same(tmp_path) -> None:
    loaded = load(save(MIXTURE, tmp_path / "mixture.winnow"))
    torch.testing.assert_close(loaded.log_density(NEW, NEW_Y), MIXTURE.log_density(NEW, NEW_Y))
    torch.testing.assert_close(loaded.mode.predict(NEW).mean, MEMBERS[1].predict(NEW).mean)


def test_saved_mixture_without_members_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(MixturePosterior, "members", property(lambda _: []))
    path = save(MIXTURE, tmp_path / "mixture.winnow")
    with pytest.raises(ModelFileError, match="contents that winnowgp"):
        load(path)


@pytest.mark.parametrize("noise", [0.1, torch.tensor([0.5, 0.1]).double()], ids=["one", "each"])
def test_subset_mixture_members_are_those_of_pruned_models(noise: Any) -> None:
    model = SparseGP(ScaleKernel(RBFKernel()), X[:6], noise=noise)
    targets = Y.clone()
    targets[3, 1] = torch.nan  # groups of outputs with moments of their own
    data = Dataset.of(X, targets, missing=True)
    masks = torch.tensor([[1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    mixture = subset_mixture(model, data, masks, mode=masks[0])
    assert [m.M for m in mixture.members] == [3, 0, 6]
    torch.testing.assert_close(mixture.Z, X[[0, 1, 4]])
    for one, mask in zip(mixture.members, masks, strict=True):
        expected = model.prune(mask).posterior(data).predict(NEW)
        torch.testing.assert_close(one.predict(NEW).mean, expected.mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            one.predict(NEW).variance, expected.variance, rtol=1e-6, atol=1e-6
        )


def test_subset_mixture_of_other_candidates_raises() -> None:
    model = SparseGP(ScaleKernel(RBFKernel()), X[:6])
    masks = torch.ones(1, 5, dtype=torch.bool)
    with pytest.raises(InputError, match="6 candidates"):
        subset_mixture(model, Dataset.of(X, Y), masks, mode=masks[0])
