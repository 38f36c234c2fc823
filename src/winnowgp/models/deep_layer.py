"""Layers of deep Gaussian processes: their q(f), initial state and propagation of samples."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import final

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float
from torch import Tensor, nn

from winnowgp.bounds.collapsed import Subset
from winnowgp.bounds.uncollapsed import marginals, subset_marginal, whitened_kl
from winnowgp.errors import InputError
from winnowgp.linalg import cholesky, solve_lower
from winnowgp.models.base import check_kernel, copy_with
from winnowgp.models.kernels import covariance, prior_variance
from winnowgp.models.observations import Prediction
from winnowgp.models.stationary import RBFProfile, StationaryForm, stationary_form
from winnowgp.typing import Mask, Masks

HIDDEN_MEANS = ("identity", "zero")

# A variance of zero has a square root without a derivative.
_LEAST_VARIANCE = 1e-20


@dataclass(frozen=True, slots=True)
class LayerPoints:
    """Inducing points of a layer and their q(v) in a forward pass: all of them, or S subsets."""

    Z: Float[Tensor, "*S M D"]
    L: Float[Tensor, "*S M M"]
    q_mean: Float[Tensor, "*S M P"]
    q_factor: Float[Tensor, "*S P M M"]
    present: Bool[Tensor, "*S M"]
    """False for padding of the smaller subsets."""

    def kl(self) -> Float[Tensor, "*S"]:
        """Return Σ_p KL[q(u_p) ‖ p(u_p)] in nats."""
        return whitened_kl(self.q_mean, self.q_factor, triangular=True)


@final
class DeepLayer(nn.Module):
    """P Gaussian processes that share kernel and candidates, with a linear mean function.

        f_p(x) = xᵀ A_p + c_p + g_p(x),  g_p ~ GP(0, k),  q(v_p) = N(m_p, F_p F_pᵀ),  u = L v

    Args:
        kernel: a GPyTorch kernel without batch shape; copied.
        candidates: locations of the candidates, `[K D]`; copied, and learnt unless frozen.
        outputs: number of outputs, P.
        slope: A, `[D P]`, held fixed; zero by default.
        q_scale: initial F_p is this number times the identity. It is small in hidden layers, so
            that a deep model starts as the deterministic function of its means (Salimbeni &
            Deisenroth 2017).
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
        """Return the prior mean of each row."""
        return X @ self.slope + self.level

    def points(self) -> LayerPoints:
        """Return all candidates with their q(v)."""
        Kuu = layer_covariance(self.kernel, self.candidates, self.candidates)
        everywhere = torch.ones(self.K, dtype=torch.bool, device=Kuu.device)
        factor = self.q_factor.tril()
        return LayerPoints(self.candidates, cholesky(Kuu).L, self.q_mean, factor, everywhere)

    def subset_points(self, mask: Masks) -> LayerPoints:
        """Return S subsets, each with its marginal of q(u); O(S M K² P)."""
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
        """Return q(f_p(x)) of each row: independent Gaussians, O(P N M²) per batch element."""
        return self.whitened_marginals(X, points)[1]

    def whitened_marginals(
        self, X: Float[Tensor, "*S N D"], points: LayerPoints
    ) -> tuple[Float[Tensor, "... M N"], Prediction]:
        """Return V = L⁻¹ K_uf, and q(f_p(x)) of each row, which follows from it."""
        Kuf = layer_covariance(self.kernel, points.Z, X)
        if points.Z.dim() > 2:
            Kuf = Kuf * points.present[..., None]
        V = solve_lower(points.L, Kuf)
        mean, variance = marginals(
            V,
            kff=_layer_variance(self.kernel, X),
            q_mean=points.q_mean,
            q_factor=points.q_factor,
        )
        return V, Prediction(self.centre(X) + mean, variance)

    @torch.no_grad()
    def prune(self, mask: Mask) -> "DeepLayer":
        """Return a new layer with only the selected candidates, and their marginal of q(u)."""
        points = self.subset_points(mask[None])
        return self.with_q(self.candidates[mask], points.q_mean[0], points.q_factor[0])

    @torch.no_grad()
    def grown(self, points: Float[Tensor, "J D"]) -> "DeepLayer":
        """Return a new layer with further candidates and the same q(f).

        Their q(u) given the others is the prior: in whitened coordinates N(0, I), independent of
        the others, which adds nothing to the KL divergence.
        """
        J, P = len(points), self.P
        new = torch.eye(J, dtype=points.dtype, device=points.device).repeat(P, 1, 1)
        blocks = zip(self.q_factor.tril(), new, strict=True)
        return self.with_q(
            torch.cat([self.candidates, points]),
            torch.cat([self.q_mean, self.q_mean.new_zeros(J, P)]),
            torch.stack([torch.block_diag(*pair) for pair in blocks]),
        )

    def with_q(
        self,
        candidates: Float[Tensor, "J D"],
        q_mean: Float[Tensor, "J P"],
        q_factor: Float[Tensor, "P J J"],
    ) -> "DeepLayer":
        """Return a new layer with the same kernel and mean, and other candidates and q(u)."""
        return copy_with(self, candidates, q_mean=q_mean, q_factor=q_factor)


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
    """Return layers whose hidden functions start as nearly deterministic linear functions.

    Args:
        X: inputs, for their principal components.
        points: candidates of the first layer; those of later layers are their images.
        kernel: function that returns the kernel of a layer from its number, 0 for the first, and
            its number of inputs.
        widths: number of outputs of each layer; the last is the number of latent functions of the
            likelihood.
        skip_connections: whether layers after the first also receive the observed input.
        hidden_mean: mean function of hidden layers: "identity", or "zero" for layers that are
            pre-trained on the targets (`training.train_layerwise`).
        q_scale: initial standard deviation of the whitened q(u) in hidden layers. With that of the
            prior, the samples of the first steps hide the signal from the last layer.
    """
    if not widths or min(widths) < 1:
        raise InputError(f"`widths` must be one positive number per layer; got {list(widths)}.")
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
        # The level of a hidden function is not identified: the next layer can absorb it.
        layer.level.requires_grad_(last)
        layers.append(layer)
        inputs, Z = inputs @ slope, Z @ slope
        if skip_connections:
            inputs, Z = torch.cat([inputs, X], 1), torch.cat([Z, points], 1)
    return layers


def linear_map(X: Float[Tensor, "N D"], width: int) -> Float[Tensor, "D P"]:
    """Return the identity, padded by zeros for more outputs, or principal components for fewer."""
    D = X.shape[1]
    if width < D:
        # Few rows span too few directions; arbitrary orthogonal ones complete them.
        Vh = torch.linalg.svd(X - X.mean(0), full_matrices=len(X) < width).Vh
        return Vh[:width].mT.contiguous()
    return torch.eye(D, width, dtype=X.dtype, device=X.device)


def _rbf_form(kernel: Kernel, D: int) -> StationaryForm | None:
    """Return the form of a scaled RBF kernel on D columns, and None for other kernels."""
    form = stationary_form(kernel, D)
    return form if form is not None and isinstance(form.profile, RBFProfile) else None


def _layer_variance(kernel: Kernel, X: Float[Tensor, "*S N D"]) -> Float[Tensor, "*S N"]:
    """Return the prior variance of each row, as `layer_covariance`."""
    form = _rbf_form(kernel, X.shape[-1])
    return prior_variance(kernel, X) if form is None else form.variance.expand(X.shape[:-1])


def layer_covariance(
    kernel: Kernel, A: Float[Tensor, "*#S R D"], B: Float[Tensor, "*#S C D"]
) -> Float[Tensor, "*S R C"]:
    """Return the dense prior covariance, differentiable; quicker than GPyTorch's for RBF kernels.

    GPyTorch compares both arguments in every call, for which the CPU has to wait for a GPU.
    """
    form = _rbf_form(kernel, A.shape[-1])
    if form is None or 0 in (A.shape[-2], B.shape[-2]):
        return covariance(kernel, A, B)
    # log k = a·b − ½‖a‖² − ½‖b‖², of rows in lengthscales from a centre.
    centre = A.detach().mean(-2, keepdim=True)
    a = (A - centre) / form.lengthscales
    b = a if A is B else (B - centre) / form.lengthscales
    u = a @ b.mT - 0.5 * a.square().sum(-1)[..., :, None] - 0.5 * b.square().sum(-1)[..., None, :]
    if A is B:
        u = u.diagonal_scatter(torch.zeros_like(u[..., 0]), dim1=-2, dim2=-1)
    return form.variance * u.clamp_max(0).exp()


@dataclass(frozen=True, slots=True)
class Propagation:
    """Inputs and outputs of each layer; leading axes are subsets, then samples.

    The input of the first layer is not sampled, so its axis of samples has length one.
    """

    inputs: list[Tensor]
    """Inputs of each layer, `[.. T N D]`."""
    outputs: list[Prediction]
    """q of each layer's functions given its inputs, `[.. T N P]`."""
    whitened: list[Tensor]
    """V = L⁻¹ K_uf of each layer, `[.. M T·N]`."""

    @property
    def last(self) -> Prediction:
        """q of the last layer's functions, one Gaussian for each sample."""
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
    eps: Sequence[Tensor],
    skip_connections: bool,
) -> Propagation:
    """Return T samples of every layer but the last, and q of the last layer's functions given them.

    The marginal of a row depends on its own input to each layer only (Salimbeni & Deisenroth 2017),
    so that samples h = mean + sd · ε are drawn row by row.

    Args:
        points: inducing points of each layer, all with the same leading axes S.
        eps: ε of each layer but the last, `[T N H]`, or `[T 1 H]` for the same in every row.
    """
    inputs, outputs, whitened = X[None], [], []
    trail = [inputs]
    for number, (layer, used) in enumerate(zip(layers, points, strict=True)):
        # Samples are further rows: one large product is faster than one for each sample.
        V, flat = layer.whitened_marginals(inputs.flatten(-3, -2), used)
        shape = inputs.shape[-3:-1]
        output = Prediction(flat.mean.unflatten(-2, shape), flat.variance.unflatten(-2, shape))
        outputs.append(output)
        whitened.append(V)
        if number < len(layers) - 1:
            sd = output.variance.clamp_min(_LEAST_VARIANCE).sqrt()
            hidden = output.mean + sd * eps[number]
            inputs = layer_inputs(hidden, X, skip_connections=skip_connections)
            trail.append(inputs)
    return Propagation(trail, outputs, whitened)
