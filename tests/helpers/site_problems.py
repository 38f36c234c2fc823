"""Models of every kind of likelihood on few rows, for tests of sites."""

from collections.abc import Callable

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    PoissonLikelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from gpytorch.means import ConstantMean
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.observations import LEAST_NOISE

N = 24


def rows() -> tuple[Tensor, Tensor]:
    """Inputs on a line, and a smooth function of them."""
    g = torch.Generator().manual_seed(0)
    X = 6 * torch.rand(N, 1, generator=g, dtype=torch.float64)
    return X, torch.sin(1.5 * X) + 0.2 * torch.randn(N, 1, generator=g, dtype=torch.float64)


def student() -> Likelihood:
    likelihood = StudentTLikelihood()
    likelihood.noise, likelihood.deg_free = torch.tensor(0.05), torch.tensor(3.0)
    return likelihood


def softmax() -> Likelihood:
    return SoftmaxLikelihood(num_classes=3, mixing_weights=False)


def mixed() -> Likelihood:
    likelihood = SoftmaxLikelihood(num_features=2, num_classes=3)
    weights = torch.tensor([[1.5, 0.0], [-0.5, 1.0], [0.3, -1.2]])
    likelihood.mixing_weights = torch.nn.Parameter(weights)
    return likelihood


def outliers(f: Tensor) -> Tensor:
    Y = f.clone()
    Y[::6] += 3.0
    return Y


def thirds(f: Tensor) -> Tensor:
    return (f > -0.4).double() + (f > 0.5).double()


CASES: dict[str, tuple[Callable[[], Likelihood], Callable[[Tensor], Tensor]]] = {
    "bernoulli": (BernoulliLikelihood, lambda f: (f > 0).double()),
    "two bernoullis": (BernoulliLikelihood, lambda f: torch.cat([f > 0, f < 0.4], 1).double()),
    "poisson": (PoissonLikelihood, lambda f: (3 * f.exp()).floor()),
    "student": (student, outliers),
    "softmax": (softmax, thirds),
    "mixed softmax": (mixed, thirds),
}


def built(case: str, K: int = 5, kernel=None) -> tuple[VariationalGP, Dataset]:
    X, f = rows()
    likelihood, targets = CASES[case]
    data = Dataset.of(X, targets(f))
    mean = ConstantMean()
    mean.constant = 0.3
    kernel = ScaleKernel(RBFKernel()) if kernel is None else kernel
    Z = torch.linspace(0.3, 5.7, K, dtype=torch.float64)[:, None]
    return (
        VariationalGP(kernel, Z, likelihood=likelihood(), targets=data.P, mean=mean),
        data,
    )


def regression() -> tuple[SparseGP, VariationalGP, Dataset]:
    X, f = rows()
    data = Dataset.of(X, torch.cat([f, f.square()], 1))
    kernel, mean = ScaleKernel(RBFKernel()), ConstantMean()
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(LEAST_NOISE)).double()
    mean.constant, likelihood.noise = 0.3, torch.tensor(0.15, dtype=torch.float64)
    Z = torch.linspace(0.3, 5.7, 5, dtype=torch.float64)[:, None]
    return (
        SparseGP(kernel, Z, mean=mean, noise=0.15),
        VariationalGP(kernel, Z, likelihood=likelihood, targets=2, mean=mean),
        data,
    )
