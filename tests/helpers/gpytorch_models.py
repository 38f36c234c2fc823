"""Typical GPyTorch models, and small data sets for them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, LinearMean
from gpytorch.mlls import DeepApproximateMLL, VariationalELBO
from gpytorch.models import ApproximateGP
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from gpytorch.models.gplvm import BayesianGPLVM, VariationalLatentVariable
from gpytorch.priors import NormalPrior
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    DeltaVariationalDistribution,
    IndependentMultitaskVariationalStrategy,
    LMCVariationalStrategy,
    MeanFieldVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
    VariationalStrategy,
)
from torch import Tensor, nn

DISTRIBUTIONS: list[Any] = [
    CholeskyVariationalDistribution,
    MeanFieldVariationalDistribution,
    DeltaVariationalDistribution,
    NaturalVariationalDistribution,
    TrilNaturalVariationalDistribution,
]


def curve(N: int = 60, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """x on [0, 6] and a noisy sine."""
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(N, 1, generator=generator, dtype=dtype)
    noise = torch.randn(N, generator=generator, dtype=dtype)
    return x, torch.sin(2 * x[:, 0]) + 0.1 * noise


def tasks(N: int = 60, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return three targets per row, the third close to the first."""
    x, y = curve(N, seed=seed)
    other = torch.cos(x[:, 0]) + 0.1 * (y - torch.sin(2 * x[:, 0])).roll(1)
    return x, torch.stack([y, other, 0.5 * y + 0.05 * torch.cos(9 * x[:, 0])], dim=1)


def three_classes(y: Tensor) -> Tensor:
    """Low, middle and high."""
    return (y > -0.4).long() + (y > 0.4).long()


def points(count: int) -> Tensor:
    """Return equally spaced points on the range of `curve`."""
    return torch.linspace(0, 6, count, dtype=torch.float64)[:, None]


def independent(strategy: Any) -> IndependentMultitaskVariationalStrategy:
    """Three tasks with one function each."""
    return IndependentMultitaskVariationalStrategy(strategy, num_tasks=3)


def mixed(strategy: Any) -> LMCVariationalStrategy:
    """Three tasks, all of them mixtures of three functions."""
    wrapped = LMCVariationalStrategy(strategy, num_tasks=3, num_latents=3)
    generator = torch.Generator().manual_seed(2)
    wrapped.lmc_coefficients.data = torch.randn(3, 3, generator=generator)
    return wrapped


class Model(ApproximateGP):
    """A model with batches of any shape; kernels of a batch differ in lengthscales."""

    mean_module: Any
    covar_module: Any
    variational_strategy: Any

    def __init__(
        self,
        Z: Tensor,
        *,
        strategy: Any = VariationalStrategy,
        distribution: Any = CholeskyVariationalDistribution,
        batch: Sequence[int] = (),
        prior: Sequence[int] = (),
        around: Callable[[Any], Any] = lambda strategy: strategy,
        learnt: bool = True,
    ) -> None:
        q = distribution(Z.shape[-2], batch_shape=torch.Size(batch))
        inner = strategy(self, Z, q, learn_inducing_locations=learnt)
        super().__init__(around(inner))
        shape = torch.Size(prior)
        self.mean_module = ConstantMean(batch_shape=shape)
        self.covar_module = ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape)
        steps = torch.arange(shape.numel(), dtype=Z.dtype).reshape(shape)
        self.to(Z)
        self.mean_module.constant.data = 0.2 + 0.1 * steps
        self.covar_module.outputscale = 1.3 + 0.2 * steps
        self.covar_module.base_kernel.lengthscale = (0.6 + 0.3 * steps)[..., None, None]

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Layer(DeepGPLayer):
    mean_module: Any
    covar_module: Any

    def __init__(self, inputs: int, outputs: int | None, points: int, *, linear: bool) -> None:
        batch = torch.Size([] if outputs is None else [outputs])
        generator = torch.Generator().manual_seed(3)
        Z = 2 * torch.randn(*batch, points, inputs, generator=generator, dtype=torch.float64)
        q = CholeskyVariationalDistribution(points, batch_shape=batch)
        super().__init__(VariationalStrategy(self, Z, q), inputs, outputs)
        self.mean_module = LinearMean(inputs) if linear else ConstantMean(batch_shape=batch)
        kernel = RBFKernel(batch_shape=batch, ard_num_dims=inputs)
        self.covar_module = ScaleKernel(kernel, batch_shape=batch)
        self.double()
        if linear:
            # GPyTorch draws them from the global generator; some draws are far from all points.
            weights = self.mean_module.weights.data, self.mean_module.bias.data
            for each in weights:
                each.normal_(generator=generator)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Deep(DeepGP):
    """Two hidden functions, which the last layer receives together with the inputs if `skip`."""

    hidden: Any
    last: Any

    def __init__(self, points: int = 8, *, skip: bool = False, linear: bool = True) -> None:
        super().__init__()
        self.skip = skip
        self.hidden = Layer(1, 2, points, linear=linear)
        self.last = Layer(3 if skip else 2, None, points, linear=False)

    def forward(self, x: Tensor) -> MultivariateNormal:
        h = self.hidden(x)
        if not self.skip:
            return self.last(h)
        drawn = torch.distributions.Normal(h.mean, h.variance.sqrt()).rsample()
        both = torch.cat([drawn, x.expand(*drawn.shape[:-1], 1)], dim=-1)
        return self.last(both, are_samples=True)


class Latent(BayesianGPLVM):
    """P columns, each with points of its own, of one latent input per row."""

    mean_module: Any
    covar_module: Any
    variational_strategy: Any

    def __init__(self, start: Tensor, columns: int, points: int) -> None:
        N, Q = start.shape
        prior = NormalPrior(torch.zeros_like(start), torch.ones_like(start))
        X = VariationalLatentVariable(N, columns, Q, start.clone(), prior)
        Z = torch.linspace(-2, 2, points, dtype=start.dtype)[:, None].expand(columns, -1, Q)
        q = CholeskyVariationalDistribution(points, batch_shape=torch.Size([columns]))
        super().__init__(X, VariationalStrategy(self, Z.clone(), q))
        self.mean_module = ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=Q))
        self.to(start)
        X.q_log_sigma.data = torch.full_like(start, -3.0)

    # GPyTorch's base class takes any number of arguments.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor
    ) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def gaussian(noise: float = 0.02, dtype: torch.dtype = torch.float64) -> GaussianLikelihood:
    likelihood = GaussianLikelihood().to(dtype)
    likelihood.noise = torch.tensor(noise)
    return likelihood


def task_noise(noise: float = 0.01) -> MultitaskGaussianLikelihood:
    """Half of it shared by three tasks."""
    likelihood = MultitaskGaussianLikelihood(num_tasks=3).double()
    likelihood.noise, likelihood.task_noises = noise, torch.full((3,), noise).double()
    return likelihood


def with_random_q(model: Any, *, seed: int = 1) -> Any:
    """Move all parameters of q(u) away from the optimum, and locations apart."""
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)

    for name, p in model.named_parameters():
        kind = name.rpartition(".")[2]
        if kind in ("variational_mean", "natural_vec"):
            p.data = 0.5 * noise(p)
        elif kind in ("chol_variational_covar", "natural_tril_mat"):
            p.data = torch.eye(p.shape[-1]).to(p) * (0.5 + 0.3 * noise(p).abs())
            p.data = p.data + 0.2 * noise(p).tril(-1)
        elif kind == "natural_mat":
            A = noise(p)
            p.data = -0.5 * (torch.eye(p.shape[-1]).to(p) + 0.3 * A @ A.mT)
        elif kind == "_variational_stddev":
            p.data = 0.3 + 0.3 * noise(p).abs()
        elif kind == "inducing_points" and p.dim() > 2:
            p.data = p.data + 0.2 * noise(p)
    for module in model.modules():
        if isinstance(getattr(module, "variational_params_initialized", None), Tensor):
            module.variational_params_initialized.fill_(1)
    return model


def elbo(likelihood: Any, model: Any, N: int) -> Any:
    """Return GPyTorch's ELBO per row."""
    bound = VariationalELBO(likelihood, model, num_data=N)
    return DeepApproximateMLL(bound) if isinstance(model, DeepGP) else bound


def trained(model: Any, bound: Any, x: Any, y: Any, steps: int) -> None:
    """Take Adam steps on all rows; x is None for latent inputs."""
    torch.manual_seed(0)
    optimiser = torch.optim.Adam(bound.parameters(), lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        inputs = model.sample_latent_variable() if x is None else x
        (-bound(model(inputs), y).sum()).backward()
        optimiser.step()


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def untouched(model: nn.Module) -> dict[str, Tensor]:
    """Return the state without inducing points and q(u)."""
    return {n: v for n, v in state(model).items() if "variational_strategy" not in n}
