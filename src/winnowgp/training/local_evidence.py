"""Hyper-parameters from dense local blocks of rows.

A random sample of the rows has lost their neighbours, and with them fine structure. Blocks of
neighbouring rows have the full resolution of the data, and the sum of their exact evidences costs
O(N B²) for blocks of B rows.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, final

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import TrainingError
from winnowgp.linalg import threads_for
from winnowgp.models.base import Model
from winnowgp.models.kernels import copy_module
from winnowgp.models.priors import log_prior
from winnowgp.training.budget import DENSE, Budget, dense_work
from winnowgp.training.callbacks import Stateful
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG, CheckpointLog
from winnowgp.training.hyperparameters import affordable
from winnowgp.training.initialization import (
    noise_of,
    set_noise,
    set_within,
    trainable_lengthscales,
    with_unit_weights,
)
from winnowgp.training.lbfgs import Stop, maximise_elbo
from winnowgp.training.optima import Optimum
from winnowgp.typing import Scalar

# Rows of a local block, and the largest number of blocks, by device.
_BLOCK = {"cpu": (512, 24), "cuda": (2048, 24)}


def maximise_local_evidence(
    optimum: Optimum[Model],
    data: Dataset,
    *,
    generator: torch.Generator,
    budget: Budget,
    checkpoint_log: CheckpointLog = NO_CHECKPOINT_LOG,
) -> Optimum[Model] | None:
    """Return hyper-parameters that maximise the summed evidence of dense local blocks of rows.

    Blocks come from median splits along the column of greatest extent in lengthscales, so that
    neighbouring rows stay together. A random sample of as many rows has lost the neighbours.

    Returns: None if they are not better than the given optimum on these blocks.
    """
    size, most = _BLOCK.get(data.X.device.type, _BLOCK["cpu"])
    scaled = data.X / _relevance(optimum.model.kernel, data)
    indices = local_blocks(scaled, size)
    if len(indices) > most:
        chosen = torch.randperm(len(indices), generator=generator, device=generator.device)
        indices = [indices[i] for i in sorted(chosen[:most].tolist())]
    blocks = [with_unit_weights(optimum.model, data.part(rows)) for rows in indices]
    observations = sum(block.observations for block in blocks)
    work = 1.15 * sum(dense_work(optimum.model, block) for block in blocks)
    stop = Stop(gain=1e-3 * observations, window=10, iterations=40)
    results, before = [], -inf
    for factor in (1.0, 0.4):
        model = copy_module(optimum.model)
        for kernel in trainable_lengthscales(model.kernel):
            set_within(kernel, "lengthscale", factor * kernel.lengthscale.detach())
        noise = noise_of(model.likelihood)
        if noise is not None:
            set_noise(model.likelihood, factor * noise.value)
        summed = _SummedBound([model.dense_bound(block) for block in blocks])
        if factor == 1.0:
            with torch.no_grad():
                before = (summed() + log_prior(model)).item()
        # A clock leaves time for fewer iterations.
        few = affordable(stop, work, budget, checkpoint_log)
        try:
            with threads_for(DENSE * max(block.N**3 for block in blocks)):
                maximum = maximise_elbo(
                    model, data.X, objective=summed, stop=few, checkpoint_log=checkpoint_log
                )
        except TrainingError:
            continue
        budget.spend(maximum.iterations * work)
        with torch.no_grad():
            results.append((maximum.value + log_prior(model).item(), maximum.value, model))
    if not results:
        return None
    objective, evidence, model = max(results, key=lambda result: result[0])
    if objective < before + 5e-3 * observations:
        return None
    return Optimum(model, evidence, observations, optimum.kernel, objective - evidence)


@final
class _SummedBound:
    """The sum of the bounds of several blocks of rows, as a function of the current parameters."""

    def __init__(self, bounds: Sequence[Callable[[], Scalar]]) -> None:
        self._bounds = bounds

    def __call__(self) -> Scalar:
        return torch.stack([bound() for bound in self._bounds]).sum()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the bounds between calls."""
        states = [bound for bound in self._bounds if isinstance(bound, Stateful)]
        return {str(i): bound.state_dict() for i, bound in enumerate(states)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the bounds between calls."""
        states = [bound for bound in self._bounds if isinstance(bound, Stateful)]
        for i, bound in enumerate(states):
            bound.load_state_dict(state[str(i)])


def local_blocks(X: Float[Tensor, "N D"], size: int) -> list[Int[Tensor, " B"]]:
    """Return the rows of blocks of at most `size` neighbouring rows, by recursive median splits."""
    pending, blocks = [torch.arange(len(X), device=X.device)], []
    while pending:
        rows = pending.pop()
        if len(rows) <= size:
            blocks.append(rows)
            continue
        part = X[rows]
        column = int((part.quantile(0.95, 0) - part.quantile(0.05, 0)).argmax())
        split = rows[part[:, column].argsort(stable=True)]
        pending += [split[len(split) // 2 :], split[: len(split) // 2]]
    return blocks


def _relevance(kernel: Kernel, data: Dataset) -> Float[Tensor, " D"]:
    """Return the shortest lengthscale of each column; standard deviations where there is none."""
    scale = torch.full_like(data.X[0], inf)
    for part in trainable_lengthscales(kernel):
        lengthscale = part.lengthscale.detach().reshape(-1)
        if isinstance(part.active_dims, Tensor):
            dims = part.active_dims
            scale[dims] = torch.minimum(scale[dims], lengthscale.expand(len(dims)))
        else:
            scale = torch.minimum(scale, lengthscale.expand(data.D))
    spread = data.X.std(0, correction=0)
    return torch.where(scale < inf, scale, torch.where(spread > 0, spread, 1.0))
