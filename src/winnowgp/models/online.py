"""Sparse Gaussian processes of a stream: a model, and what it remembers of earlier batches.

`OnlineGP` evaluates the bound of a batch and of the rows that are remembered (`bounds.streaming`),
as moments of any candidates, and as a function for optimisers. Batches are in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log, pi
from typing import final

import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ZeroMean
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.bounds.collapsed import Moments, moment_bound, moment_posterior
from winnowgp.bounds.row_blocks import JITTER, RowBlocks
from winnowgp.bounds.sites import Sites
from winnowgp.bounds.streaming import (
    Memory,
    known_noise_parts,
    matches,
    memory_moments,
    old_projection,
    posterior_moments,
    projected,
    remember,
    row_moments,
)
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.linalg import cholesky, definite_cholesky, solve_lower
from winnowgp.models.base import copy_with
from winnowgp.models.closed_forms import ParametricBound
from winnowgp.models.kernels import covariance, prior_mean, prior_variance
from winnowgp.models.likelihoods import observation_model
from winnowgp.models.observations import LEAST_NOISE, target_noise
from winnowgp.models.posterior import Posterior
from winnowgp.models.sgpr import SparseGP
from winnowgp.models.site_inference import SiteInference, batch_site_moments, infer_batch_sites
from winnowgp.models.svgp import FINAL_GAIN, TRAINING_GAIN, VariationalGP
from winnowgp.typing import Scalar, TargetNoise

# The candidate that each point of the memory is, −1 if none.
Matches = Int[Tensor, " M"]


@final
@dataclass(frozen=True, slots=True)
class OnlineGP:
    """A sparse GP and its memory of the rows that it has seen.

    With hyper-parameters and inducing points held fixed, the bound and the posterior after any
    number of batches are those of all rows together.

    Args:
        model: kernel, mean, likelihood and candidates.
        memory: rows of earlier batches, held at inducing points that may differ from the
            candidates; `OnlineGP.start` has none, `OnlineGP.of` those of a fitted model.

    >>> from gpytorch.kernels import RBFKernel, ScaleKernel
    >>> X = torch.linspace(0, 6, 40, dtype=torch.float64)[:, None]
    >>> data = Dataset.of(X, torch.sin(X[:, 0]))
    >>> online = OnlineGP.start(SparseGP(ScaleKernel(RBFKernel()), X[::5], noise=0.1))
    >>> for rows in (slice(0, 40, 2), slice(1, 40, 2)):
    ...     bound, online = online.bound(data.part(rows)), online.after(data.part(rows))
    >>> abs(bound - online.model.fixed_bound(data)) < 1e-8
    True
    """

    model: SparseGP | VariationalGP
    memory: Memory

    @classmethod
    def start(cls, model: SparseGP | VariationalGP, *, outputs: int = 1) -> "OnlineGP":
        """Return a model that has seen no rows.

        Args:
            model: the model.
            outputs: number of target columns of a `SparseGP`.
        """
        like = model.candidates.detach()
        P = model.P if isinstance(model, VariationalGP) else outputs
        noise = _noise(model)
        each = noise is not None and noise.dim() > 0
        A = like.new_zeros(P if each or noise is None else 1, 0, 0)
        residual = like.new_zeros(P if each else ())
        return cls(model, Memory(like[:0], A, like.new_zeros(0, P), residual, 0))

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: SparseGP | VariationalGP,
        posterior: Posterior,
        *,
        elbo: float,
        N: int | float,
    ) -> "OnlineGP":
        """Return a model that remembers the rows of a fit.

        Args:
            model: a model with the parameters of the posterior.
            posterior: q(f) given these rows, with one noise variance for all outputs, or sites.
            elbo: bound of the fit in nats.
            N: number of observations.
        """
        noise = _noise(model)
        if noise is not None and noise.dim():
            raise InputError(
                "the model has a noise variance for each target, and its posterior does not say "
                "how well it explains each of them. Fit all rows together."
            )
        moments = posterior_moments(
            posterior.q_mean, posterior.q_factor, elbo=elbo, noise=noise, N=N
        )
        mean = prior_mean(posterior.mean, posterior.Z)
        return cls(model, remember(posterior.Z, posterior.L, moments, mean=mean, noise=noise))

    def with_candidates(
        self, candidates: Float[Tensor, "K D"], *, shared: bool = False
    ) -> "OnlineGP":
        """Return the same model and memory with other candidates.

        An explicit q(u) is that of the prior: the bound of a stream does not use it.

        Args:
            shared: whether it has the kernel, mean and likelihood of this model, not copies.
        """
        model = self.model
        if isinstance(model, SparseGP):
            return replace(self, model=model.with_candidates(candidates, shared=shared))
        K, eye = len(candidates), torch.eye(len(candidates)).to(candidates)
        q_mean, q_factor = candidates.new_zeros(K, model.P), eye.repeat(model.P, 1, 1)
        model = copy_with(model, candidates, shared=shared, q_mean=q_mean, q_factor=q_factor)
        return replace(self, model=model)

    def at_memory(self) -> "OnlineGP":
        """Return the same model and memory, with the points of the memory as candidates.

        Kernel, mean and likelihood are those of this model, not copies.
        """
        return self.with_candidates(self.memory.Z, shared=True)

    @torch.no_grad()
    def moments(
        self, data: Dataset, *, gain: float = FINAL_GAIN
    ) -> tuple[Float[Tensor, "K K"], list[Moments]]:
        """Return the factor of K_uu, and the moments of the batch and of the remembered rows.

        For a likelihood that is not Gaussian the batch is represented by the sites of the optimal
        q(u) of all candidates.

        Args:
            data: the batch.
            gain: nats per observation that the last update of these sites may gain.
        """
        self._check(data)
        model = self.model
        L = cholesky(covariance(model.kernel, model.candidates, model.candidates)).L
        if isinstance(model, SparseGP):
            return L, self._gaussian(data, L)
        return L, self._of_sites(data, L, self._inferred(data, L, gain=gain))

    def bound(self, data: Dataset) -> float:
        """Return the bound of the batch and of all remembered rows, in nats.

        It is a lower bound on log p(Y) of all rows if hyper-parameters were held fixed, and
        otherwise approximates one.
        """
        return _total(self.moments(data)[1]).item()

    @torch.no_grad()
    def remembered_moments(self) -> tuple[Float[Tensor, "K K"], list[Moments]]:
        """Return the factor of K_uu, and the moments of the remembered rows alone."""
        Z = self.model.candidates
        L = cholesky(covariance(self.model.kernel, Z, Z)).L
        return L, self._remembered(L)

    def remembered_bound(self) -> float:
        """Return the bound of the remembered rows alone, in nats."""
        return _total(self.remembered_moments()[1]).item()

    @torch.no_grad()
    def after(self, data: Dataset) -> "OnlineGP":
        """Return the model with the batch in its memory, at its candidates."""
        model, fixed = self.model, self.memory.fixed
        if not isinstance(model, SparseGP) or (fixed is None and not data.has_noise):
            return self.remembering(*self.moments(data))
        self._check(data)
        Z = model.candidates.detach().clone()
        L = cholesky(covariance(model.kernel, Z, Z)).L
        plain, known = self._gaussian_parts(data, L)
        separate = self._separate(data)
        own = replace(self, memory=replace(self.memory, fixed=None))
        plain = _sums(plain, own._remembered(L, separate=separate))
        if fixed is not None:
            old = replace(self, memory=fixed)._remembered(L, fixed=True, separate=separate)
            known = _sums(known, old)
        mean = prior_mean(model.mean, Z)
        memory = remember(Z, L, plain, mean=mean, noise=model.noise, earlier=self.memory)
        fixed = remember(Z, L, known, mean=mean, noise=None)
        return replace(self, memory=replace(memory, fixed=fixed))

    @torch.no_grad()
    def remembering(self, L: Float[Tensor, "K K"], moments: list[Moments]) -> "OnlineGP":
        """Return the model with a memory of the rows of some moments, that of `self` included."""
        Z = self.model.candidates.detach().clone()
        mean = prior_mean(self.model.mean, Z)
        memory = remember(Z, L, moments, mean=mean, noise=_noise(self.model), earlier=self.memory)
        return replace(self, memory=memory)

    @torch.no_grad()
    def projected(self, memory: Memory) -> Memory:
        """Return what the candidates remember of the rows of a memory at other points."""
        Z = self.model.candidates.detach().clone()
        L = cholesky(covariance(self.model.kernel, Z, Z)).L
        V, left = replace(self, memory=memory)._projection(L)
        mean, new_mean = (prior_mean(self.model.mean, each) for each in (memory.Z, Z))
        return projected(memory, Z, L, V, left, mean=mean, new_mean=new_mean)

    @torch.no_grad()
    def batch_memory(self, data: Dataset) -> Memory:
        """Return what the candidates remember of a batch alone, given the memory of other rows.

        For a likelihood that is not Gaussian the batch has the sites of q(f) given all rows. Their
        constants are those of all rows less those of the memory.
        """
        model = self.model
        if isinstance(model, SparseGP):
            return OnlineGP.start(model, outputs=data.P).after(data).memory
        L = cholesky(covariance(model.kernel, model.candidates, model.candidates)).L
        inference = self._inferred(data, L, gain=FINAL_GAIN)
        V = solve_lower(L, covariance(model.kernel, model.candidates, data.X))
        w, linear = inference.sites.precision[: data.N], inference.sites.linear[: data.N]
        zero, kff = V.new_zeros(()), prior_variance(model.kernel, data.X)
        own = [
            Moments((V * w[:, p]) @ V.mT, V @ linear[:, p : p + 1], zero, w[:, p] @ kff, zero, 0)
            for p in range(model.P)
        ]
        mean = prior_mean(model.mean, model.candidates)
        memory = remember(model.candidates.detach(), L, own, mean=mean, noise=None)
        # Bounds have −½ residual: the residual makes batch and memory have the bound of all rows.
        alone = memory_moments(memory, L.mT, torch.zeros_like(L), mean=mean, noise=None)
        missing = _total(_sums(self._remembered(L), alone)) - _total(
            self._of_sites(data, L, inference)
        )
        return replace(memory, residual=memory.residual + 2 * missing, N=data.observations)

    @torch.no_grad()
    def posterior(
        self,
        L: Float[Tensor, "K K"],
        moments: list[Moments],
        *,
        noise_share: Float[Tensor, "*outputs"] | None = None,
    ) -> Posterior:
        """Return q(f) of the rows of some moments, whitened with L.

        Args:
            noise_share: factor of the noise variance, by which all rows have higher precisions.
        """
        model = self.model
        if noise_share is not None:
            shares = noise_share.expand(len(moments))
            moments = [
                replace(m, C=m.C / share, D=m.D / share)
                for m, share in zip(moments, shares, strict=True)
            ]
        q_mean, q_factor = moment_posterior(*moments)
        posterior = Posterior(
            model.kernel,
            model.candidates.detach(),
            mean=model.mean,
            likelihood=model.likelihood,
            q_mean=q_mean,
            q_factor=q_factor,
            L=L,
        )
        if noise_share is not None:
            scale_noise(posterior.likelihood, noise_share)
        return posterior

    def objective(self, data: Dataset) -> Callable[[], Scalar]:
        """Return the bound of batch and memory as a function of the current parameters.

        The jitter is the 1e-8 of `bounds.row_blocks`, part of the objective. By the envelope
        theorem the gradient at the optimal sites is that of their evidence for the kernel, and of
        the expected log-likelihood for mean and likelihood.

        While locations are optimised, none of them counts as a point of the memory: one that moves
        by any distance is another variable, and the first step would lose the information that is
        smaller than the jitter.
        """
        self._check(data)
        Z = self.model.candidates.detach()
        match = matches(Z[:0] if self.model.candidates.requires_grad else Z, self.memory.Z)
        if isinstance(self.model, SparseGP):
            if self._is_plain(data, match):
                # The gradient is known in closed form, several times as fast as autograd.
                memory = replace(self.memory, residual=self.memory.residual.sum())
                blocks = RowBlocks.of(data, points=self.model.K)
                return ParametricBound(self.model, blocks, memory=memory, match=match)
            return lambda: _total(self._gaussian(data, self._jittered(), match=match))
        sites: list[Sites | None] = [None]
        return lambda: self._profiled(data, sites, match=match)

    def _is_plain(self, data: Dataset, match: Matches) -> bool:
        """Return whether the gradient is known in closed form, with locations held."""
        model, memory = self.model, self.memory
        shared = memory.P == 1 or not (memory.separate or memory.residual.dim())
        return (
            type(model.mean) is ZeroMean
            and shared
            and memory.fixed is None
            and memory.counts is None
            and not data.has_noise
            and model.K > 0
            and not model.candidates.requires_grad
            and bool((match >= 0).all())
        )

    def _jittered(self) -> Float[Tensor, "K K"]:
        Z = self.model.candidates
        Kuu = covariance(self.model.kernel, Z, Z)
        shift = JITTER * Kuu.diagonal().mean() if len(Z) else 0.0
        return definite_cholesky(Kuu + shift * torch.eye(len(Z), dtype=Z.dtype, device=Z.device))

    def _gaussian(
        self, data: Dataset, L: Float[Tensor, "K K"], *, match: Matches | None = None
    ) -> list[Moments]:
        """Return the moments of batch and memory for Gaussian noise, differentiable."""
        V, Y, counts = self._rows(data, L)
        kff, N = prior_variance(self.model.kernel, data.X), data.observations
        batch = []
        for y, noise, known in self._targets(data, Y):
            variance = noise if known is None else noise + known
            moments = row_moments(V, y, kff, counts / variance, N=N)
            constant = -0.5 * (counts * (log(2 * pi) + variance.log())).sum()
            batch.append(replace(moments, constant=constant))
        return _sums(batch, self._remembered(L, match=match, separate=self._separate(data)))

    def _gaussian_parts(self, data: Dataset, L: Float[Tensor, "K K"]) -> list[list[Moments]]:
        """Return the moments of a batch for every σ², and the fixed ones of its known noise."""
        V, Y, counts = self._rows(data, L)
        kff, none = prior_variance(self.model.kernel, data.X), torch.zeros_like(counts)
        parts = [
            known_noise_parts(
                V, y, kff, counts=counts, known=none if known is None else known, noise=noise
            )
            for y, noise, known in self._targets(data, Y)
        ]
        return [list(part) for part in zip(*parts, strict=True)]

    def _separate(self, data: Dataset) -> bool:
        """Return whether targets have moments of their own, as their noise differs."""
        noise = _noise(self.model)
        each = noise is not None and noise.dim() > 0
        return data.P > 1 and (each or data.has_noise or self.memory.separate)

    def _targets(
        self, data: Dataset, Y: Float[Tensor, "N P"]
    ) -> list[tuple[Tensor, Scalar, Tensor | None]]:
        """Return groups of centred targets, their σ², and the known noise of their rows."""
        noise = _noise(self.model)
        assert noise is not None
        if not self._separate(data):
            return [(Y, noise.reshape(()), None if data.noise is None else data.noise[:, 0])]
        known = [None] * data.P if data.noise is None else data.noise.expand_as(Y).unbind(1)
        return list(zip(Y.split(1, 1), noise.expand(data.P), known, strict=True))

    def _rows(self, data: Dataset, L: Float[Tensor, "K K"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return whitened covariances, centred targets and counts of the rows of a batch."""
        model = self.model
        V = solve_lower(L, covariance(model.kernel, model.candidates, data.X))
        counts = torch.ones_like(data.X[:, 0]) if data.weights is None else data.weights
        return V, data.Y - prior_mean(model.mean, data.X), counts

    def _remembered(
        self,
        L: Float[Tensor, "K K"],
        *,
        match: Matches | None = None,
        fixed: bool = False,
        separate: bool | None = None,
    ) -> list[Moments]:
        """Return the moments of the remembered rows, differentiable.

        Args:
            fixed: whether the precisions of the memory do not depend on the noise.
            separate: whether each output has moments of its own; None if the memory decides.
        """
        V, left = self._projection(L, match=match)
        mean = prior_mean(self.model.mean, self.memory.Z)
        noise = None if fixed else _noise(self.model)
        separate = self.memory.separate if separate is None else separate
        return memory_moments(self.memory, V, left, mean=mean, noise=noise, separate=separate)

    def _projection(
        self, L: Float[Tensor, "K K"], *, match: Matches | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return `old_projection`, given the candidate that each old point is, if that is known."""
        kernel, Z, old = self.model.kernel, self.model.candidates, self.memory.Z
        match = matches(Z.detach(), old) if match is None else match
        if bool((match >= 0).all()):
            return L[match].mT, L.new_zeros(len(old), len(old))
        return old_projection(
            L, covariance(kernel, Z, old), covariance(kernel, old, old), match=match
        )

    def _inferred(
        self,
        data: Dataset,
        L: Float[Tensor, "K K"],
        *,
        gain: float,
        start: Sites | None = None,
        match: Matches | None = None,
    ) -> SiteInference:
        """Return the optimal q(u) given the batch and the memory."""
        assert isinstance(self.model, VariationalGP)
        V, _ = self._projection(L, match=match)
        return infer_batch_sites(self.model, self.memory, data, L=L, V=V, gain=gain, start=start)

    def _of_sites(
        self,
        data: Dataset,
        L: Float[Tensor, "K K"],
        inference: SiteInference,
        *,
        match: Matches | None = None,
    ) -> list[Moments]:
        """Return the moments of inferred sites, which include the remembered rows."""
        remembered = self._remembered(L, match=match)
        return batch_site_moments(inference, self.memory, remembered, N=data.observations)

    def _profiled(self, data: Dataset, start: list[Sites | None], *, match: Matches) -> Scalar:
        """Return the bound at the optimal sites, with its gradient; `start` keeps the sites."""
        model = self.model
        assert isinstance(model, VariationalGP)
        L = self._jittered()
        with torch.no_grad():
            inference = self._inferred(
                data, L.detach(), gain=TRAINING_GAIN, start=start[0], match=match
            )
            start[0] = inference.sites
            moments = self._of_sites(data, L.detach(), inference, match=match)
            value = _total(moments)
        w, linear = inference.sites.precision[: data.N], inference.sites.linear[: data.N]
        V = solve_lower(L, covariance(model.kernel, model.candidates, data.X))
        kff = prior_variance(model.kernel, data.X)
        surrogate = V.new_zeros(())
        for p, memory in enumerate(self._remembered(L, match=match)):
            batch = Moments(
                C=(V * w[:, p]) @ V.mT,
                D=V @ linear[:, p : p + 1],
                square=V.new_zeros(()),
                diagonal=w[:, p] @ kff,
                constant=V.new_zeros(()),
                N=data.observations,
            )
            surrogate = surrogate + moment_bound(batch + memory)
        latent = prior_mean(model.mean, data.X) + inference.mean[: data.N]
        expected = observation_model(model.likelihood).expected_log_prob(
            data.Y, latent, inference.variance[: data.N]
        )
        surrogate = surrogate + data.weighted(expected).sum()
        return value + (surrogate - surrogate.detach())

    def _check(self, data: Dataset) -> None:
        self.model.check(data)
        P = data.P if isinstance(self.model, SparseGP) else self.model.P
        if self.memory.P != P:
            raise InputError(
                f"the batch has {P} outputs and the memory {self.memory.P}; pass the targets of "
                "all batches in the same form."
            )


@torch.no_grad()
def scale_noise(likelihood: Likelihood, factor: Float[Tensor, "*outputs"]) -> None:
    """Multiply the noise variance of a Gaussian likelihood, or that of each output."""
    noise = target_noise(likelihood)
    likelihood.initialize(noise=(factor * noise).clamp_min(LEAST_NOISE).reshape(noise.shape))


def _total(moments: list[Moments]) -> Scalar:
    """Return the bound of all outputs."""
    return torch.stack([moment_bound(m) for m in moments]).sum()


def _sums(first: list[Moments], second: list[Moments]) -> list[Moments]:
    return [a + b for a, b in zip(first, second, strict=True)]


def _noise(model: SparseGP | VariationalGP) -> TargetNoise | None:
    """Return σ² of a collapsed model, of all targets or of each; None for sites."""
    return model.noise if isinstance(model, SparseGP) else None
