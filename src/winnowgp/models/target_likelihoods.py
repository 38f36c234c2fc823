"""A likelihood for each of several targets, such as a measurement, a count and a class.

Target p has a likelihood of its own with the latent function c_p + g_p(x), whose offset c_p is
learnt. Missing targets are NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from gpytorch import likelihoods
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.errors import InputError
from winnowgp.models.observations import ObservationModel, Prediction


@final
class TargetLikelihoods(Likelihood):
    """One likelihood for each target, and the offsets of their latent functions.

    Args:
        parts: a GPyTorch likelihood for each target, with one latent function.
        offset: initial offsets; zero by default.
    """

    def __init__(
        self, parts: Sequence[Likelihood], *, offset: Float[Tensor, " P"] | None = None
    ) -> None:
        super().__init__()
        self._parts = nn.ModuleList(parts)
        start = torch.zeros(len(parts), dtype=torch.float64) if offset is None else offset
        self.offset = nn.Parameter(start.detach().clone())

    @property
    def parts(self) -> tuple[Likelihood, ...]:
        """Likelihood of each target."""
        return tuple(part for part in self._parts if isinstance(part, Likelihood))

    def forward(self, function_samples: Tensor, *args: object, **kwargs: object) -> Any:
        """Raise an error: targets have distributions of different kinds."""
        raise InputError("several likelihoods have no common distribution; use each of `parts`.")


@final
@dataclass(frozen=True)
class TargetObservations(ObservationModel):
    """The observation models of several targets, column by column.

    Means of q(f) include the offsets.
    """

    likelihood: TargetLikelihoods
    parts: tuple[ObservationModel, ...]

    def num_latents(self, targets: int) -> int:
        if targets != len(self.parts):
            raise InputError(
                f"`likelihood` must have one entry for each of {targets} targets; got "
                f"{len(self.parts)}."
            )
        return targets

    def check_targets(self, Y: Float[Tensor, "N P"]) -> None:
        self.num_latents(Y.shape[1])
        for number, (part, y) in enumerate(zip(self.parts, Y.mT, strict=True)):
            try:
                part.check_targets(y[~torch.isnan(y), None])
            except InputError as error:
                raise InputError(f"target {number} (counted from 0): {error}") from error

    def initial_latent(self, Y: Float[Tensor, "N P"]) -> Float[Tensor, "N P"]:
        """Return rough values of the latent functions at given targets; NaN where they are.

        These are log(exp(y + ½) − 1) of counts, ±0.67 of classes and the logit of proportions.
        """
        columns = []
        for part, y in zip(self.likelihood.parts, Y.mT, strict=True):
            if isinstance(part, _COUNTS):
                # The inverse of softplus, the rate of counts.
                y = y + 0.5 + torch.log(-torch.expm1(-(y + 0.5)))
            elif isinstance(part, likelihoods.BernoulliLikelihood):
                y = torch.special.ndtri((y + 0.5) / 2)
            elif isinstance(part, likelihoods.BetaLikelihood):
                y = y.clamp(1e-3, 1 - 1e-3).logit()
            columns.append(y)
        return torch.stack(columns, 1)

    def site_precisions(self, Y: Float[Tensor, "N P"]) -> Float[Tensor, "N P"]:
        """Return precisions of Gaussian sites to start from; zero where none are known."""
        columns = []
        for part, y in zip(self.parts, Y.mT, strict=True):
            precision = part.initial_precision()
            if isinstance(part.likelihood, likelihoods.GaussianLikelihood):
                precision = part.likelihood.noise.detach().reciprocal()
            known = torch.zeros_like(y) if precision is None else precision.expand(y.shape)
            columns.append(known.masked_fill(torch.isnan(y), 0.0))
        return torch.stack(columns, 1)

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E_q(f)[log p(y | f)] of each row and target; zero where the target is missing."""
        nats = self._columns("expected_log_prob", self._filled(Y), mean, variance)
        return nats.masked_fill(torch.isnan(Y), 0.0)

    def log_density(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the log density of each row and target; NaN where the target is missing."""
        nats = self._columns("log_density", self._filled(Y), mean, variance)
        return nats.masked_fill(torch.isnan(Y), torch.nan)

    def predict(self, mean: Tensor, variance: Tensor) -> Prediction:
        predictions = [
            part.predict(m, v)
            for part, m, v in zip(self.parts, _split(mean), _split(variance), strict=True)
        ]
        means, variances = zip(*((each.mean, each.variance) for each in predictions), strict=True)
        return Prediction(torch.cat(means, -1), torch.cat(variances, -1))

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return self._columns("cdf", Y, mean, variance)

    def quantiles(self, mean: Tensor, variance: Tensor, probabilities: Tensor) -> Tensor:
        """Return quantiles of each target; that of a class is 0 or 1."""
        columns = []
        for part, m, v in zip(self.parts, _split(mean), _split(variance), strict=True):
            if isinstance(part.likelihood, likelihoods.BernoulliLikelihood):
                p = part.predict(m, v).mean.reshape(-1, *m.shape[-2:]).mean(0)
                # The least class y with P(y ≤ class) of at least the probability.
                columns.append((probabilities[:, None, None] > 1 - p).to(m))
            else:
                columns.append(part.quantiles(m, v, probabilities))
        return torch.cat(columns, -1)

    def _columns(self, method: str, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        columns = [
            getattr(part, method)(y, m, v)
            for part, y, m, v in zip(
                self.parts, _split(Y), _split(mean), _split(variance), strict=True
            )
        ]
        return torch.cat(columns, -1)

    def _filled(self, Y: Float[Tensor, "N P"]) -> Float[Tensor, "N P"]:
        """Return targets that are possible where they are missing."""
        parts = self.likelihood.parts
        fill = [0.5 if isinstance(part, likelihoods.BetaLikelihood) else 0.0 for part in parts]
        return torch.where(torch.isnan(Y), Y.new_tensor(fill), Y)


_COUNTS = (likelihoods.PoissonLikelihood, likelihoods.NegativeBinomialLikelihood)


def _split(values: Float[Tensor, "*S P"]) -> tuple[Tensor, ...]:
    return values.split(1, dim=-1)
