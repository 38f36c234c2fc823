"""Kernels, means and likelihoods survive serialisation."""

from typing import Any

import pytest
import torch
from gpytorch import constraints, kernels, likelihoods, means, priors
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean

from winnowgp.errors import NotSaveableError
from winnowgp.io.registry import deserialise, serialise
from winnowgp.models.kernels import covariance, prior_mean
from winnowgp.models.likelihoods import copy_likelihood, observation_model

EXP: Any = {"transform": torch.exp, "inv_transform": torch.log}
SIGMOID: Any = {"transform": torch.sigmoid, "inv_transform": torch.logit}
KERNELS: dict[str, Kernel] = {
    "rbf": kernels.RBFKernel(ard_num_dims=3),
    "matern": kernels.MaternKernel(nu=1.5),
    "rq": kernels.RQKernel(ard_num_dims=3),
    "periodic": kernels.PeriodicKernel(),
    "cosine": kernels.CosineKernel(),
    "linear": kernels.LinearKernel(),
    "polynomial": kernels.PolynomialKernel(power=3),
    "piecewise": kernels.PiecewisePolynomialKernel(q=1),
    "mixture": kernels.SpectralMixtureKernel(num_mixtures=4, ard_num_dims=3),
    "constant": kernels.ConstantKernel(),
    "active": kernels.ScaleKernel(kernels.RBFKernel(active_dims=(2, 0), ard_num_dims=2)),
    "active outside": kernels.ScaleKernel(kernels.ConstantKernel(), active_dims=(1,)),
    "sum": kernels.RBFKernel(active_dims=(0,)) + kernels.ScaleKernel(kernels.LinearKernel()),
    "product of sums": (kernels.RBFKernel() + kernels.ConstantKernel())
    * kernels.ScaleKernel(kernels.MaternKernel(nu=0.5) * kernels.PeriodicKernel()),
    "interval": kernels.RBFKernel(lengthscale_constraint=constraints.Interval(0.1, 3.0)),
    "greater": kernels.ScaleKernel(
        kernels.RBFKernel(lengthscale_constraint=constraints.GreaterThan(0.2)),
        outputscale_constraint=constraints.Positive(**EXP),
    ),
    "priors": kernels.ScaleKernel(
        kernels.RBFKernel(lengthscale_prior=priors.LogNormalPrior(0.5, 1.0)),
        outputscale_prior=priors.GammaPrior(2.0, 0.15),
    ),
}
MEANS: dict[str, Mean] = {
    "zero": means.ZeroMean(),
    "constant": means.ConstantMean(),
    "linear": means.LinearMean(3),
    "no bias": means.LinearMean(3, bias=False),
}
LIKELIHOODS: dict[str, Likelihood] = {
    "gaussian": likelihoods.GaussianLikelihood(noise_constraint=constraints.GreaterThan(1e-6)),
    "gaussian with a prior": likelihoods.GaussianLikelihood(
        noise_prior=priors.GammaPrior(1.1, 2.0)
    ),
    "bernoulli": likelihoods.BernoulliLikelihood(),
    "poisson": likelihoods.PoissonLikelihood(),
    "student": likelihoods.StudentTLikelihood(),
    "laplace": likelihoods.LaplaceLikelihood(),
    "beta": likelihoods.BetaLikelihood(),
    "negative binomial": likelihoods.NegativeBinomialLikelihood(),
    "softmax": likelihoods.SoftmaxLikelihood(num_classes=3, mixing_weights=False),
    "softmax mixed": likelihoods.SoftmaxLikelihood(num_features=2, num_classes=3),
}
X = torch.rand(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def restored(module: Any) -> Any:
    return deserialise(serialise("Model", module))


def disturbed(module: Any) -> Any:
    """Return the module in float64, with parameters unlike the constructor's."""
    module = module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.linspace(0.1, 0.7, p.numel(), dtype=p.dtype).reshape(p.shape))
    return module


@pytest.mark.parametrize("name", KERNELS)
def test_serialise_restores_a_kernel(name: str) -> None:
    kernel = disturbed(KERNELS[name])
    back = restored(kernel)
    torch.testing.assert_close(
        covariance(back, X, X[:4]), covariance(kernel, X, X[:4]), rtol=1e-10, atol=1e-12
    )
    assert [n for n, *_ in back.named_priors()] == [n for n, *_ in kernel.named_priors()]
    assert {n for n, _ in back.named_parameters()} == {n for n, _ in kernel.named_parameters()}


@pytest.mark.parametrize("name", MEANS)
def test_serialise_restores_a_mean(name: str) -> None:
    mean = disturbed(MEANS[name])
    back = restored(mean)
    torch.testing.assert_close(prior_mean(back, X), prior_mean(mean, X), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_serialise_restores_a_likelihood(name: str) -> None:
    likelihood = copy_likelihood(disturbed(LIKELIHOODS[name]))
    back = restored(likelihood)
    F = getattr(likelihood, "num_features", 1)
    mean, variance = X[:, :F] - 0.3, X[:, :F] + 0.2
    Y = torch.full((7, 1), 0.5 if name == "beta" else 1.0, dtype=torch.float64)
    assert torch.equal(
        observation_model(back).log_density(Y, mean, variance),
        observation_model(likelihood).log_density(Y, mean, variance),
    )
    assert torch.equal(
        observation_model(back).predict(mean, variance).variance,
        observation_model(likelihood).predict(mean, variance).variance,
    )


def test_serialise_restores_transforms_and_bounds() -> None:
    kernel = disturbed(KERNELS["greater"])
    back: Any = restored(kernel)
    assert back.base_kernel.raw_lengthscale_constraint.lower_bound == pytest.approx(0.2)
    assert back.raw_outputscale_constraint._transform is torch.exp
    with pytest.raises(RuntimeError, match="out of bounds"):
        back.base_kernel.lengthscale = 0.1


class _MyKernel(kernels.RBFKernel):
    pass


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (_MyKernel(), "_MyKernel cannot be saved"),
        (kernels.ScaleKernel(_MyKernel()) + kernels.LinearKernel(), "_MyKernel cannot be saved"),
        (kernels.RBFKernel(batch_shape=torch.Size([2])), "RBFKernel cannot be saved.*raw_lengthsc"),
        (
            kernels.RBFKernel(lengthscale_constraint=constraints.Positive(**SIGMOID)),
            "transform sigmoid",
        ),
        (
            kernels.RBFKernel(lengthscale_prior=priors.SmoothedBoxPrior(0.1, 1.0)),
            "SmoothedBoxPrior cannot be saved",
        ),
    ],
)
def test_serialise_of_an_unknown_component_names_it(kernel: Kernel, message: str) -> None:
    with pytest.raises(NotSaveableError, match=message):
        serialise("Model", kernel)
