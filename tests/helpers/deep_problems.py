"""Small deep models whose q(u) is neither prior nor optimal, and dense references for them."""

from collections.abc import Sequence

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    Likelihood,
    SoftmaxLikelihood,
    StudentTLikelihood,
)
from linear_operator import to_dense
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from winnowgp.data import Dataset
from winnowgp.models import DeepGP, DeepLayer, deep_layers
from winnowgp.models.likelihoods import observation_model

LIKELIHOODS: dict[str, tuple[Likelihood, int]] = {
    "gaussian": (GaussianLikelihood(), 2),
    "bernoulli": (BernoulliLikelihood(), 2),
    "student": (StudentTLikelihood(), 1),
    "softmax": (SoftmaxLikelihood(num_classes=3, mixing_weights=False), 1),
}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(seen: str = "gaussian", *, N: int = 14, D: int = 2, seed: int = 3) -> Dataset:
    X = 1.5 * normal(N, D, seed=seed)
    f = torch.sin(X @ normal(D, 2, seed=seed + 1)) + 0.1 * normal(N, 2, seed=seed + 2)
    Y = {
        "gaussian": f,
        "bernoulli": (f > 0).double(),
        "student": f[:, :1],
        "softmax": (f[:, :1] > -0.3).double() + (f[:, :1] > 0.4).double(),
    }[seen]
    return Dataset.of(X, Y)


def layer(
    D: int,
    P: int,
    *,
    K: int = 4,
    seed: int = 0,
    kernel: Kernel | None = None,
    slope: bool = True,
    spread: float = 1.0,
) -> DeepLayer:
    """Return a layer whose outputs differ in mean and covariance, with slope and level."""
    if kernel is None:
        base = RBFKernel(ard_num_dims=D)
        base.lengthscale = torch.linspace(1.0, 1.4, D)
        kernel = ScaleKernel(base)
        kernel.outputscale = 0.8
    made = DeepLayer(
        kernel,
        normal(K, D, seed=seed),
        outputs=P,
        slope=0.7 * normal(D, P, seed=seed + 1) if slope else None,
    )
    with torch.no_grad():
        made.level.copy_(0.3 * normal(P, seed=seed + 2))
        made.q_mean.copy_(normal(K, P, seed=seed + 3))
        eye = torch.eye(K, dtype=torch.float64)
        made.q_factor.copy_(spread * (0.6 * eye + 0.2 * normal(P, K, K, seed=seed + 4)))
    return made


def deep(
    seen: str = "gaussian",
    *,
    D: int = 2,
    widths: Sequence[int] = (2,),
    K: Sequence[int] = (4, 3),
    skip_connections: bool = False,
    matern: bool = False,
) -> DeepGP:
    likelihood, targets = LIKELIHOODS[seen]
    outputs = 3 if seen == "softmax" else targets
    layers, inputs = [], D
    for number, P in enumerate([*widths, outputs]):
        kernel = ScaleKernel(MaternKernel(nu=2.5)) if matern else None
        layers.append(layer(inputs, P, K=K[number], seed=10 * number, kernel=kernel))
        inputs = P + D * skip_connections
    made = DeepGP(layers, likelihood=likelihood, targets=targets, skip_connections=skip_connections)
    if isinstance(made.likelihood, GaussianLikelihood):
        made.likelihood.initialize(noise=0.15)
    return made


def dense_q(made: DeepLayer, keep: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean `[M P]` and covariances `[P M M]` of u at the kept points, and K_uu there."""
    keep = torch.ones(made.K, dtype=torch.bool) if keep is None else keep
    with torch.no_grad():
        Kuu = to_dense(made.kernel(made.candidates))
        LF = torch.linalg.cholesky(Kuu) @ made.q_factor.tril()
        m, S = torch.linalg.cholesky(Kuu) @ made.q_mean, LF @ LF.mT
    return m[keep], S[:, keep][:, :, keep], Kuu[keep][:, keep]


def dense_marginals(
    made: DeepLayer, X: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """c + K_fu K_uu⁻¹ m and k − K_fu K_uu⁻¹ (K_uu − S) K_uu⁻¹ K_uf of rows `[N D]`, in u-space."""
    m, S, Kuu = dense_q(made, keep)
    with torch.no_grad():
        Z = made.candidates if keep is None else made.candidates[keep]
        prior = to_dense(made.kernel(X)).diagonal()
        mean = X @ made.slope + made.level
        if len(Z) == 0:
            return mean, prior[:, None].expand_as(mean)
        A = to_dense(made.kernel(X, Z)) @ Kuu.inverse()
    reduced = torch.stack([(A @ (Kuu - s) @ A.mT).diagonal() for s in S], dim=1)
    return mean + A @ m, prior[:, None] - reduced


def dense_kl(made: DeepLayer, keep: Tensor | None = None) -> Tensor:
    """torch's own KL, output by output, in u-space."""
    m, S, Kuu = dense_q(made, keep)
    if len(m) == 0:
        return torch.zeros((), dtype=m.dtype)
    prior = MultivariateNormal(torch.zeros_like(m[:, 0]), Kuu)
    pairs = zip(m.mT, S, strict=True)
    return torch.stack([kl_divergence(MultivariateNormal(a, s), prior) for a, s in pairs]).sum()


def dense_pass(
    model: DeepGP, X: Tensor, eps: Sequence[Tensor], masks: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, Tensor]:
    """q(f_L) of each sample and row, `[T N P]`: one sample after another, layer by layer."""
    masks = [None] * len(model.layers) if masks is None else masks
    means, variances = [], []
    for t in range(len(eps[0]) if eps else 1):
        seen = X
        mean, variance = dense_marginals(model.layers[0], seen, masks[0])
        for number, made in enumerate(model.layers[1:], start=1):
            seen = mean + variance.sqrt() * eps[number - 1][t]
            if model.skip_connections:
                seen = torch.cat([seen, X], dim=1)
            mean, variance = dense_marginals(made, seen, masks[number])
        means.append(mean)
        variances.append(variance)
    return torch.stack(means), torch.stack(variances)


def dense_bound(
    model: DeepGP,
    data: Dataset,
    eps: Sequence[Tensor],
    masks: Sequence[Tensor | None] | None = None,
    *,
    scale: float = 1.0,
) -> Tensor:
    """Average over samples of scale · Σ_i E[log p(y_i | f_i)], less one KL per layer."""
    mean, variance = dense_pass(model, data.X, eps, masks)
    with torch.no_grad():
        pairs = zip(mean, variance, strict=True)
        nats = [
            observation_model(model.likelihood).expected_log_prob(data.Y, m, v).sum()
            for m, v in pairs
        ]
    masks = [None] * len(model.layers) if masks is None else masks
    kl = [dense_kl(made, keep) for made, keep in zip(model.layers, masks, strict=True)]
    return scale * torch.stack(nats).mean() - torch.stack(kl).sum()


def hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes of a standard normal and their weights, which add up to one."""
    # The eigenvalues of the Jacobi matrix of Hermite's polynomials (Golub & Welsch 1969).
    off = torch.arange(1, count, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, vectors[0].square()


def integrated_density(model: DeepGP, X: Tensor, Y: Tensor, count: int = 200) -> Tensor:
    """log ∫ N(y | f_2(h), σ²) q(h) dh of each row: two layers, one hidden output."""
    nodes, weights = hermite(count)
    eps = nodes[:, None, None].expand(-1, len(X), 1)
    mean, variance = dense_pass(model, X, [eps])
    assert isinstance(model.likelihood, GaussianLikelihood)
    total = (variance + model.likelihood.noise.detach()).sqrt()
    density = Normal(mean, total).log_prob(Y).exp()
    return (weights[:, None, None] * density).sum(0).log()


def step_data(seen: str = "gaussian", *, N: int = 40) -> Dataset:
    """Return a step function, which one smooth layer cannot fit."""
    X = torch.linspace(-1, 1, N, dtype=torch.float64)[:, None]
    f = torch.where(X > 0.1, 1.0, -1.0).double() + 0.05 * normal(N, 1, seed=2)
    Y = {
        "gaussian": f,
        "student": f,
        "bernoulli": (f > 0).double(),
        "softmax": (X > -0.3).double() + (X > 0.4).double(),
    }[seen]
    return Dataset.of(X, Y)


def started(
    seen: str = "gaussian",
    *,
    data: Dataset | None = None,
    K: int = 8,
    widths: Sequence[int] = (1,),
    hidden_mean: str = "identity",
    skip_connections: bool = False,
) -> DeepGP:
    """Return a model in its initial state."""
    data = step_data(seen) if data is None else data
    likelihood, _ = LIKELIHOODS[seen]
    outputs = 3 if seen == "softmax" else data.P

    def kernel(*given: int) -> Kernel:
        # The second argument is the number of inputs.
        return ScaleKernel(RBFKernel(ard_num_dims=given[-1]))

    layers = deep_layers(
        data.X,
        data.X[:: data.N // K][:K],
        kernel=kernel,
        widths=(*widths, outputs),
        hidden_mean=hidden_mean,
        skip_connections=skip_connections,
    )
    return DeepGP(layers, likelihood=likelihood, targets=data.P, skip_connections=skip_connections)
