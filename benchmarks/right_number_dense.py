"""Exact GPs: a slow oracle in NumPy, and the exact GP that sparse ones are compared with.

The oracle evaluates kernels itself and forms all N by N matrices; it shares no code with winnowgp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import AdditiveKernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular
from scipy.spatial.distance import cdist

from measure import Seconds, timed
from right_number_problems import Problem
from winnowgp.data import Dataset
from winnowgp.estimators.kernels import kernel_from
from winnowgp.models import SparseGP
from winnowgp.models.exact_gp import gaussian_rows
from winnowgp.models.kernels import prior_variance
from winnowgp.models.priors import add_weak_priors
from winnowgp.training.budget import Budget
from winnowgp.training.hyperparameters import maximise_evidence
from winnowgp.training.optima import Optimum

Values = NDArray[np.float64]
Covariance = Callable[[Values, Values], Values]


def covariance_of(kernel: Any) -> Covariance:
    """Return a fitted GPyTorch kernel as a function of NumPy arrays."""
    if isinstance(kernel, AdditiveKernel):
        terms = [covariance_of(term) for term in kernel.kernels]
        return lambda A, B: sum((term(A, B) for term in terms), np.zeros((len(A), len(B))))
    if isinstance(kernel, ScaleKernel):
        inner, variance = covariance_of(kernel.base_kernel), kernel.outputscale.item()
        return lambda A, B: variance * inner(A, B)
    if isinstance(kernel, LinearKernel):
        weights = kernel.variance.detach().cpu().numpy().reshape(-1)
        return lambda A, B: (A * weights) @ B.T
    if not isinstance(kernel, RBFKernel | MaternKernel):
        raise TypeError(f"the oracle does not know the kernel {type(kernel).__name__}.")
    scale = kernel.lengthscale.detach().cpu().numpy().reshape(-1)
    shape = _SHAPES[0.0 if isinstance(kernel, RBFKernel) else kernel.nu]
    return lambda A, B: shape(np.asarray(cdist(A / scale, B / scale), np.float64))


# By the smoothness ν of a Matérn kernel; zero stands for the RBF kernel.
_SHAPES: dict[float, Callable[[Values], Values]] = {
    0.0: lambda r: np.exp(-0.5 * r**2),
    1.5: lambda r: (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r),
    2.5: lambda r: (1 + np.sqrt(5) * r + 5 / 3 * r**2) * np.exp(-np.sqrt(5) * r),
}


@dataclass(frozen=True, slots=True)
class DenseGP:
    """The exact GP with zero mean at fixed hyper-parameters."""

    X: Values
    y: Values
    covariance: Covariance
    noise: float
    L: Values
    """Lower Cholesky factor of K + σ² I."""

    @classmethod
    def of(cls, X: Values, y: Values, *, covariance: Covariance, noise: float) -> "DenseGP":
        """Factorise the covariance of the observations; O(N³)."""
        K = covariance(X, X) + noise * np.eye(len(X))
        return cls(X, y, covariance, noise, cholesky(K, lower=True))

    def evidence(self) -> float:
        """Return log N(y | 0, K + σ² I)."""
        return _gaussian_log_density(self.y, self.L)

    def log_density(self, X: Values, y: Values) -> Values:
        """Return the predictive log density of each new observation."""
        V = solve_triangular(self.L, self.covariance(self.X, X), lower=True)
        mean = V.T @ solve_triangular(self.L, self.y, lower=True)
        prior = np.array([self.covariance(x[None], x[None])[0, 0] for x in X])
        variance = prior - (V**2).sum(0) + self.noise
        return -0.5 * (np.log(2 * np.pi * variance) + (y - mean) ** 2 / variance)


def collapsed_bound(
    X: Values, y: Values, Z: Values, *, covariance: Covariance, noise: float
) -> float:
    """Return log N(y | 0, Q + σ² I) − tr(K − Q)/(2σ²), Q = K_fu K_uu⁻¹ K_uf; O(N³)."""
    prior = np.array([covariance(x[None], x[None])[0, 0] for x in X])
    Q = np.zeros((len(X), len(X)))
    if len(Z):
        Kuu, Kuf = covariance(Z, Z), covariance(Z, X)
        V = solve_triangular(_jittered_cholesky(Kuu), Kuf, lower=True)
        Q = V.T @ V
    trace = np.sum(prior - np.diag(Q))
    L = cholesky(Q + noise * np.eye(len(X)), lower=True)
    return _gaussian_log_density(y, L) - 0.5 * trace / noise


def _jittered_cholesky(K: Values) -> Values:
    """Return the factor of K with the least jitter, in units of its diagonal, that allows it."""
    for jitter in (0.0, 1e-12, 1e-10, 1e-8, 1e-6):
        try:
            return cholesky(K + jitter * np.diag(K).mean() * np.eye(len(K)), lower=True)
        except np.linalg.LinAlgError:
            continue
    raise np.linalg.LinAlgError("K_uu cannot be factorised.")


def _gaussian_log_density(y: Values, L: Values) -> float:
    """Return log N(y | 0, L Lᵀ)."""
    white = solve_triangular(L, y, lower=True)
    return float(-0.5 * (white @ white + len(y) * np.log(2 * np.pi)) - np.sum(np.log(np.diag(L))))


@dataclass(frozen=True, slots=True)
class ExactGP:
    """The exact GP at the maximum of its evidence or posterior, the best of several kernels."""

    model: SparseGP
    data: Dataset
    evidence: float
    evidences: dict[str, float]
    """Maximum of the evidence of each kernel, in nats."""
    seconds: Seconds
    """Time of the optimisation."""

    @property
    def kernel(self) -> str:
        """Name of the kernel of the highest evidence."""
        return max(self.evidences, key=self.evidences.__getitem__)

    def dense(self) -> DenseGP:
        """Return the oracle at these hyper-parameters."""
        return DenseGP.of(
            self.data.X.cpu().numpy(),
            self.data.Y[:, 0].cpu().numpy(),
            covariance=covariance_of(self.model.kernel),
            noise=self.model.noise.item(),
        )

    @torch.no_grad()
    def log_density(self, X: Values, y: Values) -> Values:
        """Return the predictive log density of standardised rows, computed on the device."""
        kernel, noise = self.model.kernel, self.model.noise
        (rows,) = gaussian_rows(kernel, data=self.data, mean=self.model.mean, noise=noise)
        L = rows.factor()
        white = torch.linalg.solve_triangular(L, rows.Y, upper=False)
        densities = []
        for inputs, targets in zip(
            torch.from_numpy(X).to(L).split(1024),
            torch.from_numpy(y).to(L).split(1024),
            strict=True,
        ):
            V = torch.linalg.solve_triangular(L, rows.covariance(rows.X, inputs), upper=False)
            variance = prior_variance(kernel, inputs) - V.square().sum(0) + noise
            mean = (V.mT @ white)[:, 0]
            nats = (2 * torch.pi * variance).log() + (targets - mean).square() / variance
            densities.append(-0.5 * nats)
        return torch.cat(densities).cpu().numpy()


def exact_gp(
    problem: Problem,
    *,
    kernels: tuple[str, ...],
    device: str,
    seed: int,
    linear: bool = False,
    priors: bool = False,
) -> ExactGP:
    """Return the exact GP of standardised rows; each kernel is searched on its own.

    Args:
        linear: whether to try a linear term in addition.
        priors: whether the weak priors of the estimators are part of what is maximised.
    """
    X, y = (torch.from_numpy(np.ascontiguousarray(v)).to(device) for v in (problem.X, problem.y))
    data, D = Dataset.of(X, y), X.shape[1]
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.randperm(problem.N, generator=generator, device=device)

    def work() -> dict[str, Optimum[SparseGP]]:
        optima = {}
        for name in kernels:
            model = SparseGP(kernel_from(name, D), X[:0])
            if priors:
                add_weak_priors(model)
            found = maximise_evidence(
                [model],
                data,
                order=order,
                rows=problem.N,
                linear_term=linear,
                budget=Budget(X.device),
            )
            optima[name] = found.optima[0]
        return optima

    optima, seconds = timed(work)
    best = max(optima.values(), key=lambda optimum: optimum.objective)
    evidences = {name: optimum.evidence for name, optimum in optima.items()}
    return ExactGP(best.model, data, best.evidence, evidences, seconds)
