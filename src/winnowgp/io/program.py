"""Predictors as programs: lists of array operations without loops or branches.

A program is exported to ONNX and to a NumPy file by `winnowgp.io.onnx_numpy`. onnxruntime fuses a
matrix product with a scalar factor before or after it, and computes the result in single precision
even if all numbers are double. Such scalars are therefore written as rows or matrices; a row of one
number is a scalar too.

`add_kernel` adds the covariances of rows with inducing points.
"""

from dataclasses import dataclass, field
from math import pi, sqrt
from typing import Any

import numpy as np
import torch
from gpytorch import kernels
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from winnowgp.errors import NotSaveableError
from winnowgp.models import BoxKernel


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a program: numbers `[N width]`, or if width is None a column `[N]`.

    Args:
        kind: "number"; "category", which is strings; or "date", which is days since 1970.
    """

    name: str
    kind: str = "number"
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
    metadata: dict[str, str | list[Any]] = field(default_factory=dict)
    """Facts for the users of the exported file, such as the names of classes."""
    rows: int = 4096
    """Rows that the NumPy file predicts at once, to limit memory."""

    def add_input(self, name: str, *, kind: str = "number", width: int | None = None) -> str:
        """Add an input and return the name of its value."""
        self.inputs.append(Input(name, kind, width))
        return f"input{len(self.inputs) - 1}"

    def constant(self, value: ArrayLike) -> str:
        """Add a constant and return its name; arrays of objects hold strings, others float64."""
        array = np.asarray(value)
        array = array if array.dtype == object else array.astype(np.float64)
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def tensor(self, value: Tensor) -> str:
        """Add the numbers of a tensor as a constant and return its name."""
        return self.constant(value.detach().cpu().double().numpy())

    def plus(self, value: str, amount: Tensor) -> str:
        """Add an amount `[W]` to the columns of a value."""
        return self.apply("Sub", value, self.tensor(-amount.reshape(-1)))

    def reshape(self, value: str, width: int) -> str:
        """Return the numbers of a value in rows of so many columns."""
        return self.apply("Reshape", value, self.constant(float(width)))

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


def not_exportable(component: Any) -> NotSaveableError:
    """Return the error for a component that has no program."""
    return NotSaveableError(
        f"{type(component).__name__} cannot be exported; save the model with `save` and load it "
        "where winnowgp is installed."
    )


def add_kernel(
    program: Program, kernel: Any, X: str, Z: Tensor, *, select: bool = True
) -> tuple[str, str]:
    """Add k(X, Z) `[N M]` and k(x, x), `[N 1]` or one number; return their names.

    Args:
        select: whether the columns of the kernel are still to be selected.
    """
    if select and kernel.active_dims is not None:
        X, Z = _selected(program, kernel, X, Z.shape[1]), Z[:, kernel.active_dims]
    if isinstance(kernel, kernels.ScaleKernel):
        k, prior = add_kernel(program, kernel.base_kernel, X, Z, select=False)
        scale = kernel.outputscale.reshape(1, 1)
        factors = np.full(len(Z), float(scale))
        return program.scaled(k, factors), program.apply("Mul", prior, program.tensor(scale))
    if isinstance(kernel, kernels.AdditiveKernel | kernels.ProductKernel):
        op = "Add" if isinstance(kernel, kernels.AdditiveKernel) else "Mul"
        (k, prior), *others = [add_kernel(program, inner, X, Z) for inner in kernel.kernels]
        for other, other_prior in others:
            k, prior = program.apply(op, k, other), program.apply(op, prior, other_prior)
        return k, prior
    if isinstance(kernel, BoxKernel):
        return _boxes(program, kernel, X, Z)
    if type(kernel) in _OF_DISTANCE:
        square = _square_distance(program, kernel, X, Z)
        return _OF_DISTANCE[type(kernel)](program, kernel, square), program.constant(1.0)
    if type(kernel) is kernels.PeriodicKernel:
        return _periodic(program, kernel, X, Z), program.constant(1.0)
    if type(kernel) is kernels.LinearKernel:
        scale = _scales(kernel.variance.sqrt(), Z.shape[1])
        x = program.apply("MatMul", X, program.tensor(torch.diag(scale)))
        k = program.apply("MatMul", x, program.tensor((Z * scale).mT))
        return k, program.apply("RowSum", program.apply("Mul", x, x))
    if type(kernel) is kernels.ConstantKernel:
        constant = kernel.constant.reshape(1, 1)
        # Zeros [N M]: the number of rows is not known here.
        zero = program.apply("MatMul", X, program.tensor(torch.zeros_like(Z).mT))
        return program.plus(zero, constant), program.tensor(constant)
    raise not_exportable(kernel)


def _pairs(program: Program, kernel: Any, A: str, B: str, D: int, *, select: bool = True) -> str:
    """Add k(a, b) of each row of A and the same row of B, `[R 1]`.

    Args:
        D: number of columns.
    """
    if select and kernel.active_dims is not None:
        A, B = _selected(program, kernel, A, D), _selected(program, kernel, B, D)
        D = len(kernel.active_dims)
    if isinstance(kernel, kernels.ScaleKernel):
        k = _pairs(program, kernel.base_kernel, A, B, D, select=False)
        return program.scaled(k, np.full(1, float(kernel.outputscale)))
    if isinstance(kernel, kernels.AdditiveKernel | kernels.ProductKernel):
        op = "Add" if isinstance(kernel, kernels.AdditiveKernel) else "Mul"
        k, *others = [_pairs(program, inner, A, B, D) for inner in kernel.kernels]
        for other in others:
            k = program.apply(op, k, other)
        return k
    if type(kernel) is kernels.LinearKernel:
        scale = torch.diag(_scales(kernel.variance, D))
        scaled = program.apply("MatMul", A, program.tensor(scale))
        return program.apply("RowSum", program.apply("Mul", scaled, B))
    if type(kernel) is kernels.ConstantKernel:
        zero = program.apply("MatMul", A, program.tensor(torch.zeros(D, 1)))
        return program.plus(zero, kernel.constant)
    difference = program.apply("Sub", A, B)
    if type(kernel) is kernels.PeriodicKernel:
        return _periodic(program, kernel, difference, torch.zeros(1, D).double())
    if type(kernel) not in _OF_DISTANCE:
        raise not_exportable(kernel)
    scale = torch.diag(1 / _scales(kernel.lengthscale, D))
    scaled = program.apply("MatMul", difference, program.tensor(scale))
    square = program.apply("RowSum", program.apply("Mul", scaled, scaled))
    return _OF_DISTANCE[type(kernel)](program, kernel, square)


def _boxes(program: Program, kernel: BoxKernel, X: str, Z: Tensor) -> tuple[str, str]:
    """Add the covariances of averages over boxes, by the quadrature of `BoxKernel`."""
    D = Z.shape[1]
    columns = [d for d in range(D) if d not in kernel.widths]
    nodes, weights = kernel.box_nodes(Z)
    M, G, d = nodes.shape
    eye = torch.eye(D, dtype=Z.dtype)
    centres, widths = (
        program.apply("Unsqueeze1", program.apply("MatMul", X, program.tensor(eye[:, each])))
        for each in (columns, kernel.widths)
    )
    # Nodes of the unit box: those of a box with centre zero.
    unit = torch.zeros(1, D, dtype=Z.dtype)
    unit[:, kernel.widths] = 1.0
    grid = kernel.box_nodes(unit)[0][0]

    def at(offsets: Tensor) -> str:
        """Add the locations of offsets `[T d]` in the boxes of all rows, `[N T, d]`."""
        moved = program.apply("Mul", widths, program.tensor(offsets[None]))
        return program.reshape(program.apply("Add", centres, moved), d)

    # [N G, M G] to [N G, M], and then [N, G M] to [N, M].
    k, _ = add_kernel(program, kernel.base_kernel, at(grid), nodes.reshape(M * G, d))
    own = torch.kron(torch.eye(M, dtype=Z.dtype), weights[:, None])
    k = program.reshape(program.apply("MatMul", k, program.tensor(own)), G * M)
    rows = torch.kron(weights[:, None], torch.eye(M, dtype=Z.dtype))
    k = program.apply("MatMul", k, program.tensor(rows))
    first, second = grid.repeat_interleave(G, 0), grid.repeat(G, 1)
    pairs = _pairs(program, kernel.base_kernel, at(first), at(second), d)
    both = torch.outer(weights, weights).reshape(-1, 1)
    prior = program.apply("MatMul", program.reshape(pairs, G * G), program.tensor(both))
    return k, prior


def _selected(program: Program, kernel: Any, X: str, D: int) -> str:
    """Add the columns of the kernel."""
    pick = torch.eye(D, dtype=torch.float64)[:, kernel.active_dims]
    return program.apply("MatMul", X, program.tensor(pick))


def _scales(scale: Tensor, D: int) -> Tensor:
    """Return one scale, or one per column, as D numbers."""
    return scale.detach().reshape(-1).expand(D)


def _square_distance(program: Program, kernel: Any, X: str, Z: Tensor) -> str:
    """Add ‖x − z‖² of scaled inputs, centred first to avoid cancellation."""
    centre, scale = Z.mean(0), _scales(kernel.lengthscale, Z.shape[1])
    shifted = program.apply("Sub", X, program.tensor(centre))
    x = program.apply("MatMul", shifted, program.tensor(torch.diag(1 / scale)))
    z = (Z - centre) / scale
    norms = program.apply(
        "Add",
        program.apply("RowSum", program.apply("Mul", x, x)),
        program.tensor(z.square().sum(1)[None]),
    )
    cross = program.apply("MatMul", x, program.tensor(2 * z.mT))
    return program.apply("Max", program.apply("Sub", norms, cross), program.constant(0.0))


def _rbf(program: Program, kernel: Any, square: str) -> str:
    half = program.apply("Mul", square, program.constant(-0.5))
    return program.apply("Exp", half)


def _matern(program: Program, kernel: Any, square: str) -> str:
    """Add (1 + a + a²/3) e⁻ᵃ with a = √(2ν) ‖x − z‖ for ν = 5/2, and fewer terms for smaller ν."""
    distance = program.apply("Sqrt", square)
    a = program.apply("Mul", distance, program.constant(sqrt(2 * kernel.nu)))
    decay = program.apply("Exp", program.apply("Mul", a, program.constant(-1.0)))
    if kernel.nu == 0.5:
        return decay
    factor = program.apply("Add", a, program.constant(1.0))
    if kernel.nu == 2.5:
        third = program.apply("Mul", program.apply("Mul", a, a), program.constant(1 / 3))
        factor = program.apply("Add", factor, third)
    return program.apply("Mul", factor, decay)


def _rq(program: Program, kernel: Any, square: str) -> str:
    alpha = kernel.alpha.reshape(-1)
    base = program.plus(program.apply("Div", square, program.tensor(2 * alpha)), torch.ones(1))
    return program.apply("Pow", base, program.tensor(-alpha))


_OF_DISTANCE = {kernels.RBFKernel: _rbf, kernels.MaternKernel: _matern, kernels.RQKernel: _rq}
"""Kernels of a scaled distance, as functions of its square."""


def _periodic(program: Program, kernel: Any, X: str, Z: Tensor) -> str:
    """Add exp(−2 Σ_d sin²(π (x_d − z_d) / p_d) / ℓ_d), one dimension at a time."""
    D = Z.shape[1]
    period, length = _scales(kernel.period_length, D), _scales(kernel.lengthscale, D)
    total = None
    for d in range(D):
        pick = torch.eye(D, dtype=Z.dtype)[:, d : d + 1] * (pi / period[d])
        angle = program.apply(
            "Sub",
            program.apply("MatMul", X, program.tensor(pick)),
            program.tensor((Z[:, d] * (pi / period[d]))[None]),
        )
        sine = program.apply("Sin", angle)
        term = program.apply(
            "Mul", program.apply("Mul", sine, sine), program.tensor(-2 / length[d])
        )
        total = term if total is None else program.apply("Add", total, term)
    assert total is not None
    return program.apply("Exp", total)
