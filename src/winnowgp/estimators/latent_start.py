"""Where a latent-variable model starts: what a user said, turned into kernel, rows and points."""

from math import sqrt
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel, LinearKernel, ScaleKernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from winnowgp.data import Dataset, Entries, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators.kernels import kernel_from
from winnowgp.estimators.tensors import tensor
from winnowgp.models import Latents, SampledLatentGP, VariationalGP, expected_log_prob, valid
from winnowgp.training import principal_latents

KERNELS = ("rbf", "linear", "matern12", "matern32", "matern52")
START_VARIANCE = 0.1
# Dimensions that start awake; the others start close to their prior, with a long lengthscale.
AWAKE, ASLEEP = 3, 3.0


def latent_kernel(kernel: str | Kernel, Q: int) -> Kernel:
    """A fresh kernel by name, or a copy of the one given."""
    if isinstance(kernel, str) and kernel == "linear":
        return LinearKernel(ard_num_dims=Q)
    if not isinstance(kernel, Kernel) and kernel not in KERNELS:
        raise InputError(
            f"`kernel` must be one of {', '.join(KERNELS)} or a GPyTorch kernel; got {kernel!r}."
        )
    if isinstance(kernel, Kernel):
        sizes = {part.ard_num_dims for part in kernel.modules() if isinstance(part, Kernel)}
        if kernel.active_dims is None and not sizes <= {None, 1, Q}:
            raise InputError(
                f"`kernel` must have `ard_num_dims={Q}`, one a latent dimension, or none; "
                f"got {max(size for size in sizes if size)}."
            )
    return kernel_from(kernel, Q)


def latent_rows(
    start: Any, table: Entries, Q: int, *, generator: torch.Generator
) -> Float[Tensor, "N Q"]:
    """Where rows start: their principal components, or the places given."""
    if isinstance(start, str):
        if start != "pca":
            raise InputError(f"`start` must be 'pca' or places [N Q]; got {start!r}.")
        return principal_latents(table, Q, generator=generator)
    return places("start", start, (table.N, Q))


def awakened(kernel: Kernel, X: Float[Tensor, "N Q"]) -> Latents:
    """Latents at X of which all but the leading dimensions begin as good as unused.

    They wake up where that pays. Started all alike, many dimensions end as a linear model: 500 nats
    lower on qPCR with eleven. Sets the lengthscales of the kernel.
    """
    assert isinstance(kernel, ScaleKernel)
    awake = min(AWAKE, X.shape[1])
    lengthscales = X.new_full((X.shape[1],), sqrt(awake))
    lengthscales[awake:] = ASLEEP
    kernel.base_kernel.initialize(lengthscale=lengthscales)
    mean, variance = X.clone(), torch.full_like(X, START_VARIANCE)
    mean[:, awake:] *= 0.3
    variance[:, awake:] = 0.9
    return Latents(mean, variance=variance)


@torch.no_grad()
def levelled(function: VariationalGP, X: Float[Tensor, "N Q"], table: Entries) -> VariationalGP:
    """Columns as functions of where their rows start, of the size that the likelihood asks for.

    Functions of variance one around zero are steps away from counts in the hundreds.
    """
    levels = _levels(function.likelihood, table)
    if isinstance(function.kernel, ScaleKernel):
        function.kernel.outputscale = levels.square().mean().clamp_min(1.0)
    function.mean.initialize(constant=levels.mean())
    # An entry that is missing takes the column's median, a value that was seen.
    median = _own(table).nanquantile(0.5, 0, interpolation="lower")
    return function.with_best_q(Dataset(X, torch.where(table.observed, table.Y, median)))


@torch.no_grad()
def sharpened(function: VariationalGP, latents: Latents, table: Entries) -> Latents:
    """Rows as certain of their places as the likelihood likes best, of four variances.

    Counts in the thousands tell places apart that counts of one do not; Adam would take hundreds of
    steps to see it.
    """
    mean = latents.mean.detach()
    starts = [Latents(mean, variance=START_VARIANCE * share) for share in (1, 1e-1, 1e-2, 1e-3)]
    nats = [SampledLatentGP(function, start).bound(table).item() for start in starts]
    return starts[nats.index(max(nats))]


def _levels(likelihood: Likelihood, table: Entries) -> Float[Tensor, " P"]:
    """Of each column, on a grid: small numbers, and the column's own quantiles."""
    Y, share = valid(table), torch.linspace(0, 1, 41, dtype=table.Y.dtype)
    own = _own(table).nanquantile(share, 0)
    grid = torch.cat([(8 * share - 4)[:, None].expand(-1, table.P), own])
    zero = torch.zeros_like(Y)
    nats = [
        (expected_log_prob(likelihood, Y, zero + level, zero) * table.observed).sum(0)
        for level in grid
    ]
    best = torch.stack(nats).nan_to_num(-torch.inf).argmax(0)
    return grid.gather(0, best[None])[0]


def _own(table: Entries) -> Float[Tensor, "N P"]:
    return torch.where(table.observed, table.Y, torch.nan)


def scaled(raw: Entries) -> Entries:
    """Counts and the like, standardised for principal components alone."""
    return Entries(Standardiser.of_entries(raw).forward(raw.Y), raw.observed)


def places(name: str, given: Any, shape: tuple[int | None, int]) -> Tensor:
    """Places in latent space that a user gave, checked."""
    try:
        found = tensor(given)
    except (TypeError, ValueError) as error:
        raise InputError(f"`{name}` must be an array of numbers [rows Q]: {error}") from error
    wrong = (
        found.shape[:1] == (0,)
        or found.dim() != 2
        or any(
            want is not None and want != have for want, have in zip(shape, found.shape, strict=True)
        )
    )
    if wrong or not bool(torch.isfinite(found).all()):
        rows = "K" if shape[0] is None else str(shape[0])
        raise InputError(
            f"`{name}` must be finite numbers of shape [{rows} {shape[1]}]; "
            f"got shape {list(found.shape)}."
        )
    return found


def relevance(kernel: Kernel, Q: int) -> NDArray[np.float64]:
    """How much each dimension matters to a kernel, 1 for the one that matters most."""
    for part in kernel.modules():
        if isinstance(part, LinearKernel):
            weights = part.variance.detach().reshape(-1).expand(Q)
            return (weights / weights.max()).numpy()
        if isinstance(part, Kernel) and part.has_lengthscale:
            weights = part.lengthscale.detach().reshape(-1).expand(Q).square().reciprocal()
            return (weights / weights.max()).numpy()
    return np.ones(Q)
