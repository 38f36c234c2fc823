"""Mixtures of posteriors: predictions averaged over hyper-parameters, or over subsets."""

from abc import ABC, abstractmethod
from math import isclose
from typing import final

import torch
from gpytorch.kernels import ConstantKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributions import Normal

from winnowgp.bounds.streaming import restrict_moments
from winnowgp.data import Source
from winnowgp.errors import InputError
from winnowgp.models.observations import Prediction
from winnowgp.models.pathwise import FREQUENCIES, PosteriorPaths
from winnowgp.models.posterior import CompositePosterior, Posterior
from winnowgp.models.quadrature import gaussian_quantiles
from winnowgp.models.sgpr import SparseGP


class GaussianMixture(nn.Module, ABC):
    """Posteriors under which each row and output is a mixture of S Gaussians."""

    @property
    @abstractmethod
    def component_weights(self) -> Float[Tensor, " S"]:
        """Weights of the Gaussians, which sum to one."""

    @abstractmethod
    def component_predictions(
        self,
        X: Float[Tensor, "N D"],
        *,
        observed: bool = False,
        noise: Float[Tensor, "N P"] | None = None,
    ) -> Prediction:
        """Return means and variances of the Gaussians of the mixture, `[S N P]` each.

        Args:
            observed: whether they are those of an observation y rather than f.
            noise: known noise variances of the observations, in addition to the learnt one.
        """

    def predict_mean(self, X: Float[Tensor, "N D"]) -> Float[Tensor, "N P"]:
        """Return E[f(x)] of each row."""
        return self.predict(X).mean

    def predict(
        self,
        X: Float[Tensor, "N D"],
        *,
        observed: bool = False,
        noise: Float[Tensor, "N P"] | None = None,
    ) -> Prediction:
        """Return mean and variance of each row.

            m = Σ_s w_s m_s,   v = Σ_s w_s (v_s + (m_s − m)²)

        Args:
            observed: whether to predict an observation y rather than f.
            noise: known noise variances of the observations, in addition to the learnt one.
        """
        each = self.component_predictions(X, observed=observed, noise=noise)
        return mixture_moments(each.mean, each.variance, self.component_weights)

    def log_density(
        self,
        X: Float[Tensor, "N D"],
        Y: Float[Tensor, "N T"],
        *,
        noise: Float[Tensor, "N T"] | None = None,
    ) -> Float[Tensor, "N T"]:
        """Return log Σ_s w_s p_s(y) of each row and target, in nats.

        Args:
            Y: targets; the density of a missing one, which is NaN, is NaN.
            noise: known noise variances of the observations, in addition to the learnt one.
        """
        y = self.component_predictions(X, observed=True, noise=noise)
        nats = Normal(y.mean, y.variance.sqrt(), validate_args=False).log_prob(Y)
        return torch.logsumexp(nats + self.component_weights.log()[:, None, None], 0)

    def quantiles(
        self,
        X: Float[Tensor, "N D"],
        probabilities: Float[Tensor, " Q"],
        *,
        observed: bool = True,
        noise: Float[Tensor, "N P"] | None = None,
    ) -> Float[Tensor, "Q N T"]:
        """Return quantiles of the mixture of each row and target, inverting its Gaussians.

        Args:
            probabilities: Q probabilities, strictly between 0 and 1.
            observed: whether to return quantiles of an observation y rather than f.
            noise: known noise variances of the observations, in addition to the learnt one.
        """
        y = self.component_predictions(X, observed=observed, noise=noise)
        return gaussian_quantiles(y.mean, y.variance, probabilities, weights=self.component_weights)


@final
class MixturePosterior(GaussianMixture, CompositePosterior):
    """The mixture Σ_s w_s q_s(f) of S posteriors, each with Gaussian noise.

    Members have hyper-parameters of their own (`winnowgp.training.hyperparameter_mixture`), or
    inducing points of their own (`subset_mixture`). Means, variances, quantiles and
    densities are those of the mixture; every prediction takes S times as long as one of a member.

    Args:
        members: posteriors, such as those at draws of the hyper-parameters or of the subset.
        mode: the posterior at the most probable one, which `Z`, `kernel`, `mean` and `likelihood`
            describe. It is not a member.
        member_weights: weights w_s, which sum to one; equal by default.
    """

    member_weights: Tensor

    def __init__(
        self,
        members: list[Posterior],
        *,
        mode: Posterior,
        member_weights: Float[Tensor, " S"] | None = None,
    ) -> None:
        super().__init__()
        same = [
            isinstance(member.likelihood, GaussianLikelihood)
            and member.P == mode.P
            and member.Z.shape[1] == mode.Z.shape[1]
            for member in (mode, *members)
        ]
        if not members or not all(same):
            raise InputError(
                "`members` must be posteriors with Gaussian noise, with the input columns and the "
                "number of outputs of `mode`, and at least one."
            )
        w = member_weights
        if w is None:
            w = mode.Z.new_full((len(members),), 1 / len(members))
        total = w.sum().item()
        if len(w) != len(members) or not bool((w > 0).all()) or not isclose(total, 1, rel_tol=1e-5):
            raise InputError(
                f"`member_weights` must be {len(members)} positive numbers that sum to one, one "
                f"for each member; got {w.tolist()}."
            )
        self.mode = mode
        self._members = nn.ModuleList(members)
        self.register_buffer("member_weights", w.detach().to(mode.Z) / total)

    @property
    def members(self) -> list[Posterior]:
        """The posteriors."""
        return [member for member in self._members if isinstance(member, Posterior)]

    @property
    def S(self) -> int:
        """Number of posteriors."""
        return len(self._members)

    @property
    def component_weights(self) -> Float[Tensor, " S"]:
        """Weights of the members."""
        return self.member_weights

    @property
    def constant_weight(self) -> float:
        """Weight of the members that are constants; zero if there are none."""
        each = zip(self.members, self.member_weights.tolist(), strict=True)
        return sum(weight for member, weight in each if isinstance(member.kernel, ConstantKernel))

    @property
    def described(self) -> Posterior:
        """The posterior at the mode, which `Z`, `kernel` and `mean` describe."""
        return self.mode

    @property
    def likelihood(self) -> Likelihood:
        """Likelihood of the mode."""
        return self.mode.likelihood

    @property
    def noise(self) -> Float[Tensor, " Q"]:
        """Expected variance of the noise: one for all outputs, or one each."""
        each = [m.likelihood for m in self.members]
        noises = [one.noise for one in each if isinstance(one, GaussianLikelihood)]
        return mixed(torch.stack(noises), self.member_weights)

    def predict_mean(self, X: Float[Tensor, "N D"]) -> Float[Tensor, "N P"]:
        """Return E[f(x)] of each row, O(S M) per row."""
        means = [member.predict_mean(X) for member in self.members]
        return mixed(torch.stack(means), self.member_weights)

    def component_predictions(
        self,
        X: Float[Tensor, "N D"],
        *,
        observed: bool = False,
        noise: Float[Tensor, "N P"] | None = None,
    ) -> Prediction:
        """Return means and variances of the members, `[S N P]` each; O(S M²) per row."""
        each = [member.predict(X, observed=observed, noise=noise) for member in self.members]
        return Prediction(
            torch.stack([one.mean for one in each]), torch.stack([one.variance for one in each])
        )

    def covariance(
        self,
        X: Float[Tensor, "N D"],
        *,
        observed: bool = False,
        noise: Float[Tensor, "N P"] | None = None,
    ) -> Float[Tensor, "P N N"]:
        """Return the full covariance of the rows, Σ_s w_s (C_s + (m_s − m)(m_s − m)ᵀ).

        Args:
            observed: whether to add Gaussian noise.
            noise: known noise variances of the observations, in addition to the learnt one.
        """
        members = self.members
        means = torch.stack([member.predict_mean(X) for member in members])  # [S N P]
        offset = means - mixed(means, self.member_weights)
        between = torch.einsum("s,sip,sjp->pij", self.member_weights, offset, offset)
        own = [member.covariance(X, observed=observed, noise=noise) for member in members]
        return mixed(torch.stack(own), self.member_weights) + between

    def sample(
        self,
        X: Float[Tensor, "N D"],
        n: int,
        *,
        observed: bool = False,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "S N P"]:
        """Return `n` samples of the functions, drawn jointly at the rows; O(S N³) once.

        Each comes from a member that is drawn at random.

        Args:
            observed: whether to sample observations y rather than f.
        """
        counts, order = self._draws(n, generator)
        drawn = [
            member.sample(X, count, observed=observed, generator=generator)
            for member, count in zip(self.members, counts, strict=True)
            if count
        ]
        return torch.cat([X.new_zeros(0, len(X), self.P), *drawn])[order.to(X.device)]

    def paths(
        self, n: int, *, frequencies: int = FREQUENCIES, generator: torch.Generator | None = None
    ) -> "MixturePaths":
        """Return `n` functions, each drawn from a member that is drawn at random."""
        counts, order = self._draws(n, generator)
        drawn = [
            PosteriorPaths(member, count, frequencies=frequencies, generator=generator)
            for member, count in zip(self.members, counts, strict=True)
            if count
        ]
        return MixturePaths(drawn, order, P=self.P)

    def _draws(self, n: int, generator: torch.Generator | None) -> tuple[list[int], Tensor]:
        """Return the number of draws of each member, and a random order of all draws."""
        device = torch.device("cpu") if generator is None else generator.device
        uniform = torch.rand(n, generator=generator, dtype=torch.double, device=device)
        chosen = torch.searchsorted(self.member_weights.double().to(device).cumsum(0)[:-1], uniform)
        order = torch.randperm(n, generator=generator, device=device)
        return torch.bincount(chosen, minlength=self.S).tolist(), order


@final
class MixturePaths(nn.Module):
    """Functions drawn from a `MixturePosterior`; each is a path of one member.

    Args:
        paths: the functions of some members.
        order: the order in which they are returned.
        P: number of outputs of each function.
    """

    order: Tensor

    def __init__(self, paths: list[PosteriorPaths], order: Tensor, *, P: int) -> None:
        super().__init__()
        self._paths, self._P = nn.ModuleList(paths), P
        self.register_buffer("order", order)

    @property
    def n(self) -> int:
        """Number of functions."""
        return len(self.order)

    def forward(self, X: Float[Tensor, "N D"]) -> Float[Tensor, "S N P"]:
        """Return the values of the functions at the same rows, differentiable in the rows."""
        none = X.new_zeros(0, len(X), self._P)
        return torch.cat([none, *(paths(X) for paths in self._paths)])[self.order]


@torch.no_grad()
def subset_mixture(
    model: SparseGP, data: Source, masks: Bool[Tensor, "S K"], *, mode: Bool[Tensor, " K"]
) -> MixturePosterior:
    """Return the mixture of the posteriors of S subsets of the candidates of a model.

    All of them come from one pass over the data, O(N K²); each subset then takes O(K² M).

    Args:
        model: model with K candidates and fixed parameters.
        data: the rows.
        masks: subsets, such as samples of the posterior over subsets
            (`SubsetSamples.pooled`, or some of them).
        mode: subset that the attributes of the mixture describe, such as the best one.
    """
    if masks.shape[1] != model.K or len(mode) != model.K:
        raise InputError(
            f"`masks` and `mode` must be over the {model.K} candidates of the model; got "
            f"{masks.shape[1]} and {len(mode)}."
        )
    L, moments = model.moments(data)

    def posterior(mask: Bool[Tensor, " K"]) -> Posterior:
        T, own = restrict_moments(L, moments, mask)
        q_mean, q_factor = model.optimal_q(data, tuple(own))
        return Posterior(
            model.kernel,
            model.candidates.detach()[mask],
            mean=model.mean,
            likelihood=model.likelihood,
            q_mean=q_mean,
            q_factor=q_factor,
            L=T,
        )

    return MixturePosterior([posterior(mask) for mask in masks], mode=posterior(mode))


def mixture_moments(
    mean: Float[Tensor, "S N P"], variance: Float[Tensor, "S N P"], weights: Float[Tensor, " S"]
) -> Prediction:
    """Return mean and variance of mixtures of S distributions."""
    centre = mixed(mean, weights)
    return Prediction(centre, mixed(variance + (mean - centre).square(), weights))


def mixed(
    values: Float[Tensor, "S *shape"], weights: Float[Tensor, " S"]
) -> Float[Tensor, "*shape"]:
    """Return Σ_s w_s v_s."""
    return torch.tensordot(weights.to(values), values, 1)
