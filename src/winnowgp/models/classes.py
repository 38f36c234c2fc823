"""Classes: integrals of probit and softmax likelihoods over Gaussian latents.

E log Φ(s f) of two classes is integrated by Gauss-Hermite quadrature, with one pass for value and
gradient. Integrals of softmax are means over fixed quasi-random nodes.
"""

from dataclasses import dataclass, replace
from math import log, pi, sqrt
from typing import Any, final

import torch
from gpytorch.likelihoods import SoftmaxLikelihood
from jaxtyping import Float, Int
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.models.observations import EXPECTATION_NODES, ObservationModel, Prediction, examples
from winnowgp.models.quadrature import hermite_nodes, normal_nodes, standard_deviation

# Quasi-random nodes of softmax, for expectations and for densities; each is used with its
# reflection.
SOFTMAX_NODES, SOFTMAX_DENSITY_NODES = 64, 512

_MIN_SOFTMAX_NODES = 16
# Numbers in memory at once for densities of softmax: 32 MiB.
_SOFTMAX_NUMBERS = 2**22
# Rows of softmax computed at once, fewer if there are many classes: 16 MiB of probabilities.
_ROWS, _NUMBERS = 512, 2**21


@final
class BernoulliObservations(ObservationModel):
    """Two classes 0 and 1 under a probit link."""

    def check_targets(self, Y: Float[Tensor, "N P"]) -> None:
        if not bool(((Y == 0) | (Y == 1)).all()):
            raise InputError(
                f"Bernoulli targets must be 0 or 1; got {examples(Y[(Y != 0) & (Y != 1)])}."
            )

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Integrate log Φ, which GPyTorch's own `log_prob` gets wrong by 2e-3 nats at z = −1."""
        z, weights = hermite_nodes(EXPECTATION_NODES, mean)
        flat = probit_expectation(
            (2 * Y - 1).expand(mean.shape).flatten(),
            mean.flatten(),
            variance.flatten(),
            nodes=z.flatten(),
            weights=weights.flatten(),
        )
        return flat.reshape(mean.shape)

    def log_density(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        # E[Φ((2y − 1) f)] = Φ((2y − 1) mean / √(1 + variance))
        return torch.special.log_ndtr((2 * Y - 1) * mean / (1 + variance).sqrt())

    def predict(self, mean: Tensor, variance: Tensor) -> Prediction:
        probability = torch.special.ndtr(mean / (1 + variance).sqrt())
        return Prediction(probability, probability * (1 - probability))

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        raise InputError("classes have no quantiles; predict their probabilities instead.")


@final
@dataclass(frozen=True)
class SoftmaxObservations(ObservationModel):
    """Class numbers in one column; each class probability depends on all latent functions."""

    likelihood: SoftmaxLikelihood
    density_nodes: int = SOFTMAX_DENSITY_NODES
    """Nodes of densities and probabilities."""

    def for_mixture(self, components: int) -> "SoftmaxObservations":
        count = max(_MIN_SOFTMAX_NODES, SOFTMAX_DENSITY_NODES // components)
        return replace(self, density_nodes=count)

    def num_latents(self, targets: int) -> int:
        if targets != 1:
            raise InputError(
                f"softmax needs one column of class numbers; got {targets} target columns."
            )
        return self.likelihood.num_features

    def check_targets(self, Y: Float[Tensor, "N P"]) -> None:
        C = self.likelihood.num_classes
        impossible = (Y < 0) | (Y >= C) | (Y.round() != Y)
        if bool(impossible.any()):
            raise InputError(
                f"softmax targets must be class numbers 0 to {C - 1}; "
                f"got {examples(Y[impossible])}."
            )

    def expected_log_prob(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        if self.likelihood.mixing_weights is None:
            classes = Y[:, 0].long().expand(mean.shape[:-1]).flatten()
            latents = (mean.reshape(-1, mean.shape[-1]), variance.reshape(-1, mean.shape[-1]))
            return softmax_expectation(classes, *latents).reshape(*mean.shape[:-1], 1)
        f = _latent_nodes(mean, variance, SOFTMAX_NODES)
        observed = self._logits(mean).gather(-1, Y.long().expand(*mean.shape[:-1], 1))
        return observed - self._logits(f).logsumexp(-1, keepdim=True).mean(0)

    def log_density(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return self._log_probability(mean, variance).gather(1, Y.long())

    def predict(self, mean: Tensor, variance: Tensor) -> Prediction:
        probability = self._log_probability(mean, variance).exp()
        return Prediction(probability, probability * (1 - probability))

    def cdf(self, Y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        raise InputError("classes have no quantiles; predict their probabilities instead.")

    def coupling(self, mean: Tensor, variance: Tensor) -> Float[Tensor, "N F F"]:
        if self.likelihood.mixing_weights is None:
            return softmax_coupling(mean, variance)
        mixing = self.likelihood.mixing_weights.detach()
        p = self._logits(_latent_nodes(mean, variance, SOFTMAX_NODES)).softmax(-1).detach()
        p = p.permute(1, 2, 0)
        classes = torch.diag_embed(p.mean(-1)) - p @ p.mT / p.shape[-1]
        return mixing.mT @ classes @ mixing

    def _logits(self, f: Tensor) -> Tensor:
        """Return the logits; GPyTorch's `forward` transposes f if it has a row per class."""
        mixing = self.likelihood.mixing_weights
        return f if mixing is None else f @ mixing.mT

    def _log_probability(
        self, mean: Float[Tensor, "N F"], variance: Float[Tensor, "N F"]
    ) -> Float[Tensor, "N C"]:
        """Return log E_q(f)[softmax(f)] of each row, in blocks of rows."""
        count = self.density_nodes
        widest = max(self.likelihood.num_classes, self.likelihood.num_features)
        rows = max(1, _SOFTMAX_NUMBERS // (2 * max(count, 2 * widest) * widest))
        blocks = zip(mean.split(rows), variance.split(rows), strict=True)
        nodes = (_latent_nodes(m, v, count) for m, v in blocks)
        return torch.cat(
            [self._logits(f).log_softmax(-1).logsumexp(0) - log(len(f)) for f in nodes]
        )


def _latent_nodes(mean: Tensor, variance: Tensor, count: int) -> Tensor:
    """Return nodes `[T *S N F]` of F independent Gaussians per row, the same for every row."""
    nodes = normal_nodes(count, mean.shape[-1]).to(mean)
    shape = [len(nodes)] + [1] * (mean.dim() - 1) + [mean.shape[-1]]
    return mean + standard_deviation(variance) * nodes.reshape(shape)


def probit_expectation(
    sign: Float[Tensor, " N"],
    mean: Float[Tensor, " N"],
    variance: Float[Tensor, " N"],
    *,
    nodes: Float[Tensor, " T"],
    weights: Float[Tensor, " T"],
) -> Float[Tensor, " N"]:
    """Return E log Φ(s f) of each row in nats, once differentiable in mean and variance."""
    nats: Any = _ProbitExpectation.apply(mean, variance, sign, nodes, weights)
    return nats


class _ProbitExpectation(torch.autograd.Function):
    """E log Φ(s f) over nodes ε_t of N(0, 1) with weights w_t; z_t = s (μ + σ ε_t) and h = φ/Φ.

    E = Σ_t w_t log Φ(z_t),   ∂E/∂μ = s Σ_t w_t h(z_t),   ∂E/∂σ² = s Σ_t w_t ε_t h(z_t) / (2σ).
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, variance: Tensor, sign: Tensor, nodes: Tensor, weights: Tensor
    ) -> Tensor:
        deviation = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        z = torch.addcmul(sign * mean, nodes[:, None], sign * deviation)
        # 2 Φ(z) = erfc(−z/√2)
        square = z.square().mul_(-0.5)
        twice = torch.special.erfc(z * -sqrt(0.5))
        nats = twice.log().sub_(log(2))
        h = square.exp().mul_(sqrt(2 / pi)).div_(twice)
        far = z < -sqrt(0.2 * log(torch.finfo(z.dtype).max))
        if bool(far.any()):
            # erfcx(−z/√2) = 2 Φ(z) e^{z²/2}, several times slower, and accurate in the tail.
            scaled = torch.special.erfcx(z[far] * -sqrt(0.5))
            nats[far] = scaled.log().sub_(log(2)).add_(square[far])
            h[far] = scaled.reciprocal_().mul_(sqrt(2 / pi))
        if any(ctx.needs_input_grad):
            # h = φ/Φ
            level, tilt = torch.stack([weights, weights * nodes]) @ h
            # √variance has no derivative at zero.
            curvature = torch.where(variance > 0, 0.5 * sign * tilt / deviation, 0.0)
            ctx.save_for_backward(sign * level, curvature)
        return weights @ nats

    # The type of `once_differentiable` has positional parameters only.
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *output: Tensor
    ) -> tuple[Tensor | None, ...]:
        slope, curvature = ctx.saved_tensors
        return output[0] * slope, output[0] * curvature, None, None, None


def softmax_expectation(
    classes: Int[Tensor, " N"], mean: Float[Tensor, "N C"], variance: Float[Tensor, "N C"]
) -> Float[Tensor, " N"]:
    """Return E log softmax(f)_y of each row in nats, once differentiable in mean and variance."""
    nats: Any = _SoftmaxExpectation.apply(mean, variance, classes)
    return nats


@torch.no_grad()
def softmax_coupling(
    mean: Float[Tensor, "N C"], variance: Float[Tensor, "N C"]
) -> Float[Tensor, "N C C"]:
    """Return diag(mean p) − mean p pᵀ of each row, positive semi-definite; zero along (1, …, 1)."""
    coupling, basis = mean.new_empty(*mean.shape, mean.shape[1]), _basis(mean)
    for rows in _row_slices(mean, basis):
        _, p = _probabilities(mean[rows], variance[rows], basis)
        p = p.permute(2, 0, 1).contiguous()
        coupling[rows] = torch.diag_embed(p.mean(-1)) - p @ p.mT / p.shape[-1]
    return coupling


class _SoftmaxExpectation(torch.autograd.Function):
    """E log softmax(f)_y over nodes ε_t; f_t = μ + σ ε_t, p_t = softmax(f_t), means are over t.

        E = μ_y − mean log Σ_c exp f_tc
        ∂E/∂μ_c = [c = y] − mean p_tc,   ∂E/∂σ_c² = −mean p_tc ε_tc / (2σ_c)
        −∂²E/∂μ∂μᵀ = diag(mean p_t) − mean p_t p_tᵀ.

    One softmax gives all of them, in a fourth of the time of automatic differentiation for ten
    classes and 1,400 rows. Classes are the first axis, so that sums over them run along rows.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, classes: Tensor) -> Tensor:
        nats, basis = mean.gather(1, classes[:, None])[:, 0], _basis(mean)
        differentiable = any(ctx.needs_input_grad)
        # mean p, and mean p ε
        sums = mean.new_empty(mean.shape[1], 2, len(mean) if differentiable else 0)
        for rows in _row_slices(mean, basis):
            normaliser, p = _probabilities(mean[rows], variance[rows], basis)
            nats[rows] -= normaliser
            if differentiable:
                sums[..., rows] = basis @ p / p.shape[1]
        if differentiable:
            share, tilt = sums.permute(1, 2, 0)
            observed = torch.nn.functional.one_hot(classes, mean.shape[1])
            # √variance has no derivative at zero.
            curvature = torch.where(variance > 0, -0.5 * tilt / standard_deviation(variance), 0.0)
            ctx.save_for_backward(observed - share, curvature)
        return nats

    # The type of `once_differentiable` has positional parameters only.
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *output: Tensor
    ) -> tuple[Tensor | None, ...]:
        slope, curvature = ctx.saved_tensors
        return output[0][:, None] * slope, output[0][:, None] * curvature, None


def _probabilities(mean: Tensor, variance: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of log Σ_c exp f_tc `[N]`, and p `[C T N]`."""
    f = torch.bmm(basis.mT, torch.stack([mean.mT, standard_deviation(variance).mT], 1))
    top = f.amax(0)
    p = f.sub_(top).exp_()
    total = p.sum(0)
    p.div_(total)
    return total.log_().add_(top).mean(0), p


def _row_slices(mean: Tensor, basis: Tensor) -> list[slice]:
    """Return slices of rows whose probabilities `[C T N]` are computed together."""
    C, _, T = basis.shape
    count = max(1, min(_ROWS, _NUMBERS // (C * T)))
    return [slice(start, start + count) for start in range(0, len(mean), count)]


def _basis(mean: Tensor) -> Tensor:
    """Return (1, ε_t) of each class and node, `[C 2 T]`, which μ and σ combine to f."""
    nodes = normal_nodes(SOFTMAX_NODES, mean.shape[1]).to(mean).mT
    return torch.stack([torch.ones_like(nodes), nodes], 1)
