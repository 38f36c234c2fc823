"""Predictors as programs: lists of array operations without loops or branches.

A program is exported to ONNX and to a NumPy file by `winnowgp.io.onnx_numpy`. onnxruntime fuses a
matrix product with a scalar factor before or after it, and computes the result in single precision
even if all numbers are double. Such scalars are therefore written as rows or matrices; a row of one
number is a scalar too.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from winnowgp.errors import NotSaveableError


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
