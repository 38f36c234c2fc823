"""Samples of q(f) that are functions, by pathwise conditioning (Wilson et al. 2020).

A draw from the prior, written with random features, is corrected at the inducing points:

    f(x) = μ(x) + f̃(x) + k(x, Z) K_uu⁻¹ (u − f̃(Z)),   u ~ q(u)

It can be evaluated anywhere, any number of times, at O(M) per row, and differentiated. The draw
from the prior is a sum of cosines: with ω from the spectral density of a stationary kernel of
variance s,

    f̃(x) = √(s/F) Σ_i [a_i cos(ω_i·x) + b_i sin(ω_i·x)],   a, b ~ N(0, 1),

has the covariance E[f̃(x) f̃(x')] = s E cos(ω·(x − x')) = k(x, x') for any number F of frequencies.
Every draw has frequencies of its own: mean and covariance of f are then exactly those of q(f). F
only determines how close its distribution is to a normal one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import pi
from typing import TypeAlias, final

import torch
from gpytorch import kernels
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.errors import InputError
from winnowgp.linalg import solve_lower
from winnowgp.models.kernels import cross_covariance, prior_mean
from winnowgp.models.posterior import Posterior
from winnowgp.typing import Scalar

FREQUENCIES = 256
"""Number of frequencies of each draw and each term of the kernel."""

# Numbers that one block of rows may hold.
_NUMBERS = 2**22

Frequencies: TypeAlias = Callable[[tuple[int, ...], torch.Generator | None], Tensor]
"""Draws frequencies `[*shape D]` from the spectral density of a kernel."""


@final
@dataclass(frozen=True, slots=True)
class StationaryTerm:
    """A stationary term of a kernel: its variance and its spectral density."""

    variance: Scalar
    frequencies: Frequencies


@final
@dataclass(frozen=True, slots=True)
class LinearTerm:
    """A linear term of a kernel: one variance per column."""

    variances: Float[Tensor, " D"]


@final
class PosteriorPaths(nn.Module):
    """S functions drawn from q(f), by pathwise conditioning (Wilson et al. 2020).

        f(x) = μ(x) + f̃(x) + k(x, Z) K_uu⁻¹ (u − f̃(Z)),   u ~ q(u)

    Each is a draw f̃ from the prior, written with random cosines, and corrected at the inducing
    points. It can be evaluated at any rows, one call after another, at O(M) per row. Mean and
    covariance are exactly those of q(f); the distribution is nearly Gaussian, the more frequencies
    the better.

    The kernel may be a sum of linear and stationary kernels: RBF, Matérn, rational quadratic,
    periodic and constant ones, on all columns or some, and products of stationary ones.

    >>> from winnowgp.data import hills
    >>> from winnowgp.models import SparseGP
    >>> data = hills()
    >>> posterior = SparseGP(kernels.ScaleKernel(kernels.RBFKernel()), data.X[::9]).posterior(data)
    >>> paths = PosteriorPaths(posterior, 5, generator=torch.Generator().manual_seed(0))
    >>> paths(data.X).shape == (5, data.N, 1)
    True

    Args:
        posterior: the posterior; its kernel and inducing points are not copied.
        n: number of functions S.
        frequencies: number of frequencies F of each function.
        generator: source of randomness.

    Raises:
        InputError: the kernel has a term whose spectral density is not known.
    """

    weights: Tensor

    def __init__(
        self,
        posterior: Posterior,
        n: int,
        *,
        frequencies: int = FREQUENCIES,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.posterior = posterior
        Z, P, M = posterior.Z, posterior.P, posterior.M
        self._omegas: list[str] = []
        self._linear: list[str] = []
        for number, term in enumerate(kernel_terms(posterior.kernel, Z.shape[1])):
            if isinstance(term, LinearTerm):
                # Σ_d √v_d w_d x_d
                weights = term.variances.sqrt() * _normal((n, P, Z.shape[1]), Z, generator)
                self.register_buffer(f"linear_{number}", weights)
                self._linear.append(f"linear_{number}")
                continue
            omega = term.frequencies((n, P, frequencies), generator)
            amplitudes = (term.variance / frequencies).sqrt()
            self.register_buffer(f"omega_{number}", omega)
            self.register_buffer(
                f"cos_{number}", amplitudes * _normal((n, P, frequencies), Z, generator)
            )
            self.register_buffer(
                f"sin_{number}", amplitudes * _normal((n, P, frequencies), Z, generator)
            )
            self._omegas.append(str(number))
        # K_uu⁻¹ (u − f̃(Z)) = L⁻ᵀ (v − L⁻¹ f̃(Z)) with v = m + F ε
        eps = _normal((n, P, M, 1), Z, generator)
        v = posterior.q_mean.mT + (posterior.q_factor @ eps)[..., 0]
        with torch.no_grad():
            prior = self._prior(Z.expand(n, M, -1))
            whitened = v[..., None] - solve_lower(posterior.L, prior[..., None])
            weights = torch.linalg.solve_triangular(posterior.L.mT, whitened, upper=True)
        self.register_buffer("weights", weights[..., 0])

    @property
    def n(self) -> int:
        """Number of functions S."""
        return self.weights.shape[0]

    def forward(self, X: Float[Tensor, "*b N D"]) -> Float[Tensor, "*c N P"]:
        """Return the values of the functions, differentiable in the rows; O(M) per row.

        Args:
            X: rows. Their last batch axis is that of the functions: rows `[N D]` or `[1 N D]` are
                those of every function, rows `[S N D]` belong to one each.

        Returns: values `[*b S N P]`, where the axis S of `X` is not repeated.
        """
        D = self.posterior.Z.shape[1]
        if X.dim() < 2 or X.shape[-1] != D:
            raise InputError(f"`X` must be [..., N, {D}] as in training; got {list(X.shape)}.")
        batch = torch.broadcast_shapes(X.shape[:-2], (self.n,))
        numbers = batch.numel() * self.posterior.P * (self._width + self.posterior.M)
        rows = max(1, _NUMBERS // max(numbers, 1))
        blocks = [self._values(block, batch) for block in X.split(rows, -2)]
        return torch.cat(blocks, -1).mT

    def _values(self, X: Float[Tensor, "*b N D"], batch: torch.Size) -> Float[Tensor, "*c P N"]:
        q, flat = self.posterior, X.reshape(-1, X.shape[-1])
        k = cross_covariance(q.kernel, q.Z)(flat)[0].reshape(*X.shape[:-1], q.M)
        level = prior_mean(q.mean, flat).reshape(X.shape[:-1])
        update = torch.einsum("...snm,spm->...spn", k.expand(*batch, *k.shape[-2:]), self.weights)
        prior = self._prior(X.expand(*batch, *X.shape[-2:]))
        return prior + update + level.expand(*batch, X.shape[-2])[..., None, :]

    def _prior(self, X: Float[Tensor, "*c N D"]) -> Float[Tensor, "*c P N"]:
        """Return f̃ at rows that belong to one function each, `[..., S N D]`."""
        q = self.posterior
        values = X.new_zeros(*X.shape[:-2], q.P, X.shape[-2])
        for number in self._omegas:
            phase = torch.einsum("...snd,spfd->...spnf", X, self.get_buffer(f"omega_{number}"))
            for function, name in ((torch.cos, "cos"), (torch.sin, "sin")):
                amplitudes = self.get_buffer(f"{name}_{number}")
                values = values + torch.einsum("...spnf,spf->...spn", function(phase), amplitudes)
        for name in self._linear:
            values = values + torch.einsum("...snd,spd->...spn", X, self.get_buffer(name))
        return values

    @property
    def _width(self) -> int:
        return sum(self.get_buffer(f"cos_{number}").shape[-1] for number in self._omegas)


def kernel_terms(kernel: Kernel, D: int) -> list[StationaryTerm | LinearTerm]:
    """Return the terms of a kernel on D columns.

    Raises:
        InputError: the spectral density of a term is not known.
    """
    columns = kernel.active_dims
    assert columns is None or isinstance(columns, Tensor)
    if type(kernel) is kernels.AdditiveKernel and columns is None:
        return [term for k in kernel.kernels for term in kernel_terms(_kernel(k), D)]
    if type(kernel) is kernels.ProductKernel and columns is None:
        factors = [kernel_terms(_kernel(k), D) for k in kernel.kernels]
        return [_product(kernel, terms) for terms in product(*factors)]
    if type(kernel) is kernels.ScaleKernel:
        base = kernel.base_kernel
        composed = isinstance(base, kernels.AdditiveKernel | kernels.ProductKernel)
        if not composed or columns is None:
            scale = kernel.outputscale.detach().reshape(())
            return [_scaled(term, scale) for term in kernel_terms(base, D)]
    if type(kernel) is kernels.LinearKernel:
        return [LinearTerm(_on_columns(kernel.variance.detach(), columns, D))]
    draw = _frequencies(kernel, columns, D)
    if draw is None:
        raise InputError(
            "functions can be drawn for sums of linear, RBF, Matérn, rational quadratic, periodic "
            "and constant kernels and products of all but the first; the kernel has "
            f"{type(kernel).__name__}. Draw at given rows with `sample` or `sample_y`."
        )
    variance = next(kernel.parameters()).detach().new_ones(())
    if isinstance(kernel, kernels.ConstantKernel):
        variance = kernel.constant.detach().reshape(())
    return [StationaryTerm(variance, draw)]


def _kernel(module: nn.Module) -> Kernel:
    assert isinstance(module, Kernel)
    return module


def _scaled(term: StationaryTerm | LinearTerm, scale: Scalar) -> StationaryTerm | LinearTerm:
    if isinstance(term, LinearTerm):
        return LinearTerm(scale * term.variances)
    return StationaryTerm(scale * term.variance, term.frequencies)


def _product(kernel: Kernel, terms: tuple[StationaryTerm | LinearTerm, ...]) -> StationaryTerm:
    """Return the product of stationary terms: spectral densities are convolved."""
    stationary = [term for term in terms if isinstance(term, StationaryTerm)]
    if len(stationary) < len(terms):
        raise InputError(
            f"functions cannot be drawn for a product with a linear kernel, as in "
            f"{type(kernel).__name__}. Draw at given rows with `sample` or `sample_y`."
        )
    variance = torch.stack([term.variance for term in stationary]).prod()

    def summed(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.stack([term.frequencies(shape, generator) for term in stationary]).sum(0)

    return StationaryTerm(variance, summed)


def _frequencies(kernel: Kernel, columns: Tensor | None, D: int) -> Frequencies | None:
    """Return the spectral density of a stationary kernel; None if it is not known."""
    like = next(kernel.parameters()).detach()

    def on_all_columns(omega: Tensor) -> Tensor:
        if columns is None:
            return omega
        return omega.new_zeros(*omega.shape[:-1], D).index_copy(-1, columns, omega)

    if type(kernel) is kernels.ConstantKernel:
        return lambda shape, generator: like.new_zeros(*shape, D)
    if not kernel.has_lengthscale:
        return None
    d = D if columns is None else len(columns)
    lengthscale = kernel.lengthscale.detach().reshape(-1).expand(d)

    def normal(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return _normal((*shape, d), like, generator) / lengthscale

    if type(kernel) is kernels.RBFKernel:
        return lambda shape, generator: on_all_columns(normal(shape, generator))
    if type(kernel) is kernels.MaternKernel:
        degrees = round(2 * kernel.nu)

        def student(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            # Multivariate Student's t with 2ν degrees of freedom.
            chi = _normal((*shape, 1, degrees), like, generator).square().sum(-1)
            return on_all_columns(normal(shape, generator) * (degrees / chi).sqrt())

        return student
    if type(kernel) is kernels.RQKernel:
        alpha = kernel.alpha.detach().reshape(())

        def mixture(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            # RBF kernels whose squared inverse lengthscale has a gamma distribution of mean one.
            # `torch.distributions` takes no generator.
            gamma = torch._standard_gamma  # pyright: ignore[reportPrivateImportUsage]
            tau = gamma(alpha.expand(*shape, 1), generator=generator) / alpha
            return on_all_columns(normal(shape, generator) * tau.sqrt())

        return mixture
    if type(kernel) is kernels.PeriodicKernel:
        period = kernel.period_length.detach().reshape(-1).expand(d)

        def harmonics(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
            # exp(−(1 − cos φ)/ℓ) = Σ_k e^(−1/ℓ) I_k(1/ℓ) cos kφ: the weights are those of the
            # difference of two Poisson variables of mean 1/2ℓ.
            rate = (0.5 / lengthscale).expand(*shape, d)
            counts = torch.poisson(rate, generator) - torch.poisson(rate, generator)
            return on_all_columns(2 * pi * counts / period)

        return harmonics
    return None


def _on_columns(values: Tensor, columns: Tensor | None, D: int) -> Float[Tensor, " D"]:
    values = values.reshape(-1)
    if columns is None:
        return values.expand(D)
    return values.new_zeros(D).index_copy(0, columns, values.expand(len(columns)))


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
