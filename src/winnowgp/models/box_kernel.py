"""Averages of a function over boxes: a kernel of the averages, from any kernel of the function.

An observation may be the average of f over a box with centre c and edges w rather than its value at
a point. Averages of a Gaussian process are jointly Gaussian with its values, with the covariance

    k̄((c, w), (c', w')) = 1/(|w| |w'|) ∫∫ k(x, x') dx dx',

computed by Gauss-Legendre quadrature with G nodes for each column. A box without extent is a point.
For an RBF kernel of lengthscale ℓ and a box of width w the error of an average is at most

    (w/ℓ)^(2G) (G!)³ / ((2G + 1) 2^G ((2G)!)²)

of the variance: 4e-7 for w = 2ℓ and five nodes. Matérn kernels are not as smooth where boxes
overlap; with five nodes and w = 2ℓ the largest error, that of a box and the point in its centre, is
0.03 of the variance for ν = 1/2, 0.002 for ν = 3/2 and 3e-4 for ν = 5/2. Boxes much wider than a
lengthscale need more nodes.
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.models.kernels import copy_module, covariance


@final
class BoxKernel(Kernel):
    """The covariance of averages over boxes; some columns are the widths of the boxes.

    A matrix costs G^(2d) times that of the kernel of the function, for d columns with widths.

    Args:
        base_kernel: kernel of the function, of the columns that are not widths; copied.
        widths: columns that hold widths, one for each other column, in their order.
        nodes: quadrature nodes G for each column.

    >>> from gpytorch.kernels import RBFKernel
    >>> kernel = BoxKernel(RBFKernel(), widths=[1])
    >>> point, box = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    >>> [round(kernel(a, b).to_dense().item(), 3) for a, b in ((point, point), (box, box))]
    [1.0, 0.857]
    """

    def __init__(self, base_kernel: Kernel, *, widths: Sequence[int], nodes: int = 5) -> None:
        super().__init__()
        if nodes < 1 or not widths or min(widths) < 0 or len(set(widths)) < len(widths):
            raise InputError(
                "`nodes` must be at least 1, and `widths` distinct column numbers, 0 or larger; "
                f"got {nodes} and {widths}."
            )
        self.base_kernel, self.widths, self.nodes = copy_module(base_kernel), list(widths), nodes

    def forward(
        self,
        x1: Float[Tensor, "*S R D"],
        x2: Float[Tensor, "*S C D"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Tensor:
        """Return the covariances of averages; only the diagonal on request."""
        del last_dim_is_batch, params
        (a, weights), (b, _) = self.box_nodes(x1), self.box_nodes(x2)
        if diag:
            pairs = covariance(self.base_kernel, a, b)
            return torch.einsum("g,...gh,h->...", weights, pairs, weights)
        G = len(weights)
        K = covariance(self.base_kernel, a.flatten(-3, -2), b.flatten(-3, -2))
        K = K.reshape(*K.shape[:-2], x1.shape[-2], G, x2.shape[-2], G)
        return torch.einsum("g,...rgch,h->...rc", weights, K, weights)

    def box_nodes(self, X: Float[Tensor, "*S N D"]) -> tuple[Tensor, Float[Tensor, " G"]]:
        """Return the nodes of each box `[*S N G d]`, and their weights, which sum to one."""
        D = X.shape[-1]
        columns = [d for d in range(D) if d not in self.widths]
        if len(columns) != len(self.widths) or max(self.widths) >= D:
            raise RuntimeError(
                f"{D} columns cannot be {len(self.widths)} widths and as many centres. Pass one "
                "width for each other column."
            )
        at, weight = np.polynomial.legendre.leggauss(self.nodes)
        one = torch.as_tensor(0.5 * at).to(X), torch.as_tensor(0.5 * weight).to(X)
        d = len(columns)
        grid = torch.cartesian_prod(*[one[0]] * d).reshape(-1, d)
        weights = torch.cartesian_prod(*[one[1]] * d).reshape(-1, d).prod(1)
        centres, widths = X[..., columns], X[..., self.widths]
        return centres[..., None, :] + widths[..., None, :] * grid, weights
