"""Inducing points for BoTorch's models, and how many of them."""

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

from winnowgp.bounds import prior_moments
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models import SparseGP, greedy_variance
from winnowgp.models.candidates import chunked_greedy_variance
from winnowgp.models.kernels import prior_variance
from winnowgp.models.sgpr import LEAST_NOISE
from winnowgp.selection import Frontier, path_frontier, subset_statistics

# Of the mean prior variance, where nobody says what the noise is.
NOISE = 0.01


@final
class WinnowingAllocator(InducingPointAllocator):
    """Chooses up to `num_inducing` rows for inducing points: as few as do, where fewer do.

    Candidates are rows of greatest conditional variance; backward elimination on the collapsed
    bound finds the best set of each size among them; kept is the smallest that gives up at most
    `tolerance` nats a row relative to all candidates. BoTorch does not hand targets to an
    allocator: given to the constructor they decide, and otherwise the bound is the one expected of
    targets drawn from the prior, which knows the kernel and the inputs alone.

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
        targets: `[n]` or `[n m]`, with the input's batch shape in front if it has one, as the model
            sees them (after outcome transforms); their mean is taken off.
        noise: variance of the noise, as the model sees it; a hundredth of the mean prior variance
            if not given.
        tolerance: nats a row that may be given up; 0 keeps as many points as `num_inducing` allows
            unless the best bound takes fewer.
        n_candidates: rows to choose among; `num_inducing` of them if that is more.
        exactly: return `num_inducing` points whatever the choice, the chosen ones first and then
            those of greatest conditional variance. `init_inducing_points` of a model that exists
            cannot change their number, and needs this; a new model does not.
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
                f"`tolerance` must be nats a row, 0 or more; got {tolerance}. "
                "Larger values keep fewer points."
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
        """Rows of `inputs`, `[*input_batch_shape m d]` with m ≤ `num_inducing`.

        Elements of a batch have as many points each as the one that needs most of them. Outputs
        with kernels of their own share their points: the union of what each of them chooses.

        Args:
            inputs: `[*input_batch_shape n d]`.
            covar_module: a GPyTorch kernel; its batch shape is that of the inputs, one more axis
                for outputs, or none.
            num_inducing: most points.
            input_batch_shape: of the inputs, outputs not counted.
        """
        kernel = _checked(inputs, covar_module, num_inducing)
        X = inputs.detach()
        if not input_batch_shape and X.dim() == 3:
            X = X[0]  # BoTorch has repeated the rows for each output
        X = X.expand(*input_batch_shape, *X.shape[-2:])
        Y = self._targets_of(X)
        choices = [
            self._choice(X[at], kernel[at], None if Y is None else Y[at], num_inducing)
            for at in product(*map(range, input_batch_shape))
        ]
        m = num_inducing if self.exactly else max(len(choice.chosen) for choice in choices)
        points = torch.stack([choice.points(m) for choice in choices])
        return points.reshape(*input_batch_shape, m, X.shape[-1])

    def _get_quality_function(self) -> QualityFunction:
        """Every row is as good as another; where targets are given, they say otherwise."""
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
                "Make an allocator for each set of inputs."
            )
        return Y - Y.mean(-2, keepdim=True)

    def _choice(
        self, X: Float[Tensor, "n d"], kernel: Kernel, Y: Float[Tensor, "n m"] | None, most: int
    ) -> "_Choice":
        """Points that all outputs share: each output's own, down to an equal share if too many."""
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
            chosen = torch.cat([output.rows(share) for output in outputs]).unique()
            if len(chosen) <= most or share == 1:
                break
            share -= 1
        pool = torch.cat([output.pool for output in outputs]).unique()
        return _Choice(X, outputs[0].kernel, pool, chosen[:most])

    def _output(
        self, kernel: Kernel, X: Float[Tensor, "n d"], Y: Float[Tensor, "n m"] | None, most: int
    ) -> "_Output":
        """The best sets found for one kernel, and how many points it asks for."""
        pool = chunked_greedy_variance(kernel, X, max(most, self.n_candidates))
        noise = self.noise
        if noise is None:
            noise = max(NOISE * prior_variance(kernel, X).mean().item(), 2 * LEAST_NOISE)
        model = SparseGP(kernel, X[pool], noise=noise)
        L, moments = model.moments(Dataset.of(X, X.new_zeros(len(X)) if Y is None else Y))
        outputs = 1
        if Y is None:
            # What is expected comes for as many outputs as there are candidates.
            moments, outputs = prior_moments(moments), len(pool)
        frontier = path_frontier(subset_statistics(L, moments))
        enough = frontier.smallest(self.tolerance * outputs)
        M = max(enough if enough <= most else frontier.at_most(most), 1)
        return _Output(kernel, pool, frontier, M)


@dataclass(frozen=True, slots=True)
class _Output:
    """What one kernel would choose: M rows, or fewer if it has to share."""

    kernel: Kernel
    pool: Int[Tensor, " K"]
    frontier: Frontier
    M: int

    def rows(self, share: int) -> Int[Tensor, " m"]:
        return self.pool[self.frontier.masks[min(share, self.M)]]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Rows chosen, and the candidates that they were chosen from."""

    X: Float[Tensor, "n d"]
    kernel: Kernel
    pool: Int[Tensor, " K"]
    chosen: Int[Tensor, " m"]

    def points(self, count: int) -> Float[Tensor, "count d"]:
        """The chosen rows, then those of greatest conditional variance, then the first again."""
        Z = self.X[self.chosen]
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
            f"`num_inducing` must be at least 1; got {num_inducing}. BoTorch asks for a quarter of "
            "the rows unless `inducing_points` says how many at most."
        )
    if inputs.shape[-2] == 0:
        raise InputError("`inputs` has no rows; inducing points are chosen among them.")
    return covar_module
