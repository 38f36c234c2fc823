"""One layer of a deep GP, and its initial state."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import final

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float
from torch import Tensor, nn

from winnowgp.bounds import Subset, marginals, subset_marginal, whitened_kl
from winnowgp.errors import InputError
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.models.base import check_kernel
from winnowgp.models.kernels import covariance, prior_variance
from winnowgp.models.likelihoods import Prediction
from winnowgp.typing import Mask, Masks

# One layer of a deep Gaussian process, and the points that a pass through it uses.


@dataclass(frozen=True, slots=True)
class LayerPoints:
    """Inducing points and their q(v) as one pass sees them: all of them, or S subsets at once."""

    Z: Float[Tensor, "*S M D"]
    L: Float[Tensor, "*S M M"]
    q_mean: Float[Tensor, "*S M P"]
    q_factor: Float[Tensor, "*S P M M"]
    present: Bool[Tensor, "*S M"]
    """False where a place is padding."""

    def kl(self) -> Float[Tensor, "*S"]:
        """Σ_p KL[q(u_p) ‖ p(u_p)] in nats."""
        return whitened_kl(self.q_mean, self.q_factor)

    def over_samples(self) -> "LayerPoints":
        """The same for inputs that carry one more axis, of samples, after that of the subsets."""
        return LayerPoints(
            self.Z.unsqueeze(-3),
            self.L.unsqueeze(-3),
            self.q_mean.unsqueeze(-3),
            self.q_factor.unsqueeze(-4),
            self.present.unsqueeze(-2),
        )


@final
class DeepLayer(nn.Module):
    """P Gaussian processes that share kernel and candidates, around a fixed linear map.

        f_p(x) = xᵀ A_p + c_p + g_p(x),  g_p ~ GP(0, k),  q(v_p) = N(m_p, F_p F_pᵀ),  u = L v

    Args:
        kernel: any GPyTorch kernel without batch shape; copied.
        candidates: where inducing points may be, `[K D]`; copied, and learnt unless frozen.
        outputs: P.
        slope: A, `[D P]`, held fixed; zero by default.
        q_scale: starting value of F_p, times the identity. Small in hidden layers, so that a deep
            model starts out as the deterministic map of its means (Salimbeni & Deisenroth 2017).
    """

    slope: Tensor

    def __init__(
        self,
        kernel: Kernel,
        candidates: Float[Tensor, "K D"],
        *,
        outputs: int,
        slope: Float[Tensor, "D P"] | None = None,
        q_scale: float = 1.0,
    ) -> None:
        super().__init__()
        check_kernel(kernel, candidates)
        K, D = candidates.shape
        like = candidates.detach()
        slope = like.new_zeros(D, outputs) if slope is None else slope.to(like)
        if slope.shape != (D, outputs):
            raise InputError(
                f"`slope` must be [{D} {outputs}], from inputs to outputs; "
                f"got shape {list(slope.shape)}."
            )
        self.kernel = deepcopy(kernel).to(like)
        self.candidates = nn.Parameter(like.clone())
        self.level = nn.Parameter(like.new_zeros(outputs))
        self.q_mean = nn.Parameter(like.new_zeros(K, outputs))
        eye = torch.eye(K, dtype=like.dtype, device=like.device)
        self.q_factor = nn.Parameter(q_scale * eye.repeat(outputs, 1, 1))
        self.register_buffer("slope", slope.detach().clone())

    @property
    def K(self) -> int:
        """Number of candidates."""
        return self.candidates.shape[0]

    @property
    def D(self) -> int:
        """Number of inputs."""
        return self.candidates.shape[1]

    @property
    def P(self) -> int:
        """Number of outputs."""
        return self.level.shape[0]

    def centre(self, X: Float[Tensor, "*S N D"]) -> Float[Tensor, "*S N P"]:
        """Prior mean of each row."""
        return X @ self.slope + self.level

    def points(self) -> LayerPoints:
        """All candidates."""
        Kuu = covariance(self.kernel, self.candidates, self.candidates)
        everywhere = torch.ones(self.K, dtype=torch.bool, device=Kuu.device)
        factor = self.q_factor.tril()
        return LayerPoints(self.candidates, cholesky(Kuu).L, self.q_mean, factor, everywhere)

    def subset_points(self, mask: Masks) -> LayerPoints:
        """S subsets, each with the marginal of q(u) on it; O(S M K² P)."""
        subset = Subset.of(mask)
        Kuu = covariance(self.kernel, self.candidates, self.candidates)
        mean, factor = subset_marginal(Kuu, self.q_mean, self.q_factor.tril(), mask=mask)
        return LayerPoints(
            Z=self.candidates[subset.index],
            L=cholesky(subset.square(Kuu)).L,
            q_mean=mean,
            q_factor=factor,
            present=subset.present,
        )

    def marginals(self, X: Float[Tensor, "*S N D"], points: LayerPoints) -> Prediction:
        """q(f_p(x)) of each row: independent Gaussians, O(P N M²) a batch element."""
        Kuf = covariance(self.kernel, points.Z, X) * points.present[..., None]
        V = solve_lower(points.L, Kuf)
        mean, variance = marginals(
            V,
            kff=prior_variance(self.kernel, X),
            q_mean=points.q_mean,
            q_factor=points.q_factor,
        )
        return Prediction(self.centre(X) + mean, variance)

    @torch.no_grad()
    def prune(self, mask: Mask) -> "DeepLayer":
        """A new layer with only the candidates that `mask` keeps, and the marginal q(u) of them."""
        points = self.subset_points(mask[None])
        return self.with_q(self.candidates[mask], points.q_mean[0], points.q_factor[0])

    def with_q(
        self,
        candidates: Float[Tensor, "J D"],
        q_mean: Float[Tensor, "J P"],
        q_factor: Float[Tensor, "P J J"],
    ) -> "DeepLayer":
        """A new layer with the same kernel and mean, and other points and q(u)."""
        copied = deepcopy(self)
        learnt = self.candidates.requires_grad
        copied.candidates = nn.Parameter(candidates.detach().clone(), requires_grad=learnt)
        copied.q_mean = nn.Parameter(q_mean.detach().contiguous().clone())
        copied.q_factor = nn.Parameter(q_factor.detach().contiguous().clone())
        return copied


# Where a deep model starts: layers that together are nearly a shallow one.


HIDDEN_MEANS = ("identity", "zero")


def deep_layers(
    X: Float[Tensor, "N D"],
    points: Float[Tensor, "K D"],
    *,
    kernel: Callable[[int, int], Kernel],
    widths: Sequence[int],
    skip_connections: bool = False,
    hidden_mean: str = "identity",
    q_scale: float = 1e-3,
) -> list[DeepLayer]:
    """Layers whose hidden functions start as linear maps with almost no doubt about them.

    Args:
        X: inputs, for their principal components.
        points: candidates of the first layer; those of the next are their images.
        kernel: makes the kernel of a layer from its number, 0 for the first, and its number of
            inputs.
        widths: number of outputs of each layer, the last that of the likelihood's functions.
        skip_connections: whether layers after the first also receive the observed input.
        hidden_mean: "identity", or "zero" for hidden functions that are to be pre-trained on the
            targets instead (`training.train_layerwise`).
        q_scale: standard deviation of the whitened q(u) in hidden layers at the start. Started at
            that of the prior instead, the first steps drown what the last layer could learn.
    """
    if not widths or min(widths) < 1:
        raise InputError(f"`widths` must be one positive number a layer; got {list(widths)}.")
    if hidden_mean not in HIDDEN_MEANS:
        raise InputError(
            f"`hidden_mean` must be one of {', '.join(HIDDEN_MEANS)}; got {hidden_mean!r}."
        )
    layers, inputs, Z = [], X, points
    for number, width in enumerate(widths):
        last = number == len(widths) - 1
        slope = linear_map(inputs, width)
        layer = DeepLayer(
            kernel(number, Z.shape[1]),
            Z,
            outputs=width,
            slope=None if last or hidden_mean == "zero" else slope,
            q_scale=1.0 if last else q_scale,
        )
        # Hidden functions have no level of their own to learn: the next layer can take any.
        layer.level.requires_grad_(last)
        layers.append(layer)
        inputs, Z = inputs @ slope, Z @ slope
        if skip_connections:
            inputs, Z = torch.cat([inputs, X], 1), torch.cat([Z, points], 1)
    return layers


def linear_map(X: Float[Tensor, "N D"], width: int) -> Float[Tensor, "D P"]:
    """The identity; padded by zeros to more outputs, principal components for fewer."""
    D = X.shape[1]
    if width < D:
        # Few rows span too few directions: any that are orthogonal to them do for the rest.
        found = torch.linalg.svd(X - X.mean(0), full_matrices=len(X) < width)
        return found.Vh[:width].mT.contiguous()
    return torch.eye(D, width, dtype=X.dtype, device=X.device)


# Samples that travel through the layers of a deep Gaussian process.


# A variance of zero has a square root without a derivative.
_LEAST_VARIANCE = 1e-20


@dataclass(frozen=True, slots=True)
class Propagation:
    """What each layer saw and what it said; leading axes are subsets, then samples.

    The first layer sees no samples, so its axis of samples has length one.
    """

    inputs: list[Tensor]
    """Of each layer, `[.. T N D]`."""
    outputs: list[Prediction]
    """q of each layer's functions given its inputs, `[.. T N P]`."""

    @property
    def last(self) -> Prediction:
        """q of the functions that the likelihood sees, one Gaussian for each sample."""
        return self.outputs[-1]


def layer_inputs(
    hidden: Float[Tensor, "*S N H"], X: Float[Tensor, "N D"], *, skip_connections: bool
) -> Float[Tensor, "*S N I"]:
    """Return the inputs of a later layer: the previous outputs, then X if there are skips."""
    if not skip_connections:
        return hidden
    return torch.cat([hidden, X.expand(*hidden.shape[:-1], X.shape[-1])], dim=-1)


def propagated(
    layers: Sequence[DeepLayer],
    points: Sequence[LayerPoints],
    X: Float[Tensor, "N D"],
    *,
    noise: Sequence[Tensor],
    skip_connections: bool,
) -> Propagation:
    """T samples of every layer but the last, and q of the last layer's functions given them.

    Each row travels alone: its marginal in a layer depends on its own place in the layer before and
    on nothing else (Salimbeni & Deisenroth 2017), so a sample is h = mean + sd · ε row by row.

    Args:
        points: of each layer, all with the same leading axes S.
        noise: ε of each layer but the last, `[T N H]`, or `[T 1 H]` for the same in every row.
    """
    inputs, outputs = X[None], []
    trail = [inputs]
    for number, (layer, used) in enumerate(zip(layers, points, strict=True)):
        found = layer.marginals(inputs, used.over_samples())
        outputs.append(found)
        if number < len(layers) - 1:
            sd = found.variance.clamp_min(_LEAST_VARIANCE).sqrt()
            hidden = found.mean + sd * noise[number]
            inputs = layer_inputs(hidden, X, skip_connections=skip_connections)
            trail.append(inputs)
    return Propagation(trail, outputs)
