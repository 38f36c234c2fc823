"""Bounds of the rows of a `SparseGP` as functions of its parameters, with known gradients.

`ParametricBound` is differentiable by autograd. `ClosedForm` returns the gradient in the values of
the parameters themselves, for zero means and sums of RBF, Matérn and linear kernels: for few rows,
autograd through GPyTorch's constraints and kernels takes longer than the bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, LinearKernel, ScaleKernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean, ZeroMean
from jaxtyping import Float, Int
from torch import Tensor, nn

from winnowgp.bounds.evidence import evidence_gradient
from winnowgp.bounds.row_blocks import ChunkedKernel, DifferentiableChunks, RowBlocks
from winnowgp.bounds.streaming import Memory
from winnowgp.bounds.streaming_gradient import streaming_gradient
from winnowgp.bounds.two_pass import (
    BoundGradient,
    one_pass_bound,
    two_pass_bound,
)
from winnowgp.models.chunked_kernels import AutogradMean, LinearChunks, SummedChunks, chunked_kernel
from winnowgp.models.exact_gp import WithGradient, chunked_mean, evidence, unpacked
from winnowgp.models.stationary import RadialProfile, StationaryChunks, stationary_form
from winnowgp.typing import Scalar, TargetNoise

# It has no parameters, and so no sums of gradients.
_ZERO_MEAN = AutogradMean(ZeroMean(), parameters=())


@runtime_checkable
class GaussianModel(Protocol):
    """A model with Gaussian noise, and candidates that the exact evidence does not use."""

    @property
    def kernel(self) -> Kernel: ...

    @property
    def mean(self) -> Mean: ...

    @property
    def likelihood(self) -> Likelihood: ...

    @property
    def candidates(self) -> nn.Parameter: ...

    @property
    def noise(self) -> TargetNoise: ...


@final
@dataclass(frozen=True, slots=True)
class ParametricBound:
    """The collapsed bound or the exact evidence of fixed rows at the parameters of a model.

    The bound of a stream has rows that are remembered at some of the candidates as well.

    The gradient is computed with the value. That of the collapsed bound takes two passes over
    blocks of rows (`bounds.two_pass`); without gradients (`torch.no_grad`), one pass is enough.
    Memory does not grow with N · M, nor with N if the rows are not in memory. The exact evidence
    has all rows in one block.
    """

    model: GaussianModel
    blocks: RowBlocks
    exact: bool = False
    """Whether this is the exact evidence."""
    dtype: torch.dtype | None = None
    """Data type of blocks of rows, if less precise than that of the sums."""
    memory: Memory | None = None
    """What is remembered of earlier rows, for a mean of zero and one noise variance."""
    match: Int[Tensor, " M"] | None = None
    """The candidate that each point of the memory is."""

    def __call__(self) -> Scalar:
        """Return the bound in nats, differentiable in all parameters."""
        model, blocks, dtype = self.model, self.blocks, self.dtype
        if self.exact:
            return evidence(model.kernel, blocks=blocks, mean=model.mean, noise=model.noise)
        noise = model.noise
        chunked, inputs = chunked_kernel(model.kernel, model.candidates, blocks, dtype)
        if self.memory is not None:
            own = noise.detach().reshape(())
            return WithGradient.apply(
                lambda: unpacked(self.gradient(chunked, noise=own)), noise.reshape(()), *inputs
            )
        mean, more = chunked_mean(model.mean)
        fixed = noise.detach()
        if not torch.is_grad_enabled():
            return one_pass_bound(chunked, blocks, mean=mean, noise=fixed, dtype=dtype)

        def evaluate() -> tuple[Tensor, tuple[Tensor, ...]]:
            return unpacked(two_pass_bound(chunked, blocks, mean=mean, noise=fixed, dtype=dtype))

        return WithGradient.apply(evaluate, noise, *more, *inputs)

    def gradient(self, kernel: ChunkedKernel, *, noise: TargetNoise) -> BoundGradient:
        """Return the bound with a mean of zero and its gradient, at any kernel and noise.

        That of the exact evidence has the average information as well, if the kernel has products
        with its derivatives.
        """
        if self.memory is not None:
            assert self.match is not None
            return streaming_gradient(
                kernel, self.blocks, self.memory, match=self.match, noise=noise
            )
        if not self.exact:
            return two_pass_bound(
                kernel, self.blocks, mean=_ZERO_MEAN, noise=noise, dtype=self.dtype
            )
        (block,) = self.blocks
        return evidence_gradient(
            kernel,
            block,
            mean=_ZERO_MEAN,
            noise=noise,
            groups=self.blocks.groups,
            products=kernel.products if isinstance(kernel, DifferentiableChunks) else None,
        )


@dataclass(frozen=True, slots=True)
class _Term:
    """An RBF or Matérn kernel, scaled or not, or a linear one (no profile), on all columns."""

    profile: RadialProfile | None
    own: Tensor
    """The raw lengthscales, or variances of a linear kernel."""
    scale: Tensor | None
    """The raw variance of the ScaleKernel."""


@dataclass(frozen=True, slots=True)
class ParameterGradient:
    """A bound, and its gradient in the values of the parameters."""

    value: Float[Tensor, ""]
    """The bound in nats."""
    parameters: dict[int, Tensor]
    """Gradient in the values of noise and kernel parameters, by the raw parameter's identity."""
    locations: Float[Tensor, "M D"]
    information: Float[Tensor, "n n"] | None
    """Average information of the same parameters, in the same order; of the evidence only."""


@final
class ClosedForm:
    """A bound and its gradient in the values of the parameters, without autograd.

    Args:
        bound: the bound.
        terms: the terms of its kernel.
    """

    def __init__(self, bound: ParametricBound, terms: list[_Term]) -> None:
        self._bound, self._terms = bound, terms
        # The exact evidence has an inducing point at each row.
        (block,) = bound.blocks if bound.exact else (None,)
        self._rows = None if block is None else block.X
        self._noise = id(bound.model.likelihood.get_parameter("noise_covar.raw_noise"))

    @classmethod
    def of(cls, bound: ParametricBound) -> "ClosedForm | None":
        """Return the closed form of a bound, or None if kernel, mean or noise have none."""
        model = bound.model
        if type(model.mean) is not ZeroMean or model.noise.dim():
            return None
        terms = _terms(model.kernel, model.candidates.shape[1])
        if terms is None or len({id(term.own) for term in terms}) < len(terms):
            return None
        return cls(bound, terms)

    @property
    def has_information(self) -> bool:
        """Whether `gradient` returns the average information as well."""
        groups = self._bound.blocks.groups
        return self._bound.exact and len(groups) == 1 and groups[0].complete

    def values(self) -> dict[int, Tensor]:
        """Return the current value of each kernel parameter and of the noise, by identity.

        The key of a parameter is the identity of the raw parameter.
        """
        model = self._bound.model
        return {
            id(raw): constraint.transform(raw.detach()).flatten()
            for module in (model.kernel, model.likelihood)
            for _, raw, constraint in module.named_parameters_and_constraints()
            if constraint is not None
        }

    def gradient(self, values: Mapping[int, Tensor]) -> ParameterGradient:
        """Return the bound in nats, and its gradient in these values and in the locations.

        Args:
            values: as those of `values`; the model's own values are not used.
        """
        Z = self._bound.model.candidates.detach() if self._rows is None else self._rows
        dtype, noise = self._bound.dtype, values[self._noise]
        parts = [self._chunks(term, Z, values) for term in self._terms]
        kernel = parts[0] if len(parts) == 1 else SummedChunks(parts, dtype=dtype or Z.dtype)
        result = self._bound.gradient(kernel, noise=noise[0])
        *gradients, Z_gradient = result.kernel
        known = self._gathered([result.noise[None], *(part.reshape(-1) for part in gradients)])
        if self._rows is not None:
            Z_gradient = torch.zeros_like(self._bound.model.candidates)
        information = result.information
        if information is not None:
            sizes = [1, *(part.numel() for part in gradients)]
            for _ in range(2):
                rows = self._gathered(information.split(sizes))
                information = torch.cat(list(rows.values())).mT
        return ParameterGradient(result.value, known, Z_gradient, information)

    def _gathered(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return gradients by the raw parameter from those of the noise and of the bound's kernel.

        Columns that share a lengthscale or a variance have the sum of their gradients.
        """
        noise, *others = parts
        each, known = iter(others), {self._noise: noise}
        for term in self._terms:
            if term.profile is not None:
                variance = next(each)
                if term.scale is not None:
                    known[id(term.scale)] = variance
            own = next(each)
            shared = term.own.numel() < len(own)
            known[id(term.own)] = own.sum(0, keepdim=True) if shared else own
        return known

    def _chunks(
        self, term: _Term, Z: Float[Tensor, "M D"], values: Mapping[int, Tensor]
    ) -> LinearChunks | StationaryChunks:
        own, dtype = values[id(term.own)].expand(Z.shape[1]), self._bound.dtype
        if term.profile is None:
            return LinearChunks(Z=Z, variances=own, dtype=dtype)
        scale = Z.new_ones(()) if term.scale is None else values[id(term.scale)][0]
        return StationaryChunks(
            term.profile,
            Z=Z - self._bound.blocks.centre,
            variance=scale,
            lengthscales=own,
            dtype=dtype,
        )


def _terms(kernel: Kernel, D: int) -> list[_Term] | None:
    """Return the terms of a kernel; None if there is one without a closed form."""
    if kernel.active_dims is not None:
        return None
    if type(kernel) is AdditiveKernel:
        parts = [_terms(part, D) for part in kernel.kernels if isinstance(part, Kernel)]
        known = [part for part in parts if part is not None]
        return [term for part in known for term in part] if len(known) == len(parts) else None
    if type(kernel) is LinearKernel:
        return [_Term(None, kernel.get_parameter("raw_variance"), None)]
    base = kernel.base_kernel if type(kernel) is ScaleKernel else kernel
    form = stationary_form(kernel, D)
    if form is None or base.active_dims is not None:
        return None
    scale = kernel.get_parameter("raw_outputscale") if type(kernel) is ScaleKernel else None
    return [_Term(form.profile, base.get_parameter("raw_lengthscale"), scale)]
