"""From what users say about a kernel to GPyTorch's."""

from collections.abc import Mapping, Sequence
from copy import deepcopy

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
from winnowgp.estimators.kernel_words import (
    KERNEL_NAMES,
    Composed,
    KernelWords,
    NamedKernel,
    kernel_words,
)

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
