"""Predictors as a short program of array operations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import pi, sqrt
from typing import Any

import numpy as np
import torch
from gpytorch import kernels, likelihoods, means
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from winnowgp.errors import NotSaveableError
from winnowgp.linalg import solve_lower
from winnowgp.models import Posterior
from winnowgp.models.likelihoods import DENSITY_NODES, SOFTMAX_DENSITY_NODES, is_plain
from winnowgp.models.quadrature import normal_nodes

# A straight list of array operations: what a predictor is once nothing more is to be learnt.
#
# One description, two ways out: `winnowgp.io.onnx` and `winnowgp.io.numpy_file`.


@dataclass(frozen=True, slots=True)
class Input:
    """What a caller gives: `[N width]` numbers, or `[N]` numbers or words if width is None."""

    name: str
    words: bool = False
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on values that exist already."""

    op: str
    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True)
class Program:
    """Inputs, constants, steps in order, and which values are the answer.

    >>> program = Program()
    >>> x = program.give("x", width=1)
    >>> program.answer("double", program.do("Mul", x, program.constant(2.0)), width=1)
    >>> [step.op for step in program.steps]
    ['Mul']
    """

    inputs: list[Input] = field(default_factory=list)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    outputs: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    """By name: a value, and its width, None for one number a row."""
    about: dict[str, str] = field(default_factory=dict)
    """Words for whoever opens the result."""

    def give(self, name: str, *, words: bool = False, width: int | None = None) -> str:
        """A new input; the name of its value."""
        self.inputs.append(Input(name, words, width))
        return f"input{len(self.inputs) - 1}"

    def constant(self, value: ArrayLike) -> str:
        """The name of a constant, in float64 unless it is an array of words, of dtype object."""
        array = np.asarray(value)
        array = array if array.dtype == object else array.astype(np.float64)
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def do(self, op: str, *inputs: str) -> str:
        """The name of what an operation gives; both ways out list the operations there are."""
        output = f"v{len(self.steps)}"
        self.steps.append(Step(op, inputs, output))
        return output

    def answer(self, name: str, value: str, *, width: int | None) -> None:
        """A value that callers get, `[N width]` or `[N]`."""
        self.outputs[name] = (value, width)


# From a posterior to the operations that predict with it.
#
# onnxruntime fuses a product of matrices with a lone number before or after it, in single precision
# even where all numbers are double. So such numbers are spread over a row or written as matrices.


def add_latents(program: Program, posterior: Posterior, X: str) -> tuple[str, str]:
    """Values of mean `[N P]` and variance `[N P or 1]` of the latent functions.

        mean = m(x) + k L⁻ᵀ m,   variance = κ − ‖k L⁻ᵀ‖² + ‖k L⁻ᵀ F‖²

    L⁻¹ is written out: its error is that of a solve, times ten at most.
    """
    k, prior = _kernel(program, posterior.kernel, X, posterior.Z)
    eye = torch.eye(posterior.M, dtype=posterior.L.dtype)
    inverse = solve_lower(posterior.L, eye)
    away = program.do("MatMul", k, _constant(program, posterior.weights))
    mean = program.do("Sub", away, _negative_mean(program, posterior.mean, X))
    V = program.do("MatMul", k, _constant(program, inverse.mT))
    explained = program.do("RowSum", program.do("Mul", V, V))
    open_variance = program.do("Sub", prior, explained)
    spreads = []
    for factor in posterior.q_factor:
        FV = program.do("MatMul", V, _constant(program, factor))
        spreads.append(program.do("RowSum", program.do("Mul", FV, FV)))
    spread = program.do("Concat", *spreads) if len(spreads) > 1 else spreads[0]
    variance = program.do("Max", program.do("Add", open_variance, spread), program.constant(0.0))
    return mean, variance


def add_observation(
    program: Program, likelihood: Any, mean: str, variance: str
) -> tuple[str, str | None]:
    """Mean and variance of a new observation; probabilities, and no variance, of classes."""
    if is_plain(likelihood, likelihoods.GaussianLikelihood):
        return mean, _plus(program, variance, likelihood.noise)
    if is_plain(likelihood, likelihoods.LaplaceLikelihood):
        return mean, _plus(program, variance, 2 * likelihood.noise)
    if is_plain(likelihood, likelihoods.StudentTLikelihood):
        nu = likelihood.deg_free
        return mean, _plus(program, variance, likelihood.noise * nu / (nu - 2))
    if is_plain(likelihood, likelihoods.BernoulliLikelihood):
        wide = program.do("Sqrt", _plus(program, variance, torch.ones(1)))
        second = program.do("Ndtr", program.do("Div", mean, wide))
        first = program.do("Sub", program.constant(1.0), second)
        return program.do("Concat", first, second), None
    if is_plain(likelihood, likelihoods.SoftmaxLikelihood):
        return _softmax(program, likelihood, mean, variance), None
    if is_plain(likelihood, likelihoods.PoissonLikelihood):
        return _poisson(program, mean, variance)
    raise _not_exportable(likelihood)


def _softmax(program: Program, likelihood: Any, mean: str, variance: str) -> str:
    """The mean of softmax over the same nodes that `predict` uses, `[N C]`."""
    nodes = normal_nodes(SOFTMAX_DENSITY_NODES, likelihood.num_features)
    spread = program.do("Sqrt", variance)
    # [N 1 F] and [T F] to [N T F]
    f = program.do(
        "Add",
        program.do("Unsqueeze1", mean),
        program.do("Mul", program.do("Unsqueeze1", spread), _constant(program, nodes)),
    )
    if likelihood.mixing_weights is not None:
        f = program.do("MatMul", f, _constant(program, likelihood.mixing_weights.mT))
    return program.do("Mean1", program.do("Softmax", f))


def _poisson(program: Program, mean: str, variance: str) -> tuple[str, str]:
    """Moments of counts of rate softplus(f), by Gauss and Hermite; one target."""
    locations, weights = np.polynomial.hermite.hermgauss(DENSITY_NODES)
    weights = (weights / weights.sum())[:, None]
    spread = program.do("Sqrt", program.do("Mul", variance, program.constant(2.0)))
    f = program.do("Add", mean, program.do("Mul", spread, program.constant(locations[None])))
    rate = program.do("Softplus", f)
    centre = program.do("MatMul", rate, program.constant(weights))
    away = program.do("Sub", rate, centre)
    square = program.do("Add", rate, program.do("Mul", away, away))
    return centre, program.do("MatMul", square, program.constant(weights))


def _plus(program: Program, value: str, amount: Tensor) -> str:
    return program.do("Sub", value, _constant(program, -amount.reshape(-1)))


def _negative_mean(program: Program, mean: Any, X: str) -> str:
    if isinstance(mean, means.ZeroMean):
        return program.constant(0.0)
    if isinstance(mean, means.ConstantMean):
        level: Any = mean.constant
        return _constant(program, -level.reshape(1))
    if isinstance(mean, means.LinearMean):
        weights: Any = mean.weights
        slope = program.do("MatMul", X, _constant(program, -weights.reshape(-1, 1)))
        return slope if mean.bias is None else _plus(program, slope, -mean.bias)
    raise _not_exportable(mean)


def _kernel(
    program: Program, kernel: Any, X: str, Z: Tensor, *, select: bool = True
) -> tuple[str, str]:
    """Values of k(X, Z) `[N M]` and of k(x, x), `[N 1]` or one number."""
    if select and kernel.active_dims is not None:
        pick = torch.eye(Z.shape[1], dtype=Z.dtype)[:, kernel.active_dims]
        X, Z = program.do("MatMul", X, _constant(program, pick)), Z[:, kernel.active_dims]
    if isinstance(kernel, kernels.ScaleKernel):
        k, prior = _kernel(program, kernel.base_kernel, X, Z, select=False)
        scale = kernel.outputscale.reshape(1, 1)
        wide = _constant(program, scale.expand(1, len(Z)))
        return program.do("Mul", k, wide), program.do("Mul", prior, _constant(program, scale))
    if isinstance(kernel, kernels.AdditiveKernel | kernels.ProductKernel):
        op = "Add" if isinstance(kernel, kernels.AdditiveKernel) else "Mul"
        (k, prior), *others = [_kernel(program, part, X, Z) for part in kernel.kernels]
        for other, its_prior in others:
            k, prior = program.do(op, k, other), program.do(op, prior, its_prior)
        return k, prior
    for kind, make in _KERNELS.items():
        if type(kernel) is kind:
            return make(program, kernel, X, Z)
    raise _not_exportable(kernel)


def _square_distance(program: Program, kernel: Any, X: str, Z: Tensor) -> str:
    """‖x − z‖² of scaled inputs, centred first so that nothing large cancels."""
    centre, scale = Z.mean(0), kernel.lengthscale.reshape(-1)
    shifted = program.do("Sub", X, _constant(program, centre))
    x = program.do("MatMul", shifted, _constant(program, _diagonal(1 / scale, Z)))
    z = (Z - centre) / scale
    norms = program.do(
        "Add",
        program.do("RowSum", program.do("Mul", x, x)),
        _constant(program, z.square().sum(1)[None]),
    )
    cross = program.do("MatMul", x, _constant(program, 2 * z.mT))
    return program.do("Max", program.do("Sub", norms, cross), program.constant(0.0))


def _diagonal(scale: Tensor, Z: Tensor) -> Tensor:
    """Scales as a matrix."""
    return torch.diag(scale.detach().expand(Z.shape[1]))


def _rbf(program: Program, kernel: Any, X: str, Z: Tensor) -> tuple[str, str]:
    square = _square_distance(program, kernel, X, Z)
    half = program.do("Mul", square, program.constant(-0.5))
    return program.do("Exp", half), program.constant(1.0)


def _matern(program: Program, kernel: Any, X: str, Z: Tensor) -> tuple[str, str]:
    """(1 + a + a²/3) e⁻ᵃ with a = √(2ν) ‖x − z‖, and fewer terms for smaller ν."""
    distance = program.do("Sqrt", _square_distance(program, kernel, X, Z))
    a = program.do("Mul", distance, program.constant(sqrt(2 * kernel.nu)))
    falling = program.do("Exp", program.do("Mul", a, program.constant(-1.0)))
    one = program.constant(1.0)
    if kernel.nu == 0.5:
        return falling, one
    factor = program.do("Add", a, one)
    if kernel.nu == 2.5:
        third = program.do("Mul", program.do("Mul", a, a), program.constant(1 / 3))
        factor = program.do("Add", factor, third)
    return program.do("Mul", factor, falling), one


def _rq(program: Program, kernel: Any, X: str, Z: Tensor) -> tuple[str, str]:
    alpha = kernel.alpha.reshape(-1)
    square = _square_distance(program, kernel, X, Z)
    base = _plus(program, program.do("Div", square, _constant(program, 2 * alpha)), torch.ones(1))
    return program.do("Pow", base, _constant(program, -alpha)), program.constant(1.0)


def _periodic(program: Program, kernel: Any, X: str, Z: Tensor) -> tuple[str, str]:
    """exp(−2 Σ_d sin²(π (x_d − z_d) / p_d) / ℓ_d), one input at a time."""
    D = Z.shape[1]
    period = kernel.period_length.reshape(-1).expand(D)
    length = kernel.lengthscale.reshape(-1).expand(D)
    total = None
    for d in range(D):
        pick = torch.eye(D, dtype=Z.dtype)[:, d : d + 1] * (pi / period[d])
        angle = program.do(
            "Sub",
            program.do("MatMul", X, _constant(program, pick)),
            _constant(program, (Z[:, d] * (pi / period[d]))[None]),
        )
        sine = program.do("Sin", angle)
        term = program.do("Mul", program.do("Mul", sine, sine), _constant(program, -2 / length[d]))
        total = term if total is None else program.do("Add", total, term)
    assert total is not None
    return program.do("Exp", total), program.constant(1.0)


def _linear(program: Program, kernel: Any, X: str, Z: Tensor) -> tuple[str, str]:
    scale = kernel.variance.sqrt().reshape(1, -1).expand(1, Z.shape[1])
    x = program.do("MatMul", X, _constant(program, _diagonal(scale.reshape(-1), Z)))
    k = program.do("MatMul", x, _constant(program, (Z * scale).mT))
    return k, program.do("RowSum", program.do("Mul", x, x))


def _flat(program: Program, kernel: Any, X: str, Z: Tensor) -> tuple[str, str]:
    constant = kernel.constant.reshape(1, 1)
    # Of the right shape, whatever the rows.
    zero = program.do("MatMul", X, _constant(program, torch.zeros_like(Z).mT))
    return _plus(program, zero, constant), _constant(program, constant)


_KERNELS: dict[type, Callable[[Program, Any, str, Tensor], tuple[str, str]]] = {
    kernels.RBFKernel: _rbf,
    kernels.MaternKernel: _matern,
    kernels.RQKernel: _rq,
    kernels.PeriodicKernel: _periodic,
    kernels.LinearKernel: _linear,
    kernels.ConstantKernel: _flat,
}


def _constant(program: Program, value: Tensor) -> str:
    return program.constant(value.detach().cpu().double().numpy())


def _not_exportable(part: Any) -> NotSaveableError:
    return NotSaveableError(
        f"{type(part).__name__} cannot be exported; save the model with `save` and load it where "
        "winnowgp is installed."
    )
