"""Kernels given as strings: sums and products of named kernels, each on all columns or on some.

    "rbf + periodic"      "rbf[0, 1] * matern52[2:5] + linear"      "periodic['month'](period=12)"

A kernel expression is read with Python's grammar and never run. `+` and `*` add and multiply
kernels. Square brackets give the columns by number, by range or, with data frames, by name. Every
kernel has one lengthscale per column, and every term of a sum has a variance of its own.
"""

import ast
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from keyword import iskeyword
from typing import NoReturn, TypeAlias, final

import torch
from gpytorch import kernels
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError

AUTO = "auto"
"""The kernel parameter that compares kernels by their evidence."""

AUTO_KERNELS = ("matern52", "rbf", "matern32")
"""Kernels that `kernel="auto"` compares; the starts of the first are searched most widely."""

KERNEL_NAMES = ("rbf", "matern12", "matern32", "matern52", "rq", "periodic", "linear", "constant")


# Ratios of lengthscales and variances, and of periods, of equal terms at the start. With a third,
# "rbf + rbf" met the optimum of equal lengthscales on one of three series; with a tenth on none.
_APART, _APART_PERIODS = 0.1, 1 / 3

# Kernels that only make sense in other kinds of models, and what to do instead.
_OTHER_MODELS: dict[tuple[type, ...], str] = {
    (kernels.MultitaskKernel, kernels.LCMKernel): (
        "it is for correlated outputs. Target columns `y` [N P] share one kernel here: pass the "
        "kernel of one output, such as its `data_covar_module`"
    ),
    (kernels.IndexKernel,): (
        "it needs a column of integers, and inputs are standardised. Encode the index as one "
        "indicator column per value, and use a product such as 'rbf[0] * rbf[1:]'"
    ),
    (
        kernels.RBFKernelGrad,
        kernels.RBFKernelGradGrad,
        kernels.Matern52KernelGrad,
        kernels.PolynomialKernelGrad,
    ): (
        "it is for observed gradients, which cannot be given. Use the kernel of the function "
        "itself, such as 'rbf'"
    ),
    (kernels.GridInterpolationKernel, kernels.GridKernel, kernels.InducingPointKernel): (
        "it is an approximation of its own. Pass its base kernel: inducing points are selected here"
    ),
}


_SMOOTHNESS = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}


@final
@dataclass(frozen=True, slots=True)
class NamedKernel:
    """One named kernel on some columns."""

    name: str
    columns: tuple[int, ...] | None
    """Column numbers in ascending order; None for all columns."""
    period: float | None
    """Period in the units of the columns; only for a periodic kernel."""

    def text(self, columns: Mapping[str, Sequence[int]]) -> str:
        """Write the kernel as an expression, with the names of columns where they are known.

        Args:
            columns: column numbers by column name, as for `parse_kernel`.
        """
        brackets = ""
        if self.columns is not None:
            named = {n: c for n, c in columns.items() if c and set(c) <= set(self.columns)}
            numbers = set(self.columns).difference(*named.values())
            brackets = f"[{', '.join([*map(column_text, named), *map(str, sorted(numbers))])}]"
        period = repr(self.period).removesuffix(".0")
        return self.name + brackets + ("" if self.period is None else f"(period={period})")

    def __str__(self) -> str:
        return self.text({})


@final
@dataclass(frozen=True, slots=True)
class ComposedKernel:
    """A sum or a product of at least two kernel expressions."""

    is_sum: bool
    operands: "tuple[KernelExpression, ...]"

    def text(self, columns: Mapping[str, Sequence[int]]) -> str:
        """Write the kernel as an expression; see `NamedKernel.text`."""
        operands = [
            f"({operand.text(columns)})"
            if isinstance(operand, ComposedKernel) and operand.is_sum
            else operand.text(columns)
            for operand in self.operands
        ]
        return (" + " if self.is_sum else " * ").join(operands)

    def __str__(self) -> str:
        return self.text({})


KernelExpression: TypeAlias = NamedKernel | ComposedKernel
"""A parsed kernel string; `str` writes it out again, with numbers for columns."""


def parse_kernel(
    text: str,
    D: int,
    *,
    columns: Mapping[str, Sequence[int]] | None = None,
    name: str = "kernel",
) -> KernelExpression:
    """Parse a kernel string for D input columns.

    Args:
        columns: column numbers by column name.
        name: the argument that the string was passed as, for error messages.

    >>> parse_kernel("rbf[1:] + linear", 3)
    ComposedKernel(is_sum=True, operands=(NamedKernel(name='rbf', columns=(1, 2), period=None), \
NamedKernel(name='linear', columns=None, period=None)))
    >>> columns = {"size": [0], "colour": [1, 2]}
    >>> str(parse_kernel("rbf[size] * (rq + linear[colour])", 3, columns=columns))
    'rbf[0] * (rq + linear[1, 2])'

    Raises:
        InputError: the text is not a kernel expression; the message gives the position.
    """
    return _Parser(text, D, {} if columns is None else columns, name).parse()


def column_text(name: str) -> str:
    """Return the name of a column as kernel expressions write it.

    >>> column_text("hour"), column_text("wind [m/s]")
    ('hour', "'wind [m/s]'")
    """
    return name if name.isidentifier() and not iskeyword(name) else repr(name)


def kernel_from(
    kernel: str | kernels.Kernel | KernelExpression,
    D: int,
    *,
    scale: Float[Tensor, " D"] | None = None,
    name: str = "kernel",
) -> kernels.Kernel:
    """Return a new GPyTorch kernel for D input columns.

    A kernel given as a string has one lengthscale per column, and all its hyper-parameters start
    at 1, as in the paper, except for periods that are given. A GPyTorch kernel is copied. Equal
    terms of a sum or product start with different hyper-parameters: their gradients would always be
    the same, and they would stay equal.

    Args:
        kernel: a kernel string or its parsed expression, or a GPyTorch kernel.
        scale: the scale by which each column was divided, for periods.
        name: the argument that the kernel was passed as, for error messages.

    >>> kernel_from("matern52", 3).base_kernel.nu
    2.5
    >>> [type(term).__name__ for term in kernel_from("rbf[0] * periodic[1] + linear", 3).kernels]
    ['ScaleKernel', 'LinearKernel']

    Raises:
        InputError: the string is not a kernel expression, or the GPyTorch kernel is for another
            kind of model.
    """
    if isinstance(kernel, kernels.Kernel):
        _refuse_other_models(kernel, name)
        copied = deepcopy(kernel)
        for component in copied.modules():
            if isinstance(component, kernels.AdditiveKernel | kernels.ProductKernel):
                _set_apart([k for k in component.kernels if isinstance(k, kernels.Kernel)])
        return copied
    if isinstance(kernel, str):
        kernel = parse_kernel(kernel, D, name=name)
    if not isinstance(kernel, KernelExpression):
        names = (AUTO, *KERNEL_NAMES) if name == "kernel" else KERNEL_NAMES
        raise InputError(
            f"`{name}` must be one of {', '.join(names)}, a sum or product such as "
            f"'rbf + periodic', or a GPyTorch kernel; got {kernel!r}."
        )
    return _scaled(kernel, D, scale)


def _refuse_other_models(kernel: kernels.Kernel, name: str) -> None:
    """Refuse kernels of other kinds of models by name."""
    for component in kernel.modules():
        for kinds, advice in _OTHER_MODELS.items():
            if isinstance(component, kinds):
                raise InputError(f"`{name}` cannot contain {type(component).__name__}: {advice}.")


def _set_apart(components: Sequence[kernels.Kernel], *, periods: bool = True) -> None:
    """Change the hyper-parameters of components that equal another one, in place.

    Lengthscales and variances of the second are a tenth of those of the first, and so on; periods a
    third.

    Args:
        periods: whether to change periods, rather than the lengthscales of periodic kernels.
    """
    states = [
        {k: v.tolist() for k, v in component.state_dict().items()} for component in components
    ]
    kinds = [repr(component) for component in components]
    for number, component in enumerate(components):
        equal = [
            other
            for other in range(number)
            if kinds[other] == kinds[number] and states[other] == states[number]
        ]
        factor = _APART ** len(equal)
        for part in component.modules() if equal else ():
            if isinstance(part, kernels.ScaleKernel):
                part.outputscale = factor * part.outputscale.detach()
            if isinstance(part, kernels.PeriodicKernel) and periods:
                shorter = _APART_PERIODS ** len(equal)
                part.period_length = shorter * part.period_length.detach()
            elif isinstance(part, kernels.Kernel) and part.has_lengthscale:
                part.lengthscale = factor * part.lengthscale.detach()


def kernel_name(parameter: str | kernels.Kernel | KernelExpression, fitted: kernels.Kernel) -> str:
    """Return the name of the kernel of a fitted model.

    It is the kernel string as given, or the class of a GPyTorch kernel. For "auto" it is the kernel
    that was chosen.

    >>> kernel_name("auto", kernel_from("matern32 + linear", 2))
    'matern32 + linear'
    >>> kernel_name("rbf[0]", kernel_from("rbf[0]", 2))
    'rbf[0]'
    """
    if isinstance(parameter, kernels.Kernel):
        return type(parameter).__name__
    if parameter != AUTO:
        return str(parameter)
    terms = list(fitted.kernels) if isinstance(fitted, kernels.AdditiveKernel) else [fitted]
    return " + ".join(_term_name(term) for term in terms)


def _term_name(kernel: torch.nn.Module) -> str:
    """Return the name of a kernel that has one; otherwise its class."""
    inner = kernel.base_kernel if isinstance(kernel, kernels.ScaleKernel) else kernel
    if isinstance(inner, kernels.MaternKernel):
        return next(name for name, nu in _SMOOTHNESS.items() if nu == inner.nu)
    names = {kernels.RBFKernel: "rbf", kernels.LinearKernel: "linear"}
    return names.get(type(inner), type(inner).__name__)


@final
class _Parser:
    """Parses one kernel string."""

    def __init__(self, text: str, D: int, columns: Mapping[str, Sequence[int]], name: str) -> None:
        self._text, self._D, self._columns, self._name = text, D, columns, name

    def parse(self) -> KernelExpression:
        try:
            tree = ast.parse(self._text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            position = self._syntax_position(error) if isinstance(error, SyntaxError) else ""
            raise InputError(
                f"`{self._name}` must be an expression such as 'rbf + periodic' or "
                f"'rbf[0, 1] * linear'; {self._text!r} cannot be parsed{position}."
            ) from error
        return self._expression(tree)

    def _expression(self, node: ast.expr) -> KernelExpression:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            is_sum = isinstance(node.op, ast.Add)
            operands: list[KernelExpression] = []
            for operand in (self._expression(node.left), self._expression(node.right)):
                if isinstance(operand, ComposedKernel) and operand.is_sum == is_sum:
                    operands.extend(operand.operands)
                else:
                    operands.append(operand)
            return ComposedKernel(is_sum, tuple(operands))
        if isinstance(node, ast.BinOp):
            self._refuse(node, "only + and * combine kernels")
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            self._refuse(
                node, "a number is not a kernel; every term of a sum learns a variance of its own"
            )
        return self._named(node)

    def _named(self, node: ast.expr) -> NamedKernel:
        """Parse a name with columns in brackets and settings in parentheses, in either order."""
        columns, period, inner = None, None, node
        while isinstance(inner, ast.Subscript | ast.Call):
            if isinstance(inner, ast.Subscript):
                if columns is not None:
                    self._refuse(inner, "give the columns only once")
                columns, inner = self._column_numbers(inner.slice), inner.value
            else:
                if period is not None:
                    self._refuse(inner, "give the settings only once")
                period, inner = self._period(inner), inner.func
        if not isinstance(inner, ast.Name) or inner.id not in KERNEL_NAMES:
            self._refuse(inner, f"the kernels are {', '.join(KERNEL_NAMES)}")
        if period is not None and inner.id != "periodic":
            self._refuse(node, f"only a periodic kernel has a period, not {inner.id}")
        if columns == tuple(range(self._D)):
            columns = None
        return NamedKernel(inner.id, columns, period)

    def _period(self, call: ast.Call) -> float:
        setting = call.keywords[0] if len(call.keywords) == 1 and not call.args else None
        value = setting.value if setting is not None and setting.arg == "period" else None
        number = value.value if isinstance(value, ast.Constant) else None
        if (
            not isinstance(number, int | float)
            or isinstance(number, bool)
            # An integer may be too large for a float.
            or not 0 < number < 1e300
        ):
            self._refuse(
                call,
                "parentheses take a period, as in periodic(period=12); columns are in brackets, as "
                "in rbf[0, 1]",
            )
        return float(number)

    def _column_numbers(self, node: ast.expr) -> tuple[int, ...]:
        """Parse columns given by number, range or name."""
        numbers: set[int] = set()
        for item in node.elts if isinstance(node, ast.Tuple) else [node]:
            if isinstance(item, ast.Slice):
                bounds = [self._number(bound) for bound in (item.lower, item.upper, item.step)]
                if bounds[2] == 0:
                    self._refuse(item, "a range cannot have a step of 0")
                numbers.update(range(self._D)[slice(*bounds)])
            elif isinstance(item, ast.Name) or isinstance(getattr(item, "value", None), str):
                numbers.update(self._columns_by_name(item))
            else:
                number = self._number(item)
                assert number is not None
                if not -self._D <= number < self._D:
                    self._refuse(item, f"there are {self._D} columns, 0 to {self._D - 1}")
                numbers.add(number % self._D)
        if not numbers:
            self._refuse(node, f"this selects none of the {self._D} columns")
        return tuple(sorted(numbers))

    def _columns_by_name(self, item: ast.expr) -> Sequence[int]:
        name = item.id if isinstance(item, ast.Name) else str(getattr(item, "value", ""))
        if not self._columns:
            self._refuse(item, "columns have names only if `X` is a data frame; use numbers")
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
            self._refuse(node, "columns are integers, ranges such as 2:5, or names")
        return -value if minus else value

    def _refuse(self, node: ast.AST, reason: str) -> NoReturn:
        raise InputError(
            f"`{self._name}` cannot contain {ast.unparse(node)!r} at {self._node_position(node)}: "
            f"{reason}."
        )

    def _node_position(self, node: ast.AST) -> str:
        line, column = getattr(node, "lineno", 1) - 1, getattr(node, "col_offset", 0)
        # Python counts UTF-8 bytes here; the message counts characters.
        before = self._text.strip().split("\n")[line].encode()[:column].decode()
        return self._position(line, len(before))

    def _syntax_position(self, error: SyntaxError) -> str:
        """Describe where Python's parser stopped; it reports 0 if the text ended too early."""
        if error.lineno is None or error.offset is None:
            return ""
        if min(error.lineno, error.offset) < 1:
            return f" at the end of {self._text.strip()!r}"
        return f" at {self._position(error.lineno - 1, error.offset - 1)}"

    def _position(self, line: int, column: int) -> str:
        text = self._text.strip()
        position = sum(len(each) + 1 for each in text.split("\n")[:line]) + column + 1
        if position > len(text):
            return f"the end of {text!r}"
        return f"character {position} of {text!r}"


def _scaled(expression: KernelExpression, D: int, scale: Tensor | None) -> kernels.Kernel:
    """Build a kernel with a variance."""
    kernel = _built(expression, D, scale)
    if _has_variance(expression):
        return kernel
    scaled = kernels.ScaleKernel(kernel)
    scaled.outputscale = 1.0
    return scaled


def _has_variance(expression: KernelExpression) -> bool:
    """Linear and constant kernels are variances, and the terms of a sum have their own."""
    if isinstance(expression, NamedKernel):
        return expression.name in ("linear", "constant")
    return expression.is_sum or any(map(_has_variance, expression.operands))


def _built(expression: KernelExpression, D: int, scale: Tensor | None) -> kernels.Kernel:
    if isinstance(expression, ComposedKernel):
        build = _scaled if expression.is_sum else _built
        components = [build(operand, D, scale) for operand in expression.operands]
        _set_apart(components, periods="period=" not in str(expression))
        composed = kernels.AdditiveKernel if expression.is_sum else kernels.ProductKernel
        return composed(*components)
    count = D if expression.columns is None else len(expression.columns)
    kernel = _named_kernel(expression, count)
    if kernel.has_lengthscale:
        kernel.initialize(lengthscale=1.0)
    if isinstance(kernel, kernels.PeriodicKernel):
        kernel.period_length = torch.ones(count).double()
        if expression.period is not None:
            kernel.period_length = expression.period / _column_scale(expression, scale)
    if isinstance(kernel, kernels.LinearKernel):
        kernel.variance = torch.ones(1, count)
    if isinstance(kernel, kernels.RQKernel):
        kernel.alpha = 1.0
    if isinstance(kernel, kernels.ConstantKernel):
        kernel.constant = torch.ones(1)
    return kernel


def _named_kernel(expression: NamedKernel, count: int) -> kernels.Kernel:
    name, columns = expression.name, expression.columns
    if name == "constant":
        return kernels.ConstantKernel(active_dims=columns)
    if name in _SMOOTHNESS:
        return kernels.MaternKernel(nu=_SMOOTHNESS[name], ard_num_dims=count, active_dims=columns)
    kinds = {
        "rbf": kernels.RBFKernel,
        "rq": kernels.RQKernel,
        "periodic": kernels.PeriodicKernel,
        "linear": kernels.LinearKernel,
    }
    return kinds[name](ard_num_dims=count, active_dims=columns)


def _column_scale(expression: NamedKernel, scale: Tensor | None) -> Tensor:
    if scale is None:
        raise InputError(
            "a period is in the units of the columns of `X`, which hidden layers and latent "
            "dimensions do not have; leave it out of `kernel`, or pass a GPyTorch kernel."
        )
    return scale if expression.columns is None else scale[list(expression.columns)]
