"""Initial kernels, latent positions and functions of the GP-LVM estimator."""

from math import sqrt

import numpy as np
import torch
from gpytorch.kernels import Kernel, LinearKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from winnowgp.data import Dataset, MaskedMatrix, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators.kernels import kernel_from
from winnowgp.estimators.validation import Parameters
from winnowgp.models import LatentVariableGP, SampledLatentGP, VariationalGP
from winnowgp.models.gplvm import LatentModel, Latents
from winnowgp.models.kernels import has_psi
from winnowgp.models.likelihoods import has_noise, observation_model
from winnowgp.models.observations import fill_with_observed, gaussian_noise
from winnowgp.training import principal_latents

KERNELS = ("rbf", "linear", "matern12", "matern32", "matern52")
INITIAL_VARIANCE = 0.1
# Candidates of the paper's schedule, if the user does not give their number.
CANDIDATES = 100
# Number of initially active dimensions; the others start close to their prior, with this
# lengthscale.
ACTIVE, INACTIVE_LENGTHSCALE = 3, 3.0


def latent_kernel(kernel: str | Kernel, Q: int) -> Kernel:
    """Return a new kernel of Q latent dimensions by name, or a copy of the one given."""
    if isinstance(kernel, str) and kernel == "linear":
        return LinearKernel(ard_num_dims=Q)
    if not isinstance(kernel, Kernel) and kernel not in KERNELS:
        raise InputError(
            f"`kernel` must be one of {', '.join(KERNELS)} or a GPyTorch kernel; got {kernel!r}."
        )
    if isinstance(kernel, Kernel):
        sizes = {each.ard_num_dims for each in kernel.modules() if isinstance(each, Kernel)}
        if kernel.active_dims is None and not sizes <= {None, 1, Q}:
            raise InputError(
                f"`kernel` must have `ard_num_dims={Q}`, one per latent dimension, or none; "
                f"got {max(size for size in sizes if size)}."
            )
    return kernel_from(kernel, Q)


def is_closed_form(params: Parameters) -> bool:
    """Return whether expectations over q(X) and the optimal q(u) have a closed form."""
    return isinstance(params.likelihood, GaussianLikelihood) and has_psi(params.kernel)


def initial_gplvm(table: MaskedMatrix, params: Parameters) -> LatentModel:
    """Return an untrained model of a standardised table, on the device of the table."""
    kernel, likelihood = params.kernel.to(params.device), params.likelihood
    X = _initial_positions(table, params)
    fast, automatic = params.schedule == "fast", isinstance(params.start, str)
    if fast and params.named_kernel and automatic and isinstance(kernel, ScaleKernel):
        latents = _partly_active_latents(kernel, X)
    else:
        latents = Latents(X, variance=INITIAL_VARIANCE)
    candidates = _initial_candidates(latents.mean.detach(), params)
    noise, learn_noise = _initial_noise(table, params), _noise_is_learnt(likelihood)
    if is_closed_form(params) and params.batch_size is None:
        model = LatentVariableGP(kernel, latents, candidates=candidates, noise=noise)
        model.likelihood.requires_grad_(learn_noise)
    else:
        if params.noise == "column":
            likelihood = gaussian_noise(noise).requires_grad_(learn_noise)
        function = VariationalGP(kernel, candidates, likelihood=likelihood, targets=table.P)
        function = function.to(params.device)
        if params.named_kernel and not has_noise(likelihood):
            function = _with_column_levels(function, latents.mean.detach(), table)
            latents = _with_best_variance(function, latents, table)
        model = SampledLatentGP(function, latents)
    model.candidates.requires_grad_(params.move_candidates)
    return model.to(params.device)


def relevance(kernel: Kernel, Q: int) -> NDArray[np.float64]:
    """Return the relevance of each latent dimension to a kernel, 1 for the most relevant one."""
    for component in kernel.modules():
        if isinstance(component, LinearKernel):
            weights = component.variance.detach().reshape(-1).expand(Q)
            return (weights / weights.max()).numpy()
        if isinstance(component, Kernel) and component.has_lengthscale:
            weights = component.lengthscale.detach().reshape(-1).expand(Q).square().reciprocal()
            return (weights / weights.max()).numpy()
    return np.ones(Q)


def _initial_positions(table: MaskedMatrix, params: Parameters) -> Float[Tensor, "N Q"]:
    """Return the initial positions: principal components, or those that the user gave."""
    if isinstance(params.start, Tensor):
        return params.start.to(params.device)
    if not has_noise(params.likelihood):
        # Counts are not standardised, except for their principal components.
        scaler = Standardiser.of_entries(table)
        table = MaskedMatrix(scaler.forward(table.Y), table.observed)
    return principal_latents(table, params.n_components, generator=params.generator)


def _initial_candidates(X: Tensor, params: Parameters) -> Float[Tensor, "K Q"]:
    """Return the user's candidates; else none for the fast schedule, rows for the paper's."""
    if isinstance(params.candidates, Tensor):
        return params.candidates.to(params.device)
    count = 0 if params.schedule == "fast" else params.n_candidates or CANDIDATES
    return X[torch.randperm(len(X), generator=params.generator, device=X.device)[:count]]


def _partly_active_latents(kernel: Kernel, X: Float[Tensor, "N Q"]) -> Latents:
    """Return latents at X with only the leading dimensions active.

    The other dimensions become active where that raises the ELBO. If all start alike, many
    dimensions end as a linear model: 500 nats lower on qPCR with eleven. Sets the lengthscales of
    the kernel.
    """
    assert isinstance(kernel, ScaleKernel)
    active = min(ACTIVE, X.shape[1])
    lengthscales = X.new_full((X.shape[1],), sqrt(active))
    lengthscales[active:] = INACTIVE_LENGTHSCALE
    kernel.base_kernel.initialize(lengthscale=lengthscales)
    mean, variance = X.clone(), torch.full_like(X, INITIAL_VARIANCE)
    mean[:, active:] *= 0.3
    variance[:, active:] = 0.9
    return Latents(mean, variance=variance)


@torch.no_grad()
def _with_column_levels(
    function: VariationalGP, X: Float[Tensor, "N Q"], table: MaskedMatrix
) -> VariationalGP:
    """Return the functions of all columns at the level that the likelihood prefers.

    Functions of variance one around zero are many steps away from counts in the hundreds.
    """
    levels = _best_levels(function.likelihood, table)
    if isinstance(function.kernel, ScaleKernel):
        function.kernel.outputscale = levels.square().mean().clamp_min(1.0)
    function.mean.initialize(constant=levels.mean())
    # A missing entry takes the column's median, which is a value that was observed.
    median = _with_nan(table).nanquantile(0.5, 0, interpolation="lower")
    return function.with_best_q(Dataset(X, torch.where(table.observed, table.Y, median)))


@torch.no_grad()
def _with_best_variance(function: VariationalGP, latents: Latents, table: MaskedMatrix) -> Latents:
    """Return latents with the initial variance, of four values, that has the highest ELBO.

    Counts in the thousands determine a position more precisely than counts of one; Adam would take
    hundreds of steps to adapt.
    """
    mean = latents.mean.detach()
    options = [Latents(mean, variance=INITIAL_VARIANCE * share) for share in (1, 1e-1, 1e-2, 1e-3)]
    elbos = [SampledLatentGP(function, option).bound(table).item() for option in options]
    return options[elbos.index(max(elbos))]


def _best_levels(likelihood: Likelihood, table: MaskedMatrix) -> Float[Tensor, " P"]:
    """Return the most probable constant of each column, on a grid of small numbers and of the
    column's quantiles."""
    Y = fill_with_observed(table)
    share = torch.linspace(0, 1, 41, dtype=Y.dtype, device=Y.device)
    quantiles = _with_nan(table).nanquantile(share, 0)
    grid = torch.cat([(8 * share - 4)[:, None].expand(-1, table.P), quantiles])
    zero = torch.zeros_like(Y)
    nats = [
        (
            observation_model(likelihood).expected_log_prob(Y, zero + level, zero) * table.observed
        ).sum(0)
        for level in grid
    ]
    best = torch.stack(nats).nan_to_num(-torch.inf).argmax(0)
    return grid.gather(0, best[None])[0]


def _with_nan(table: MaskedMatrix) -> Float[Tensor, "N P"]:
    return torch.where(table.observed, table.Y, torch.nan)


def _initial_noise(table: MaskedMatrix, params: Parameters) -> Tensor:
    """Return standardised Gaussian noise variances: the user's, or a tenth of the table's."""
    if isinstance(params.likelihood, GaussianLikelihood) and not params.named_likelihood:
        start = params.likelihood.noise.detach().mean().item()
    else:
        start = max(0.1 * float(table.filled().square().sum()) / table.count, 1e-3)
    return table.Y.new_full((table.P if params.noise == "column" else 1,), start)


def _noise_is_learnt(likelihood: Likelihood) -> bool:
    return not isinstance(likelihood, GaussianLikelihood) or any(
        parameter.requires_grad for parameter in likelihood.parameters()
    )
