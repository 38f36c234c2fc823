"""A straight list of array operations: what a predictor is once nothing more is to be learnt.

One description, two ways out: `winnowgp.io.onnx` and `winnowgp.io.numpy_file`.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


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
