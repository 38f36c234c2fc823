"""From a GPyTorch kernel to one that can be averaged over Gaussian inputs, where that is closed."""

from gpytorch.kernels import Kernel, LinearKernel, RBFKernel, ScaleKernel

from winnowgp.bounds import ExpectedKernel, LinearPsi, RBFPsi
from winnowgp.errors import InputError


def expected_kernel(kernel: Kernel, Q: int) -> ExpectedKernel:
    """The kernel at its present parameters, differentiable in them.

    Raises:
        InputError: its averages have no closed form here.
    """
    if not has_psi(kernel):
        raise InputError(
            "`kernel` must be an RBFKernel or LinearKernel on all dimensions, scaled or not, for "
            f"expected statistics; got {type(kernel).__name__}. Use `SampledLatentGP` for others."
        )
    if isinstance(kernel, ScaleKernel):
        base, scale = kernel.base_kernel, kernel.outputscale.reshape(())
    else:
        base, scale = kernel, next(kernel.parameters()).new_ones(())
    if isinstance(base, RBFKernel):
        return RBFPsi(scale, base.lengthscale.reshape(-1).expand(Q))
    assert isinstance(base, LinearKernel)
    return LinearPsi(scale * base.variance.reshape(-1).expand(Q))


def has_psi(kernel: Kernel) -> bool:
    """Whether the kernel's averages over Gaussian inputs are known in closed form."""
    base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
    whole = kernel.active_dims is None and base.active_dims is None
    return whole and type(base) in (RBFKernel, LinearKernel)
