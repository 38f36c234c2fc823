"""Predictors as programs: lists of array operations without loops or branches.

A program is exported to ONNX and to a NumPy file by `winnowgp.io.onnx_numpy`. onnxruntime fuses a
matrix product with a scalar factor before or after it, and computes the result in single precision
even if all numbers are double. Such scalars are therefore written as rows or matrices; a row of one
number is a scalar too.
"""

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
from winnowgp.models import MultiOutputPosterior, Posterior, TargetLikelihoods
from winnowgp.models.likelihoods import SOFTMAX_DENSITY_NODES, is_plain
from winnowgp.models.observations import DENSITY_NODES
from winnowgp.models.quadrature import normal_nodes


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a program: numbers `[N width]`, or if width is None numbers or strings `[N]`."""

    name: str
    categorical: bool = False
    width: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """An operation on values that earlier steps, inputs or constants define."""

    op: str
    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True)
class Program:
    """Inputs, constants, operations in order, and which values are the outputs.

    >>> program = Program()
    >>> x = program.add_input("x", width=1)
    >>> double = program.apply("Mul", x, program.constant(2.0))
    >>> program.add_output("double", double, width=1)
    >>> [step.op for step in program.steps]
    ['Mul']
    """

    inputs: list[Input] = field(default_factory=list)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    outputs: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    """Name of the value and width of each output; the width is None for one number per row."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Facts for the users of the exported file, such as the names of classes."""

    def add_input(self, name: str, *, categorical: bool = False, width: int | None = None) -> str:
        """Add an input and return the name of its value."""
        self.inputs.append(Input(name, categorical, width))
        return f"input{len(self.inputs) - 1}"

    def constant(self, value: ArrayLike) -> str:
        """Add a constant and return its name; arrays of objects hold strings, others float64."""
        array = np.asarray(value)
        array = array if array.dtype == object else array.astype(np.float64)
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def apply(self, op: str, *inputs: str) -> str:
        """Add an operation of `winnowgp.io.onnx_numpy` and return the name of its result."""
        output = f"v{len(self.steps)}"
        self.steps.append(Step(op, inputs, output))
        return output

    def scaled(self, value: str, factors: NDArray[np.float64]) -> str:
        """Multiply the columns of a value by factors `[W]`, one factor as a matrix."""
        if len(factors) == 1:
            return self.apply("MatMul", value, self.constant(factors[:, None]))
        return self.apply("Mul", value, self.constant(factors[None]))

    def add_output(self, name: str, value: str, *, width: int | None) -> None:
        """Declare a value to be an output, `[N width]` or `[N]`."""
        self.outputs[name] = (value, width)


def add_latents(program: Program, posterior: Posterior, X: str) -> tuple[str, str]:
    """Add the mean `[N P]` and variance `[N P or 1]` of the latent functions; return their names.

        mean = m(x) + k L⁻ᵀ m,   variance = κ − ‖k L⁻ᵀ‖² + ‖k L⁻ᵀ F‖²

    L⁻¹ is a constant; its rounding error is at most ten times that of a triangular solve.
    """
    k, prior = _kernel(program, posterior.kernel, X, posterior.Z)
    eye = torch.eye(posterior.M, dtype=posterior.L.dtype)
    inverse = solve_lower(posterior.L, eye)
    residual = program.apply("MatMul", k, _constant(program, posterior.weights))
    mean = program.apply("Sub", residual, _negative_mean(program, posterior.mean, X))
    V = program.apply("MatMul", k, _constant(program, inverse.mT))
    explained = program.apply("RowSum", program.apply("Mul", V, V))
    conditional = program.apply("Sub", prior, explained)
    spreads = []
    for factor in posterior.q_factor:
        FV = program.apply("MatMul", V, _constant(program, factor))
        spreads.append(program.apply("RowSum", program.apply("Mul", FV, FV)))
    spread = program.apply("Concat", *spreads) if len(spreads) > 1 else spreads[0]
    variance = program.apply(
        "Max", program.apply("Add", conditional, spread), program.constant(0.0)
    )
    return mean, variance


def add_processes(program: Program, posterior: MultiOutputPosterior, X: str) -> tuple[str, str]:
    """Add the mean and variance `[N P]` of mixtures of several processes; return their names.

    With V_q = k_q L_q⁻ᵀ and E_q = V_q F_q, F_q the rows of F that belong to process q,

        mean_p = c_p + Σ_q W_pq V_q m_q
        variance_p = Σ_q W_pq² (κ_q − ‖V_q‖²) + Σ_qs W_pq W_ps ⟨E_q, E_s⟩.
    """
    W, sizes = posterior.mixing, list(posterior.sizes)
    means, factors = posterior.q_mean.split(sizes), posterior.q_factor.split(sizes)
    # [N 1] zeros: the number of rows is not known here.
    zero = program.apply("MatMul", X, _constant(program, torch.zeros(posterior.Z.shape[1], 1)))
    mean = program.apply("Add", zero, _constant(program, posterior.offset[None]))
    features, weights = [], []
    spreads: dict[int, str] = {}
    for q, (kernel, Z, L) in enumerate(
        zip(posterior.kernels, posterior.inducing_points, posterior.factors, strict=True)
    ):
        k, prior = _kernel(program, kernel, X, Z if len(Z) else torch.zeros(1, Z.shape[1]).to(Z))
        if not len(Z):
            features.append(program.apply("Add", zero, prior))
            weights.append(W[:, q].square())
            continue
        V = program.apply(
            "MatMul", k, _constant(program, solve_lower(L, torch.eye(len(L)).to(L)).mT)
        )
        mean = program.apply(
            "Add",
            mean,
            program.apply("MatMul", V, _constant(program, torch.outer(means[q], W[:, q]))),
        )
        explained = program.apply("RowSum", program.apply("Mul", V, V))
        left = program.apply("Sub", program.apply("Add", zero, prior), explained)
        features.append(program.apply("Max", left, program.constant(0.0)))
        weights.append(W[:, q].square())
        spreads[q] = program.apply("MatMul", V, _constant(program, factors[q]))
        for s in spreads:
            features.append(program.apply("RowSum", program.apply("Mul", spreads[q], spreads[s])))
            weights.append((1 if s == q else 2) * W[:, q] * W[:, s])
    total = program.apply(
        "MatMul", program.apply("Concat", *features), _constant(program, torch.stack(weights))
    )
    return mean, program.apply("Max", total, program.constant(0.0))


def add_targets(
    program: Program, likelihood: TargetLikelihoods, mean: str, variance: str
) -> tuple[str, str]:
    """Add means and variances of observations, each target with a likelihood of its own."""
    columns = []
    for p, part in enumerate(likelihood.parts):
        pick = program.constant(np.eye(len(likelihood.parts))[:, p : p + 1])
        own = program.apply("MatMul", mean, pick), program.apply("MatMul", variance, pick)
        m, v = add_observation(program, part, *own)
        if v is None:
            # Probabilities of two classes: p and p (1 − p) of the second.
            m = program.apply("MatMul", m, program.constant([[0.0], [1.0]]))
            v = program.apply("Sub", m, program.apply("Mul", m, m))
        columns.append((m, v))
    if len(columns) == 1:
        return columns[0]
    means, variances = zip(*columns, strict=True)
    return program.apply("Concat", *means), program.apply("Concat", *variances)


def add_observation(
    program: Program, likelihood: Any, mean: str, variance: str
) -> tuple[str, str | None]:
    """Add mean and variance of a new observation, or probabilities of classes and None."""
    if is_plain(likelihood, likelihoods.GaussianLikelihood):
        return mean, _plus(program, variance, likelihood.noise)
    if is_plain(likelihood, likelihoods.LaplaceLikelihood):
        return mean, _plus(program, variance, 2 * likelihood.noise)
    if is_plain(likelihood, likelihoods.StudentTLikelihood):
        nu = likelihood.deg_free
        return mean, _plus(program, variance, likelihood.noise * nu / (nu - 2))
    if is_plain(likelihood, likelihoods.BernoulliLikelihood):
        scale = program.apply("Sqrt", _plus(program, variance, torch.ones(1)))
        second = program.apply("Ndtr", program.apply("Div", mean, scale))
        first = program.apply("Sub", program.constant(1.0), second)
        return program.apply("Concat", first, second), None
    if is_plain(likelihood, likelihoods.SoftmaxLikelihood):
        return _softmax(program, likelihood, mean, variance), None
    if is_plain(likelihood, likelihoods.PoissonLikelihood):
        return _poisson(program, mean, variance)
    raise _not_exportable(likelihood)


def _softmax(program: Program, likelihood: Any, mean: str, variance: str) -> str:
    """Add the mean of softmax over the quadrature nodes of `predict`, `[N C]`."""
    nodes = normal_nodes(SOFTMAX_DENSITY_NODES, likelihood.num_features)
    spread = program.apply("Sqrt", variance)
    # [N 1 F] and [T F] give [N T F].
    f = program.apply(
        "Add",
        program.apply("Unsqueeze1", mean),
        program.apply("Mul", program.apply("Unsqueeze1", spread), _constant(program, nodes)),
    )
    if likelihood.mixing_weights is not None:
        f = program.apply("MatMul", f, _constant(program, likelihood.mixing_weights.mT))
    return program.apply("Mean1", program.apply("Softmax", f))


def _poisson(program: Program, mean: str, variance: str) -> tuple[str, str]:
    """Add the moments of counts with rate softplus(f) of one target, by Gauss–Hermite."""
    locations, weights = np.polynomial.hermite.hermgauss(DENSITY_NODES)
    weights = (weights / weights.sum())[:, None]
    spread = program.apply("Sqrt", program.apply("Mul", variance, program.constant(2.0)))
    f = program.apply("Add", mean, program.apply("Mul", spread, program.constant(locations[None])))
    rate = program.apply("Softplus", f)
    centre = program.apply("MatMul", rate, program.constant(weights))
    deviation = program.apply("Sub", rate, centre)
    square = program.apply("Add", rate, program.apply("Mul", deviation, deviation))
    return centre, program.apply("MatMul", square, program.constant(weights))


def _plus(program: Program, value: str, amount: Tensor) -> str:
    return program.apply("Sub", value, _constant(program, -amount.reshape(-1)))


def _negative_mean(program: Program, mean: Any, X: str) -> str:
    if isinstance(mean, means.ZeroMean):
        return program.constant(0.0)
    if isinstance(mean, means.ConstantMean):
        level: Any = mean.constant
        return _constant(program, -level.reshape(1))
    if isinstance(mean, means.LinearMean):
        weights: Any = mean.weights
        slope = program.apply("MatMul", X, _constant(program, -weights.reshape(-1, 1)))
        return slope if mean.bias is None else _plus(program, slope, -mean.bias)
    raise _not_exportable(mean)


def _kernel(
    program: Program, kernel: Any, X: str, Z: Tensor, *, select: bool = True
) -> tuple[str, str]:
    """Add k(X, Z) `[N M]` and k(x, x), `[N 1]` or one number; return their names."""
    if select and kernel.active_dims is not None:
        pick = torch.eye(Z.shape[1], dtype=Z.dtype)[:, kernel.active_dims]
        X, Z = program.apply("MatMul", X, _constant(program, pick)), Z[:, kernel.active_dims]
    if isinstance(kernel, kernels.ScaleKernel):
        k, prior = _kernel(program, kernel.base_kernel, X, Z, select=False)
        scale = kernel.outputscale.reshape(1, 1)
        factors = np.full(len(Z), float(scale))
        return program.scaled(k, factors), program.apply("Mul", prior, _constant(program, scale))
    if isinstance(kernel, kernels.AdditiveKernel | kernels.ProductKernel):
        op = "Add" if isinstance(kernel, kernels.AdditiveKernel) else "Mul"
        (k, prior), *others = [_kernel(program, inner, X, Z) for inner in kernel.kernels]
        for other, other_prior in others:
            k, prior = program.apply(op, k, other), program.apply(op, prior, other_prior)
        return k, prior
    if type(kernel) not in _KERNELS:
        raise _not_exportable(kernel)
    return _KERNELS[type(kernel)](program, kernel, X, Z)


def _square_distance(program: Program, kernel: Any, X: str, Z: Tensor) -> str:
    """Add ‖x − z‖² of scaled inputs, centred first to avoid cancellation."""
    centre, scale = Z.mean(0), kernel.lengthscale.reshape(-1)
    shifted = program.apply("Sub", X, _constant(program, centre))
    x = program.apply("MatMul", shifted, _constant(program, _diagonal(1 / scale, Z)))
    z = (Z - centre) / scale
    norms = program.apply(
        "Add",
        program.apply("RowSum", program.apply("Mul", x, x)),
        _constant(program, z.square().sum(1)[None]),
    )
    cross = program.apply("MatMul", x, _constant(program, 2 * z.mT))
    return program.apply("Max", program.apply("Sub", norms, cross), program.constant(0.0))


def _diagonal(scale: Tensor, Z: Tensor) -> Tensor:
    """Return one scale, or one per dimension, as a diagonal matrix."""
    return torch.diag(scale.detach().expand(Z.shape[1]))


def _rbf(program: Program, kernel: Any, X: str, Z: Tensor) -> tuple[str, str]:
    square = _square_distance(program, kernel, X, Z)
    half = program.apply("Mul", square, program.constant(-0.5))
    return program.apply("Exp", half), program.constant(1.0)


def _matern(program: Program, kernel: Any, X: str, Z: Tensor) -> tuple[str, str]:
    """Add (1 + a + a²/3) e⁻ᵃ with a = √(2ν) ‖x − z‖ for ν = 5/2, and fewer terms for smaller ν."""
    distance = program.apply("Sqrt", _square_distance(program, kernel, X, Z))
    a = program.apply("Mul", distance, program.constant(sqrt(2 * kernel.nu)))
    decay = program.apply("Exp", program.apply("Mul", a, program.constant(-1.0)))
    one = program.constant(1.0)
    if kernel.nu == 0.5:
        return decay, one
    factor = program.apply("Add", a, one)
    if kernel.nu == 2.5:
        third = program.apply("Mul", program.apply("Mul", a, a), program.constant(1 / 3))
        factor = program.apply("Add", factor, third)
    return program.apply("Mul", factor, decay), one


def _rq(program: Program, kernel: Any, X: str, Z: Tensor) -> tuple[str, str]:
    alpha = kernel.alpha.reshape(-1)
    square = _square_distance(program, kernel, X, Z)
    base = _plus(
        program, program.apply("Div", square, _constant(program, 2 * alpha)), torch.ones(1)
    )
    return program.apply("Pow", base, _constant(program, -alpha)), program.constant(1.0)


def _periodic(program: Program, kernel: Any, X: str, Z: Tensor) -> tuple[str, str]:
    """Add exp(−2 Σ_d sin²(π (x_d − z_d) / p_d) / ℓ_d), one dimension at a time."""
    D = Z.shape[1]
    period = kernel.period_length.reshape(-1).expand(D)
    length = kernel.lengthscale.reshape(-1).expand(D)
    total = None
    for d in range(D):
        pick = torch.eye(D, dtype=Z.dtype)[:, d : d + 1] * (pi / period[d])
        angle = program.apply(
            "Sub",
            program.apply("MatMul", X, _constant(program, pick)),
            _constant(program, (Z[:, d] * (pi / period[d]))[None]),
        )
        sine = program.apply("Sin", angle)
        term = program.apply(
            "Mul", program.apply("Mul", sine, sine), _constant(program, -2 / length[d])
        )
        total = term if total is None else program.apply("Add", total, term)
    assert total is not None
    return program.apply("Exp", total), program.constant(1.0)


def _linear(program: Program, kernel: Any, X: str, Z: Tensor) -> tuple[str, str]:
    scale = kernel.variance.sqrt().reshape(1, -1).expand(1, Z.shape[1])
    x = program.apply("MatMul", X, _constant(program, _diagonal(scale.reshape(-1), Z)))
    k = program.apply("MatMul", x, _constant(program, (Z * scale).mT))
    return k, program.apply("RowSum", program.apply("Mul", x, x))


def _constant_kernel(program: Program, kernel: Any, X: str, Z: Tensor) -> tuple[str, str]:
    constant = kernel.constant.reshape(1, 1)
    # Zeros [N M]: the number of rows is not known here.
    zero = program.apply("MatMul", X, _constant(program, torch.zeros_like(Z).mT))
    return _plus(program, zero, constant), _constant(program, constant)


_KERNELS: dict[type, Callable[[Program, Any, str, Tensor], tuple[str, str]]] = {
    kernels.RBFKernel: _rbf,
    kernels.MaternKernel: _matern,
    kernels.RQKernel: _rq,
    kernels.PeriodicKernel: _periodic,
    kernels.LinearKernel: _linear,
    kernels.ConstantKernel: _constant_kernel,
}


def _constant(program: Program, value: Tensor) -> str:
    return program.constant(value.detach().cpu().double().numpy())


def _not_exportable(component: Any) -> NotSaveableError:
    return NotSaveableError(
        f"{type(component).__name__} cannot be exported; save the model with `save` and load it "
        "where winnowgp is installed."
    )
