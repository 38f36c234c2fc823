"""What a user said about a latent-variable model, checked, and turned into a model and a plan."""

from dataclasses import dataclass
from typing import Any, final

import torch
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from winnowgp.data import Entries
from winnowgp.errors import InputError
from winnowgp.estimators.arguments import positive, whole
from winnowgp.estimators.latent_start import (
    START_VARIANCE,
    awakened,
    latent_kernel,
    latent_rows,
    levelled,
    places,
    scaled,
    sharpened,
)
from winnowgp.estimators.likelihoods import has_noise, likelihood_from
from winnowgp.models import (
    LatentModel,
    Latents,
    LatentVariableGP,
    SampledLatentGP,
    VariationalGP,
    gaussian_noise,
    has_psi,
)
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import (
    FastLatent,
    FixedAlpha,
    Goal,
    JointLatent,
    LatentSchedule,
    MaxPoints,
    Tolerance,
)


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

    def model(self, table: Entries, raw: Entries, *, generator: torch.Generator) -> LatentModel:
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

    def plan(self, K: int) -> LatentSchedule:
        """The schedule that does what was asked for."""
        if self.fast:
            return FastLatent(self.goal, n_candidates=self.n_candidates, iterations=self.steps)
        assert isinstance(self.goal, FixedAlpha)
        prior = SquaredCardinality(K, self.goal.alpha)
        return JointLatent(prior, epochs=self.steps, batch_size=self.batch_size)

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

    def _starting_noise(self, table: Entries) -> Tensor:
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
