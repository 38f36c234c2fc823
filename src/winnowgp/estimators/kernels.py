"""Kernels by name."""

from copy import deepcopy

from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel

from winnowgp.errors import InputError

KERNEL_NAMES = ("rbf", "matern12", "matern32", "matern52")


def kernel_from(kernel: str | Kernel, D: int) -> Kernel:
    """A fresh kernel: by name with one lengthscale a column, or a copy of the one given.

    All hyper-parameters of a named kernel start at 1, as in the paper.

    >>> kernel_from("matern52", 3).base_kernel.nu
    2.5
    """
    if isinstance(kernel, Kernel):
        return deepcopy(kernel)
    if not isinstance(kernel, str) or kernel not in KERNEL_NAMES:
        raise InputError(
            f"`kernel` must be one of {', '.join(KERNEL_NAMES)} or a GPyTorch kernel; "
            f"got {kernel!r}."
        )
    smoothness = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}
    base = (
        RBFKernel(ard_num_dims=D)
        if kernel == "rbf"
        else MaternKernel(nu=smoothness[kernel], ard_num_dims=D)
    )
    scaled = ScaleKernel(base)
    scaled.initialize(**{"outputscale": 1.0, "base_kernel.lengthscale": 1.0})
    return scaled
