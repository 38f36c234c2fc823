"""Predictions of several targets from the joint posterior of several processes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import final

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from jaxtyping import Float, Int
from torch import Tensor, nn

from winnowgp.bounds.collapsed import Moments
from winnowgp.bounds.mixing import MixedTargets, mixed_moments
from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.linalg import cholesky, definite_cholesky, half_log_det, solve_lower
from winnowgp.models.kernels import copy_module, covariance, cross_covariance, prior_variance
from winnowgp.models.likelihoods import observation_model, predicted_quantiles
from winnowgp.models.mixed_sites import MixedInference, conditioned_sites
from winnowgp.models.observations import Prediction, target_noise
from winnowgp.models.target_likelihoods import TargetLikelihoods
from winnowgp.typing import Scalar

# Rows predicted at once, as in `posterior`.
_ROWS = 2048


@final
class MultiOutputPosterior(nn.Module):
    """The joint q(f_1, …, f_Q) of Q processes, and the P targets that they are mixed to.

    The whitened inducing values v = (v_1, …, v_Q) of all processes, u_q = L_q v_q, have
    q(v) = N(m, F Fᵀ). With V_q = L_q⁻¹ k_q(Z_q, x) and F_q the rows of F that belong to process q,

        E f_q(x) = V_qᵀ m_q,   cov(f_q, f_s) = δ_qs (k_q(x, x) − V_qᵀ V_q) + V_qᵀ F_q F_sᵀ V_s,

    and targets have the mean W E f and the covariance W cov(f) Wᵀ. O(M²) per row for M inducing
    points of all processes, whatever the training data were; the number of targets adds O(P Q²).

    Args:
        kernels: a kernel for each process; copied.
        Z: inducing points of each process, `[M_q D]`.
        mixing: W.
        likelihood: a Gaussian likelihood with a noise variance for each target, or a likelihood for
            each, whose offsets are added to W f; copied.
        q_mean: m.
        q_factor: F.
        L: Cholesky factors of the processes, if they are known, such as those of a saved posterior.
    """

    mixing: Tensor
    q_mean: Tensor
    q_factor: Tensor

    def __init__(
        self,
        kernels: Sequence[Kernel],
        Z: Sequence[Float[Tensor, "_ D"]],
        *,
        mixing: Float[Tensor, "P Q"],
        likelihood: Likelihood,
        q_mean: Float[Tensor, " M"],
        q_factor: Float[Tensor, "M M"],
        L: Sequence[Float[Tensor, "_ _"]] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(likelihood, GaussianLikelihood | TargetLikelihoods):
            raise InputError(
                "`likelihood` must be a GaussianLikelihood or TargetLikelihoods; got "
                f"{type(likelihood).__name__}."
            )
        self._kernels = nn.ModuleList(copy_module(k).requires_grad_(False) for k in kernels)
        self.likelihood = copy_module(likelihood).requires_grad_(False)
        if L is None:
            L = [cholesky(covariance(k, z, z)).L for k, z in zip(self.kernels, Z, strict=True)]
        self._points = nn.ParameterList(_fixed(points) for points in Z)
        self._factors = nn.ParameterList(_fixed(factor) for factor in L)
        for name, tensor in {"mixing": mixing, "q_mean": q_mean, "q_factor": q_factor}.items():
            # Contiguous, as it is after loading: another layout would round differently.
            self.register_buffer(name, tensor.detach().contiguous().clone())

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Kernel of each process."""
        return tuple(kernel for kernel in self._kernels if isinstance(kernel, Kernel))

    @property
    def inducing_points(self) -> tuple[Float[Tensor, "_ D"], ...]:
        """Inducing points of each process."""
        return tuple(points.detach() for points in self._points)

    @property
    def factors(self) -> tuple[Float[Tensor, "_ _"], ...]:
        """Cholesky factor L_q of each process."""
        return tuple(factor.detach() for factor in self._factors)

    @property
    def Z(self) -> Float[Tensor, "M D"]:
        """Inducing points of all processes, one after another."""
        return torch.cat(self.inducing_points)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of inducing points of each process."""
        return tuple(map(len, self._points))

    @property
    def M(self) -> int:
        """Number of inducing points of all processes."""
        return sum(self.sizes)

    @property
    def P(self) -> int:
        """Number of targets."""
        return self.mixing.shape[0]

    @property
    def Q(self) -> int:
        """Number of processes."""
        return self.mixing.shape[1]

    @property
    def offset(self) -> Float[Tensor, " P"]:
        """Offset of the latent function of each target; zero if all noise is Gaussian."""
        likelihood = self.likelihood
        if isinstance(likelihood, TargetLikelihoods):
            return likelihood.offset.detach()
        return self.mixing.new_zeros(self.P)

    def predict_mean(self, X: Float[Tensor, "N D"]) -> Float[Tensor, "N P"]:
        """Return the mean of each row and target."""
        return self.predict(X).mean

    def predict(
        self,
        X: Float[Tensor, "N D"],
        *,
        observed: bool = False,
        noise: Float[Tensor, "N P"] | None = None,
    ) -> Prediction:
        """Return mean and variance of each row and target.

        Args:
            observed: whether to predict an observation y rather than W f.
            noise: known noise variances of the observations, in addition to the learnt one.
        """
        means, covariances = self.processes(X)
        mean = self.offset + means @ self.mixing.mT
        variance = torch.einsum("pq,nqs,ps->np", self.mixing, covariances, self.mixing)
        # Non-negative up to rounding.
        variance = variance.clamp_min(0)
        if noise is not None:
            variance = variance + noise
        if not observed:
            return Prediction(mean, variance)
        return observation_model(self.likelihood).predict(mean, variance)

    def processes(
        self, X: Float[Tensor, "N D"]
    ) -> tuple[Float[Tensor, "N Q"], Float[Tensor, "N Q Q"]]:
        """Return mean and covariance of the Q processes in each row."""
        self._check(X)
        means, covariances = [], []
        for rows in X.split(_ROWS):
            mean, left, explained = self._parts(rows)
            means.append(mean)
            covariances.append(torch.diag_embed(left) + explained @ explained.mT)
        return torch.cat(means), torch.cat(covariances)

    def covariance(
        self,
        X: Float[Tensor, "N D"],
        *,
        observed: bool = False,
        noise: Float[Tensor, "N P"] | None = None,
    ) -> Float[Tensor, "P N N"]:
        """Return the covariance of the rows, one matrix per target.

        Args:
            observed: whether to add the noise.
            noise: known noise variances of the observations, in addition to the learnt one.
        """
        self._check(X)
        if observed:
            self.require_gaussian("covariances of observations", "Pass `observed=False`.")
        V = self._whitened(X)
        left = [covariance(k, X, X) - v.mT @ v for k, v in zip(self.kernels, V, strict=True)]
        explained = [v.mT @ F for v, (_, F) in zip(V, self._q(), strict=True)]
        total = torch.einsum("pq,qij->pij", self.mixing.square(), torch.stack(left))
        G = torch.einsum("pq,qim->pim", self.mixing, torch.stack(explained))
        total = total + G @ G.mT
        if observed:
            known = X.new_zeros(len(X), self.P) if noise is None else noise
            total = total + torch.diag_embed((target_noise(self.likelihood) + known).mT)
        return total

    def sample(
        self,
        X: Float[Tensor, "N D"],
        n: int,
        *,
        observed: bool = False,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "S N P"]:
        """Return `n` samples of all targets, drawn jointly at the rows; O(Q N³) once.

        Inducing values are drawn from q(v), and the rest of each process given them. Targets of a
        sample are mixed from the same processes, so that they vary together.

        Args:
            observed: whether to sample observations y rather than W f.
        """
        self._check(X)
        if observed:
            self.require_gaussian("samples of observations", "Pass `observed=False`.")
        normal = partial(torch.randn, generator=generator, dtype=X.dtype, device=X.device)
        v = self.q_mean + normal(n, self.M) @ self.q_factor.mT
        functions = []
        for kernel, V, own in zip(
            self.kernels, self._whitened(X), v.split(self.sizes, 1), strict=True
        ):
            K = covariance(kernel, X, X)
            # Relative to the prior: nothing may be left at inducing points.
            jitter = 1e-8 * K.diagonal().mean() * torch.eye(len(X)).to(K)
            L = cholesky(K - V.mT @ V + jitter).L
            functions.append(own @ V + normal(n, len(X)) @ L.mT)
        samples = self.offset + torch.stack(functions, 2) @ self.mixing.mT
        if observed:
            samples = samples + target_noise(self.likelihood).sqrt() * normal(*samples.shape)
        return samples

    def log_density(
        self,
        X: Float[Tensor, "N D"],
        Y: Float[Tensor, "N P"],
        *,
        noise: Float[Tensor, "N P"] | None = None,
    ) -> Float[Tensor, "N P"]:
        """Return log p(y) of each row and target, in nats.

        Args:
            Y: targets; the density of a missing one, which is NaN, is NaN.
            noise: known noise variances of the observations, in addition to the learnt one.
        """
        latent, missing = self.predict(X, noise=noise), torch.isnan(Y)
        gaussian = isinstance(self.likelihood, GaussianLikelihood)
        filled = torch.where(missing, 0.0, Y) if gaussian else Y
        model = observation_model(self.likelihood)
        nats = model.log_density(filled, latent.mean, latent.variance)
        return torch.where(missing, torch.nan, nats)

    def quantiles(
        self,
        X: Float[Tensor, "N D"],
        probabilities: Float[Tensor, " R"],
        *,
        observed: bool = True,
        noise: Float[Tensor, "N P"] | None = None,
    ) -> Float[Tensor, "R N P"]:
        """Return quantiles of the predictive distribution of each row and target.

        Args:
            probabilities: R probabilities, strictly between 0 and 1.
            observed: whether to return quantiles of an observation y rather than W f.
            noise: known noise variances of the observations, in addition to the learnt one.
        """
        latent = self.predict(X, noise=noise)
        return predicted_quantiles(self.likelihood, latent, probabilities, observed=observed)

    @torch.no_grad()
    def condition_on(self, data: Dataset) -> "MultiOutputPosterior":
        """Return q(f) after observing N more rows, with the same parameters and inducing points.

        With the moments C and D of the rows, the precision (F Fᵀ)⁻¹ of q(v) becomes (F Fᵀ)⁻¹ + C:

            F' = F R⁻ᵀ,   R Rᵀ = I + FᵀC F,   m' = m + F' F'ᵀ (D − C m).

        For Gaussian noise the result is that of all rows together. Rows of other likelihoods have
        Gaussian sites, which are inferred given q(f); those of earlier rows stay as they were.
        Targets may be missing. O(M² (M + N)), and O(M² N P) for other likelihoods.
        """
        moments = self.moments(data)
        _, new = self._updated(moments)
        C, D = moments.C, moments.D[:, 0]
        return MultiOutputPosterior(
            self.kernels,
            self.inducing_points,
            mixing=self.mixing,
            likelihood=self.likelihood,
            q_mean=self.q_mean + new @ (new.mT @ (D - C @ self.q_mean)),
            q_factor=new,
            L=self.factors,
        )

    @torch.no_grad()
    def log_predictive(self, data: Dataset) -> Scalar:
        """Return the joint log density of N more rows under q(f), in nats; a lower bound.

        It is what the rows add to the bound if the inducing points stay; for Gaussian noise

            log N(Y | Vᵀ m, VᵀF FᵀV + Σ) − ½ tr Σ⁻¹(K − VᵀV)
        """
        return self._nats(self.moments(data))

    @torch.no_grad()
    def moments(self, data: Dataset) -> Moments:
        """Return the moments of N more rows, of their sites if the noise is not Gaussian.

        `N` of the moments is the number of observed targets. Those of sites have the constant with
        which they give the bound of the likelihoods.
        """
        self._check(data.X)
        if data.P != self.P:
            raise InputError(f"`data` must have {self.P} target columns; got {data.P}.")
        parts = list(zip(self.kernels, self.inducing_points, strict=True))
        accumulate = partial(
            mixed_moments,
            self.factors,
            [covariance(kernel, Z, data.X) for kernel, Z in parts],
            kff=torch.stack([prior_variance(kernel, data.X) for kernel, _ in parts]),
        )
        likelihood = self.likelihood
        if not isinstance(likelihood, TargetLikelihoods):
            learnt = target_noise(likelihood)[None]
            noise = learnt if data.noise is None else learnt + data.noise
            weights = data.weights
            return accumulate(
                targets=MixedTargets.of(data.Y, mixing=self.mixing, noise=noise, weights=weights)
            )
        if data.noise is not None:
            raise InputError("known noise variances need Gaussian noise; leave them out.")
        found = self._sites(likelihood, data)
        linear, precision = found.sites.linear, found.sites.precision
        moments = accumulate(targets=MixedTargets.of_sites(linear, precision, mixing=self.mixing))
        count = float(data.weighted((~torch.isnan(data.Y)).to(data.Y)).sum())
        return replace(moments, constant=found.bound - self._nats(moments), N=count)

    def _nats(self, moments: Moments) -> Scalar:
        """Return what rows of these moments add to the bound."""
        R, new = self._updated(moments)
        C, D, m = moments.C, moments.D[:, 0], self.q_mean
        residual = moments.square - 2 * D @ m + m @ C @ m - (new.mT @ (D - C @ m)).square().sum()
        unexplained = moments.diagonal - C.diagonal().sum()
        return moments.constant - half_log_det(R) - 0.5 * (residual + unexplained)

    def _updated(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Return R and F' of `condition_on`."""
        C, F = moments.C, self.q_factor
        R = definite_cholesky(torch.eye(len(C), dtype=C.dtype, device=C.device) + F.mT @ C @ F)
        return R, solve_lower(R, F.mT).mT

    def _sites(self, likelihood: TargetLikelihoods, data: Dataset) -> MixedInference:
        """Return the sites of more rows, given q(f)."""
        means, left, explained = self._parts(data.X)
        return conditioned_sites(
            likelihood,
            data,
            mean=means @ self.mixing.mT,
            features=torch.einsum("pq,nqm->npm", self.mixing, explained),
            residual=left @ self.mixing.mT.square(),
        )

    def _parts(
        self, X: Float[Tensor, "N D"]
    ) -> tuple[Float[Tensor, "N Q"], Float[Tensor, "N Q"], Float[Tensor, "N Q M"]]:
        """Return means, the variances that inducing values do not explain, and V_qᵀ F_q."""
        means, left, explained = [], [], []
        parts = zip(self.kernels, self.inducing_points, self.factors, self._q(), strict=True)
        for kernel, Z, L, (m, F) in parts:
            Kfu, kff = cross_covariance(kernel, Z)(X)
            V = solve_lower(L, Kfu.mT)
            means.append(m @ V)
            left.append((kff - V.square().sum(0)).clamp_min(0))
            explained.append(V.mT @ F)
        return torch.stack(means, 1), torch.stack(left, 1), torch.stack(explained, 1)

    def _whitened(self, X: Float[Tensor, "N D"]) -> list[Float[Tensor, "_ N"]]:
        """Return V_q of each process."""
        parts = zip(self.kernels, self.inducing_points, self.factors, strict=True)
        return [solve_lower(L, covariance(kernel, Z, X)) for kernel, Z, L in parts]

    def _q(self) -> list[tuple[Float[Tensor, " _"], Float[Tensor, "_ M"]]]:
        """Return m_q and F_q of each process."""
        sizes = list(self.sizes)
        return list(zip(self.q_mean.split(sizes), self.q_factor.split(sizes), strict=True))

    def require_gaussian(self, what: str, hint: str) -> None:
        """Raise an error unless all noise is Gaussian.

        Args:
            what: what needs it.
            hint: what to do instead.
        """
        if not isinstance(self.likelihood, GaussianLikelihood):
            raise InputError(
                f"{what} need Gaussian noise of all targets, `likelihood='gaussian'`. {hint}"
            )

    def _check(self, X: Tensor) -> None:
        D = self._points[0].shape[1]
        if X.dim() != 2 or X.shape[1] != D:
            raise InputError(f"`X` must have {D} columns as in training; got {list(X.shape)}.")


@final
class ProcessMixture(nn.Module):
    """A mixture of posteriors of the same processes at other hyper-parameters.

    Args:
        mode: the posterior at the fitted hyper-parameters, which is not a member.
        members: posteriors with the inducing points of the mode.
        member_weights: their weights, which sum to one; equal by default.
    """

    member_weights: Tensor
    mode: MultiOutputPosterior

    def __init__(
        self,
        mode: MultiOutputPosterior,
        members: Sequence[MultiOutputPosterior],
        *,
        member_weights: Float[Tensor, " S"] | None = None,
    ) -> None:
        super().__init__()
        w = mode.mixing.new_ones(len(members)) if member_weights is None else member_weights
        if not members or len(w) != len(members) or any(m.sizes != mode.sizes for m in members):
            raise InputError(
                "`members` must be at least one posterior with the inducing points of `mode`, each "
                "with a weight."
            )
        self.mode, self._members = mode, nn.ModuleList(members)
        self.register_buffer("member_weights", w.detach() / w.sum())

    @property
    def members(self) -> list[MultiOutputPosterior]:
        """The posteriors."""
        return [member for member in self._members if isinstance(member, MultiOutputPosterior)]

    def member_of(self, uniform: Float[Tensor, " S"]) -> Int[Tensor, " S"]:
        """Return the index of the member that each uniform number selects, by the weights."""
        return torch.searchsorted(self.member_weights.cumsum(0)[:-1], uniform.contiguous())

    def condition_on(self, data: Dataset) -> "ProcessMixture":
        """Return the mixture after more rows; a member that predicted them well gains weight."""
        nats = torch.stack([member.log_predictive(data) for member in self.members])
        return ProcessMixture(
            self.mode.condition_on(data),
            [member.condition_on(data) for member in self.members],
            member_weights=(self.member_weights.log() + nats).softmax(0),
        )


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().contiguous().clone(), requires_grad=False)
