"""Kernels given as strings."""

import ast
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, final

import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError

# Kernels in words: sums and products of named kernels, each on all columns or on some.
#
#     "rbf + periodic"      "rbf[0, 1] * matern52[2:5] + linear"      "periodic['month'](period=12)"
#
# Python's own grammar, read and never run. `+` and `*` are those of kernels; square brackets name
# the
# columns, by number, range or, with data frames, name; every kernel has one lengthscale a column,
# and
# every term of a sum a variance of its own.


KERNEL_NAMES = ("rbf", "matern12", "matern32", "matern52", "rq", "periodic", "linear", "constant")


@final
@dataclass(frozen=True, slots=True)
class NamedKernel:
    """One kernel on some columns."""

    name: str
    columns: tuple[int, ...] | None
    """In ascending order; None for all."""
    period: float | None
    """In units of the columns; only of a periodic kernel."""


@final
@dataclass(frozen=True, slots=True)
class Composed:
    """A sum or a product of at least two parts."""

    sum: bool
    parts: "tuple[KernelWords, ...]"


KernelWords: TypeAlias = NamedKernel | Composed


def kernel_words(
    text: str, D: int, *, columns: Mapping[str, Sequence[int]] | None = None
) -> KernelWords:
    """What a text says about a kernel of D columns.

    Args:
        columns: which columns a name stands for.

    >>> kernel_words("rbf[1:] + linear", 3)
    Composed(sum=True, parts=(NamedKernel(name='rbf', columns=(1, 2), period=None), \
NamedKernel(name='linear', columns=None, period=None)))

    Raises:
        InputError: it says nothing about a kernel; the message says where.
    """
    return _Reader(text, D, {} if columns is None else columns).read()


def written(words: KernelWords) -> str:
    """The same in a text, with numbers for columns; `kernel_words` reads it again.

    >>> columns = {"size": [0], "colour": [1, 2]}
    >>> written(kernel_words("rbf[size] * (rq + linear[colour])", 3, columns=columns))
    'rbf[0] * (rq + linear[1, 2])'
    """
    if isinstance(words, NamedKernel):
        chosen = "" if words.columns is None else f"[{', '.join(map(str, words.columns))}]"
        return words.name + chosen + ("" if words.period is None else f"(period={words.period!r})")
    parts = [
        f"({written(part)})" if isinstance(part, Composed) and part.sum else written(part)
        for part in words.parts
    ]
    return (" + " if words.sum else " * ").join(parts)


@final
class _Reader:
    """One text being read."""

    def __init__(self, text: str, D: int, columns: Mapping[str, Sequence[int]]) -> None:
        self._text, self._D, self._columns = text, D, columns

    def read(self) -> KernelWords:
        try:
            tree = ast.parse(self._text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            place = self._broken(error) if isinstance(error, SyntaxError) else ""
            raise InputError(
                f"`kernel` must read like 'rbf + periodic' or 'rbf[0, 1] * linear'; {self._text!r} "
                f"cannot be read{place}."
            ) from error
        return self._kernel(tree)

    def _kernel(self, node: ast.expr) -> KernelWords:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            both = self._kernel(node.left), self._kernel(node.right)
            total = isinstance(node.op, ast.Add)
            parts: list[KernelWords] = []
            for part in both:
                same = isinstance(part, Composed) and part.sum == total
                parts.extend(part.parts if isinstance(part, Composed) and same else [part])
            return Composed(total, tuple(parts))
        if isinstance(node, ast.BinOp):
            self._refuse(node, "only + and * combine kernels")
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            self._refuse(
                node, "a number is no kernel; every term of a sum learns a variance of its own"
            )
        return self._named(node)

    def _named(self, node: ast.expr) -> NamedKernel:
        """A name, with columns in brackets and settings in parentheses, in either order."""
        columns, period, inner = None, None, node
        while isinstance(inner, ast.Subscript | ast.Call):
            if isinstance(inner, ast.Subscript):
                if columns is not None:
                    self._refuse(inner, "say the columns once")
                columns, inner = self._chosen(inner.slice), inner.value
            else:
                if period is not None:
                    self._refuse(inner, "say the settings once")
                period, inner = self._period(inner), inner.func
        if not isinstance(inner, ast.Name) or inner.id not in KERNEL_NAMES:
            self._refuse(inner, f"the kernels are {', '.join(KERNEL_NAMES)}")
        if period is not None and inner.id != "periodic":
            self._refuse(node, f"only a periodic kernel has a period, not {inner.id}")
        if columns == tuple(range(self._D)):
            columns = None
        return NamedKernel(inner.id, columns, period)

    def _period(self, call: ast.Call) -> float:
        word = call.keywords[0] if len(call.keywords) == 1 and not call.args else None
        value = word.value if word is not None and word.arg == "period" else None
        number = value.value if isinstance(value, ast.Constant) else None
        if (
            not isinstance(number, int | float)
            or isinstance(number, bool)
            # Whole numbers may be too large for a float.
            or not 0 < number < 1e300
        ):
            self._refuse(
                call,
                "parentheses hold a period, as in periodic(period=12); columns are in brackets, as "
                "in rbf[0, 1]",
            )
        return float(number)

    def _chosen(self, node: ast.expr) -> tuple[int, ...]:
        """Columns by number, range or name."""
        found: set[int] = set()
        for item in node.elts if isinstance(node, ast.Tuple) else [node]:
            if isinstance(item, ast.Slice):
                ends = [self._number(end) for end in (item.lower, item.upper, item.step)]
                if ends[2] == 0:
                    self._refuse(item, "a range cannot have a step of 0")
                found.update(range(self._D)[slice(*ends)])
            elif isinstance(item, ast.Name) or isinstance(getattr(item, "value", None), str):
                found.update(self._by_name(item))
            else:
                number = self._number(item)
                assert number is not None
                if not -self._D <= number < self._D:
                    self._refuse(item, f"there are {self._D} columns, 0 to {self._D - 1}")
                found.add(number % self._D)
        if not found:
            self._refuse(node, f"this chooses none of the {self._D} columns")
        return tuple(sorted(found))

    def _by_name(self, item: ast.expr) -> Sequence[int]:
        name = item.id if isinstance(item, ast.Name) else str(getattr(item, "value", ""))
        if not self._columns:
            self._refuse(item, "columns have names only where a data frame was given; say numbers")
        if name not in self._columns:
            known = ", ".join(map(repr, list(self._columns)[:12]))
            self._refuse(item, f"no column has this name; the first are {known}")
        return self._columns[name]

    def _number(self, node: ast.expr | None) -> int | None:
        if node is None:
            return None
        minus = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        inner = node.operand if isinstance(node, ast.UnaryOp) and minus else node
        value = inner.value if isinstance(inner, ast.Constant) else None
        if not isinstance(value, int) or isinstance(value, bool):
            self._refuse(node, "columns are whole numbers, ranges such as 2:5, or names")
        return -value if minus else value

    def _refuse(self, node: ast.AST, why: str) -> NoReturn:
        raise InputError(
            f"`kernel` cannot have {ast.unparse(node)!r} at {self._place_of(node)}: {why}."
        )

    def _place_of(self, node: ast.AST) -> str:
        line, column = getattr(node, "lineno", 1) - 1, getattr(node, "col_offset", 0)
        # Python counts bytes here.
        own = self._text.strip().split("\n")[line].encode()[:column].decode()
        return self._shown(line, len(own))

    def _broken(self, error: SyntaxError) -> str:
        """Where Python stopped, if it knows; it says 0 where the text ended too early."""
        if error.lineno is None or error.offset is None:
            return ""
        if min(error.lineno, error.offset) < 1:
            return f" at the end of {self._text.strip()!r}"
        return f" at {self._shown(error.lineno - 1, error.offset - 1)}"

    def _shown(self, line: int, column: int) -> str:
        """The place in the whole text, by number and by what stands there."""
        text = self._text.strip()
        before = sum(len(each) + 1 for each in text.split("\n")[:line])
        place = before + column + 1
        return f"character {place} of {text!r}" if place <= len(text) else f"the end of {text!r}"


# From what users say about a kernel to GPyTorch's.


_SMOOTHNESS = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}


def kernel_from(
    kernel: str | Kernel,
    D: int,
    *,
    columns: Mapping[str, Sequence[int]] | None = None,
    scale: Float[Tensor, " D"] | None = None,
) -> Kernel:
    """A fresh kernel: in words with one lengthscale a column, or a copy of the one given.

    All hyper-parameters of a kernel in words start at 1, as in the paper, but for periods that are
    said.

    Args:
        columns: which columns a name stands for.
        scale: what a column was divided by, for periods.

    >>> kernel_from("matern52", 3).base_kernel.nu
    2.5
    >>> [type(part).__name__ for part in kernel_from("rbf[0] * periodic[1] + linear", 3).kernels]
    ['ScaleKernel', 'LinearKernel']
    """
    if isinstance(kernel, Kernel):
        return deepcopy(kernel)
    if not isinstance(kernel, str):
        raise InputError(
            f"`kernel` must be one of {', '.join(KERNEL_NAMES)}, a sum or product of them such as "
            f"'rbf + periodic', or a GPyTorch kernel; got {kernel!r}."
        )
    return _term(kernel_words(kernel, D, columns=columns), D, scale)


def _term(words: KernelWords, D: int, scale: Tensor | None) -> Kernel:
    """With a variance."""
    made = _built(words, D, scale)
    if _has_variance(words):
        return made
    scaled = ScaleKernel(made)
    scaled.outputscale = 1.0
    return scaled


def _has_variance(words: KernelWords) -> bool:
    """Linear and constant kernels are variances, and the terms of a sum have theirs."""
    if isinstance(words, NamedKernel):
        return words.name in ("linear", "constant")
    return words.sum or any(_has_variance(part) for part in words.parts)


def _built(words: KernelWords, D: int, scale: Tensor | None) -> Kernel:
    if isinstance(words, Composed):
        if words.sum:
            return AdditiveKernel(*[_term(part, D, scale) for part in words.parts])
        return ProductKernel(*[_built(part, D, scale) for part in words.parts])
    count = D if words.columns is None else len(words.columns)
    made = _named(words, count)
    if made.has_lengthscale:
        made.initialize(lengthscale=1.0)
    if isinstance(made, PeriodicKernel):
        made.period_length = torch.ones(count).double()
        if words.period is not None:
            made.period_length = words.period / _scale(words, scale)
    if isinstance(made, LinearKernel):
        made.variance = torch.ones(1, count)
    if isinstance(made, RQKernel):
        made.alpha = 1.0
    if isinstance(made, ConstantKernel):
        made.constant = torch.ones(1)
    return made


def _named(words: NamedKernel, count: int) -> Kernel:
    dims = words.columns
    if words.name == "rbf":
        return RBFKernel(ard_num_dims=count, active_dims=dims)
    if words.name == "rq":
        return RQKernel(ard_num_dims=count, active_dims=dims)
    if words.name == "periodic":
        return PeriodicKernel(ard_num_dims=count, active_dims=dims)
    if words.name == "linear":
        return LinearKernel(ard_num_dims=count, active_dims=dims)
    if words.name == "constant":
        return ConstantKernel(active_dims=dims)
    return MaternKernel(nu=_SMOOTHNESS[words.name], ard_num_dims=count, active_dims=dims)


def _scale(words: NamedKernel, scale: Tensor | None) -> Tensor:
    if scale is None:
        raise InputError(
            "a period is in units of the columns of `X`, which layers and maps do not see; leave "
            "it out, or give a GPyTorch kernel."
        )
    return scale if words.columns is None else scale[list(words.columns)]
