"""An inducing-point allocator for BoTorch models that also selects their number."""

from dataclasses import dataclass
from itertools import product
from math import inf
from typing import final

import torch
from botorch.models.utils.inducing_point_allocators import (
    InducingPointAllocator,
    QualityFunction,
    UnitQualityFunction,
)
from gpytorch.kernels import Kernel
from gpytorch.module import Module
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.bounds.collapsed import prior_moments
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import SparseGP, greedy_variance
from winnowgp.models.greedy import chunked_greedy_variance
from winnowgp.models.kernels import prior_variance
from winnowgp.models.observations import LEAST_NOISE
from winnowgp.selection import Frontier, elimination_frontier
from winnowgp.selection.objective import subset_statistics

# Default noise variance, relative to the mean prior variance.
NOISE = 0.01


@final
class WinnowingAllocator(InducingPointAllocator):
    """Select up to `num_inducing` rows as inducing points, fewer if they suffice.

    Candidates are rows of largest conditional variance. Backward elimination on the collapsed bound
    finds the best set of each size among them, and the smallest one within `tolerance` nats per
    observation of all candidates is selected. BoTorch does not pass targets to an allocator: the
    bound is that of the targets that the constructor received, or else the expected bound of
    targets from the prior, which depends on the kernel and the inputs only.

    O(N K²) time and O(K (K + 4096)) memory for N rows and K candidates; BoTorch's own allocators
    evaluate an N×N kernel.

    >>> from botorch.models import SingleTaskVariationalGP
    >>> X = torch.linspace(0, 1, 200, dtype=torch.float64)[:, None]
    >>> model = SingleTaskVariationalGP(
    ...     X, inducing_points=50, learn_inducing_points=False,
    ...     inducing_point_allocator=WinnowingAllocator(),
    ... )
    >>> len(model.model.variational_strategy.inducing_points) < 10
    True

    Args:
        targets: `[n]` or `[n m]`, after the batch shape of the inputs if they have one, and after
            outcome transforms; their mean is subtracted.
        noise: noise variance after outcome transforms; a hundredth of the mean prior variance by
            default.
        tolerance: ELBO gap in nats per observation; 0 selects `num_inducing` points unless fewer
            reach the best bound.
        n_candidates: number of candidates; at least `num_inducing`.
        exactly: whether to return exactly `num_inducing` points: the selected ones, then those of
            largest conditional variance. `init_inducing_points` of an existing model cannot change
            their number, and needs this; a new model does not.
    """

    def __init__(
        self,
        *,
        targets: Tensor | None = None,
        noise: float | None = None,
        tolerance: float = 0.01,
        n_candidates: int = 256,
        exactly: bool = False,
    ) -> None:
        if noise is not None and not LEAST_NOISE < noise < inf:
            raise InputError(
                f"`noise` is a variance and must exceed {LEAST_NOISE}; got {noise}. "
                "Pass `likelihood.noise.item()` of a fitted model, or leave it out."
            )
        if not 0 <= tolerance < inf:
            raise InputError(
                f"`tolerance` must be nats per observation, 0 or more; got {tolerance}. "
                "Larger values select fewer points."
            )
        if n_candidates < 1:
            raise InputError(f"`n_candidates` must be at least 1; got {n_candidates}.")
        self.targets = None if targets is None else torch.as_tensor(targets)
        self.noise, self.tolerance = noise, tolerance
        self.n_candidates, self.exactly = n_candidates, exactly

    def allocate_inducing_points(
        self,
        inputs: Tensor,
        covar_module: Module,
        num_inducing: int,
        input_batch_shape: torch.Size,
    ) -> Tensor:
        """Return rows of `inputs`, `[*input_batch_shape m d]` with m ≤ `num_inducing`.

        All elements of a batch have as many points as the one that needs most. Outputs with kernels
        of their own share their points: the union of the selections of each.

        Args:
            inputs: `[*input_batch_shape n d]`.
            covar_module: a GPyTorch kernel; its batch shape is that of the inputs, one more axis
                for outputs, or none.
            num_inducing: number of points at most.
            input_batch_shape: batch shape of the inputs, without outputs.
        """
        kernel = _checked(inputs, covar_module, num_inducing)
        X = inputs.detach()
        if not input_batch_shape and X.dim() == 3:
            X = X[0]  # BoTorch has repeated the rows for each output
        X = X.expand(*input_batch_shape, *X.shape[-2:])
        Y = self._targets_of(X)
        selections = [
            self._select(X[at], kernel[at], None if Y is None else Y[at], num_inducing)
            for at in product(*map(range, input_batch_shape))
        ]
        m = num_inducing if self.exactly else max(len(each.selected) for each in selections)
        points = torch.stack([each.points(m) for each in selections])
        return points.reshape(*input_batch_shape, m, X.shape[-1])

    def _get_quality_function(self) -> QualityFunction:
        """Return a constant quality: rows are selected by the bound."""
        return UnitQualityFunction()

    def _targets_of(self, X: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n m"] | None:
        if self.targets is None:
            return None
        Y = self.targets.to(X)
        Y = Y[..., None] if Y.shape == X.shape[:-1] else Y
        if Y.shape[:-1] != X.shape[:-1]:
            raise InputError(
                f"`targets` must have a row for each of the inputs, {list(X.shape[:-1])} or "
                f"{[*X.shape[:-1], 'm']}; got {list(self.targets.shape)}. "
                "Create an allocator for each set of inputs."
            )
        return Y - Y.mean(-2, keepdim=True)

    def _select(
        self, X: Float[Tensor, "n d"], kernel: Kernel, Y: Float[Tensor, "n m"] | None, most: int
    ) -> "_SelectedRows":
        """Select points for all outputs: the union, with equal shares if it is too large."""
        if not kernel.batch_shape:
            outputs = [self._output(kernel, X, Y, most)]
        elif Y is None or Y.shape[1] == kernel.batch_shape[0]:
            outputs = [
                self._output(kernel[p], X, None if Y is None else Y[:, p : p + 1], most)
                for p in range(kernel.batch_shape[0])
            ]
        else:
            raise InputError(
                f"`targets` must have a column for each of the {kernel.batch_shape[0]} outputs; "
                f"got {Y.shape[1]}."
            )
        share = max(output.M for output in outputs)
        while True:
            selected = torch.cat([output.rows(share) for output in outputs]).unique()
            if len(selected) <= most or share == 1:
                break
            share -= 1
        pool = torch.cat([output.pool for output in outputs]).unique()
        return _SelectedRows(X, outputs[0].kernel, pool, selected[:most])

    def _output(
        self, kernel: Kernel, X: Float[Tensor, "n d"], Y: Float[Tensor, "n m"] | None, most: int
    ) -> "_Output":
        """Return the best sets for one kernel, and how many points it needs."""
        pool = chunked_greedy_variance(kernel, X, max(most, self.n_candidates))
        noise = self.noise
        if noise is None:
            noise = max(NOISE * prior_variance(kernel, X).mean().item(), 2 * LEAST_NOISE)
        model = SparseGP(kernel, X[pool], noise=noise)
        L, (moments,) = model.moments(Dataset.of(X, X.new_zeros(len(X)) if Y is None else Y))
        outputs = 1
        if Y is None:
            # Expected moments are those of as many outputs as there are candidates.
            moments, outputs = prior_moments(moments), len(pool)
        frontier = elimination_frontier(subset_statistics(L, moments))
        enough = frontier.smallest(self.tolerance * outputs)
        M = max(enough if enough <= most else frontier.at_most(most), 1)
        return _Output(kernel, pool, frontier, M)


@dataclass(frozen=True, slots=True)
class _Output:
    """The selection for one kernel: M rows, or fewer if outputs must share."""

    kernel: Kernel
    pool: Int[Tensor, " K"]
    frontier: Frontier
    M: int

    def rows(self, share: int) -> Int[Tensor, " m"]:
        return self.pool[self.frontier.masks[min(share, self.M)]]


@dataclass(frozen=True, slots=True)
class _SelectedRows:
    """Selected rows, and the candidates that they were selected from."""

    X: Float[Tensor, "n d"]
    kernel: Kernel
    pool: Int[Tensor, " K"]
    selected: Int[Tensor, " m"]

    def points(self, count: int) -> Float[Tensor, "count d"]:
        """Return the selected rows, then those of largest conditional variance, then repeats."""
        Z = self.X[self.selected]
        if len(Z) < count:
            rest = self.X[self.pool]
            Z = torch.cat([Z, rest[greedy_variance(self.kernel, rest, count - len(Z), given=Z)]])
        return Z[torch.arange(count, device=Z.device) % len(Z)]


def _checked(inputs: Tensor, covar_module: Module, num_inducing: int) -> Kernel:
    if not isinstance(covar_module, Kernel):
        raise InputError(
            f"`covar_module` must be a GPyTorch kernel; got {type(covar_module).__name__}."
        )
    if num_inducing < 1:
        raise InputError(
            f"`num_inducing` must be at least 1; got {num_inducing}. BoTorch uses a quarter of the "
            "rows unless `inducing_points` is given."
        )
    if inputs.shape[-2] == 0:
        raise InputError("`inputs` must have at least one row to select from; got none.")
    return covar_module
