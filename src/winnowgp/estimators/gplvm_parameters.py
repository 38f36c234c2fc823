"""Parameters and initial state of the GP-LVM estimator."""

from dataclasses import dataclass
from math import sqrt
from typing import Any, final

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
from winnowgp.estimators.validation import has_noise, likelihood_from, positive, tensor, whole
from winnowgp.models import Latents, LatentVariableGP, SampledLatentGP, VariationalGP
from winnowgp.models.gplvm import LatentModel, gaussian_noise
from winnowgp.models.kernels import has_psi
from winnowgp.models.likelihoods import fill_with_observed, observation_model
from winnowgp.training import (
    FastSchedule,
    FixedAlpha,
    Goal,
    MaxPoints,
    PaperSchedule,
    Schedule,
    Tolerance,
    principal_latents,
)

# Where a latent-variable model starts: what a user said, turned into kernel, rows and points.


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
    start: Any, table: MaskedMatrix, Q: int, *, generator: torch.Generator
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
def levelled(
    function: VariationalGP, X: Float[Tensor, "N Q"], table: MaskedMatrix
) -> VariationalGP:
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
def sharpened(function: VariationalGP, latents: Latents, table: MaskedMatrix) -> Latents:
    """Rows as certain of their places as the likelihood likes best, of four variances.

    Counts in the thousands tell places apart that counts of one do not; Adam would take hundreds of
    steps to see it.
    """
    mean = latents.mean.detach()
    starts = [Latents(mean, variance=START_VARIANCE * share) for share in (1, 1e-1, 1e-2, 1e-3)]
    nats = [SampledLatentGP(function, start).bound(table).item() for start in starts]
    return starts[nats.index(max(nats))]


def _levels(likelihood: Likelihood, table: MaskedMatrix) -> Float[Tensor, " P"]:
    """Of each column, on a grid: small numbers, and the column's own quantiles."""
    Y, share = fill_with_observed(table), torch.linspace(0, 1, 41, dtype=table.Y.dtype)
    own = _own(table).nanquantile(share, 0)
    grid = torch.cat([(8 * share - 4)[:, None].expand(-1, table.P), own])
    zero = torch.zeros_like(Y)
    nats = [
        (
            observation_model(likelihood).expected_log_prob(Y, zero + level, zero) * table.observed
        ).sum(0)
        for level in grid
    ]
    best = torch.stack(nats).nan_to_num(-torch.inf).argmax(0)
    return grid.gather(0, best[None])[0]


def _own(table: MaskedMatrix) -> Float[Tensor, "N P"]:
    return torch.where(table.observed, table.Y, torch.nan)


def scaled(raw: MaskedMatrix) -> MaskedMatrix:
    """Counts and the like, standardised for principal components alone."""
    return MaskedMatrix(Standardiser.of_entries(raw).forward(raw.Y), raw.observed)


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


# What a user said about a latent-variable model, checked, and turned into a model and a plan.


@final
@dataclass(frozen=True, slots=True)
class LatentRequest:
    """The arguments of `GPLVM` that concern its model and its points."""

    Q: int
    kernel: Kernel
    named: bool
    """Whether the kernel is one of ours, whose parameters may be started anywhere."""
    likelihood: Likelihood
    given_noise: bool
    """Whether the user's likelihood says where Gaussian noise starts."""
    noise: str
    goal: Goal
    candidates: str | Tensor
    move_candidates: bool
    n_candidates: int
    start: Any
    fast: bool
    steps: int
    """Iterations of the fast schedule's last climb, or epochs of the paper's."""
    batch_size: int | None

    @classmethod
    def checked(
        cls,
        *,
        n_components: Any,
        kernel: Any,
        likelihood: Any,
        noise: Any,
        alpha: Any,
        tolerance: Any,
        max_points: Any,
        candidates: Any,
        move_candidates: Any,
        n_candidates: Any,
        start: Any,
        schedule: Any,
        max_iter: Any,
        epochs: Any,
        batch_size: Any,
    ) -> "LatentRequest":
        """The request, if it makes sense; an error that says what to do if not."""
        Q = whole("n_components", n_components)
        if schedule not in ("fast", "paper"):
            raise InputError(f"`schedule` must be 'fast' or 'paper'; got {schedule!r}.")
        fast = schedule == "fast"
        request = cls(
            Q=Q,
            kernel=latent_kernel(kernel, Q),
            named=isinstance(kernel, str),
            likelihood=likelihood_from(likelihood),
            given_noise=not isinstance(likelihood, str),
            noise=noise,
            goal=_goal(alpha, tolerance, max_points),
            candidates=_candidates(candidates, Q),
            move_candidates=bool(move_candidates),
            n_candidates=whole("n_candidates", n_candidates),
            start=start,
            fast=fast,
            steps=whole("max_iter", max_iter) if fast else whole("epochs", epochs),
            batch_size=None if batch_size is None else whole("batch_size", batch_size),
        )
        request._check()
        return request

    @property
    def closed(self) -> bool:
        """Whether averages over q(X) and the best q(u) are known in closed form."""
        return isinstance(self.likelihood, GaussianLikelihood) and has_psi(self.kernel)

    def model(
        self, table: MaskedMatrix, raw: MaskedMatrix, *, generator: torch.Generator
    ) -> LatentModel:
        """A model at its start.

        Args:
            table: the rows in standard units.
            raw: the rows in their own.
        """
        rows = table if has_noise(self.likelihood) else scaled(raw)
        X = latent_rows(self.start, rows, self.Q, generator=generator)
        sleeps = self.fast and self.named and isinstance(self.start, str)
        sleeps = sleeps and isinstance(self.kernel, ScaleKernel)
        latents = awakened(self.kernel, X) if sleeps else Latents(X, variance=START_VARIANCE)
        points = self._points(latents.mean.detach(), generator)
        noise, learnt = self._starting_noise(table), _learnt(self.likelihood)
        if self.closed and self.batch_size is None:
            model = LatentVariableGP(self.kernel, latents, candidates=points, noise=noise)
            model.likelihood.requires_grad_(learnt)
        else:
            likelihood = self.likelihood
            if self.noise == "column":
                likelihood = gaussian_noise(noise).requires_grad_(learnt)
            function = VariationalGP(self.kernel, points, likelihood=likelihood, targets=table.P)
            if self.named and not has_noise(likelihood):
                function = levelled(function, latents.mean.detach(), table)
                latents = sharpened(function, latents, table)
            model = SampledLatentGP(function, latents)
        model.candidates.requires_grad_(self.move_candidates)
        return model

    def plan(self, N: int) -> Schedule:
        """The schedule that does what was asked for."""
        if self.fast:
            return FastSchedule(self.goal, n_candidates=self.n_candidates, iterations=self.steps)
        assert isinstance(self.goal, FixedAlpha)
        steps = self.steps * max(1, N // (self.batch_size or N))
        return PaperSchedule(self.goal.alpha, joint=steps, batch_size=self.batch_size)

    def _check(self) -> None:
        """Whether what was asked for goes together."""
        if self.noise not in ("shared", "column"):
            raise InputError(f"`noise` must be 'shared' or 'column'; got {self.noise!r}.")
        if self.noise == "column" and not isinstance(self.likelihood, GaussianLikelihood):
            raise InputError(
                "`noise='column'` is for Gaussian noise; say 'shared' for other likelihoods."
            )
        if not self.fast and not isinstance(self.goal, FixedAlpha):
            raise InputError(
                "`schedule='paper'` needs a number for `alpha`, such as 1.0; the paper has no "
                "other way to say how many points."
            )
        if self.fast and self.batch_size is not None:
            raise InputError("`batch_size` is for `schedule='paper'`.")
        if self.fast and not self.closed:
            raise InputError(
                "the fast schedule needs Gaussian noise and an RBF or linear kernel; say "
                "`schedule='paper'` and a number for `alpha`, such as 1.0."
            )

    def _points(self, X: Tensor, generator: torch.Generator) -> Tensor:
        """Candidates: given ones; else none for the fast schedule, rows for the paper's."""
        if isinstance(self.candidates, Tensor):
            return self.candidates
        count = 0 if self.fast else self.n_candidates
        return X[torch.randperm(len(X), generator=generator)[:count]]

    def _starting_noise(self, table: MaskedMatrix) -> Tensor:
        """Variances of Gaussian noise in standard units: given ones, or a tenth of the table's."""
        if isinstance(self.likelihood, GaussianLikelihood) and self.given_noise:
            start = self.likelihood.noise.detach().mean().item()
        else:
            start = max(0.1 * float(table.filled().square().sum()) / table.count, 1e-3)
        return table.Y.new_full((table.P if self.noise == "column" else 1,), start)


def _goal(alpha: Any, tolerance: Any, max_points: Any) -> Goal:
    most = positive("tolerance", tolerance, hint="It is in nats per observed entry.")
    automatic = isinstance(alpha, str) and alpha == "auto"
    if not automatic and max_points is not None:
        raise InputError("say a number for `alpha` or `max_points`, not both.")
    if not automatic:
        hint = "Larger values keep fewer points; 'auto' derives it from `tolerance`."
        return FixedAlpha(positive("alpha", alpha, hint=hint))
    return Tolerance(most) if max_points is None else MaxPoints(whole("max_points", max_points))


def _candidates(candidates: Any, Q: int) -> str | Tensor:
    if not isinstance(candidates, str):
        return places("candidates", candidates, (None, Q))
    if candidates != "auto":
        raise InputError(f"`candidates` must be 'auto' or places [K Q]; got {candidates!r}.")
    return candidates


def _learnt(likelihood: Likelihood) -> bool:
    """Whether a Gaussian likelihood's noise is to be learnt."""
    return not isinstance(likelihood, GaussianLikelihood) or any(
        parameter.requires_grad for parameter in likelihood.parameters()
    )
