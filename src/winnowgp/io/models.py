"""How models and their posteriors are packed."""

from torch import nn

from winnowgp.io.gpytorch_parts import (
    kernel_from_packed,
    likelihood_from,
    mean_from_packed,
    packed_kernel,
    packed_likelihood,
    packed_mean,
)
from winnowgp.io.packed import Packed
from winnowgp.io.packing import Packing
from winnowgp.models import InducingModel, Posterior, SparseGP, VariationalGP


def packed_posterior(posterior: Posterior) -> Packed:
    """With its Cholesky factor: another machine's would differ where K_uu is nearly singular."""
    return Packed(
        "Posterior",
        tensors={name: getattr(posterior, name) for name in ("Z", "q_mean", "q_factor", "L")},
        parts=_parts(posterior),
    )


def posterior_from(found: Packed) -> Posterior:
    """The way back."""
    return Posterior(
        kernel_from_packed(found.parts["kernel"]),
        found.tensors["Z"],
        mean=mean_from_packed(found.parts["mean"]),
        likelihood=likelihood_from(found.parts["likelihood"]),
        q_mean=found.tensors["q_mean"],
        q_factor=found.tensors["q_factor"],
        L=found.tensors["L"],
    )


def _packed_sparse(model: SparseGP) -> Packed:
    return Packed(
        "SparseGP",
        {"frozen": not model.candidates.requires_grad},
        {"candidates": model.candidates},
        _parts(model),
    )


def _sparse_from(found: Packed) -> SparseGP:
    model = SparseGP(
        kernel_from_packed(found.parts["kernel"]),
        found.tensors["candidates"],
        mean=mean_from_packed(found.parts["mean"]),
    )
    model.likelihood = likelihood_from(found.parts["likelihood"])
    model.candidates.requires_grad_(not found.about["frozen"])
    return model


def _packed_variational(model: VariationalGP) -> Packed:
    return Packed(
        "VariationalGP",
        {"frozen": not model.candidates.requires_grad, "targets": model.targets},
        {name: getattr(model, name) for name in ("candidates", "q_mean", "q_factor")},
        _parts(model),
    )


def _variational_from(found: Packed) -> VariationalGP:
    model = VariationalGP(
        kernel_from_packed(found.parts["kernel"]),
        found.tensors["candidates"],
        likelihood=likelihood_from(found.parts["likelihood"]),
        targets=found.about["targets"],
        mean=mean_from_packed(found.parts["mean"]),
    )
    for name in ("q_mean", "q_factor"):
        parameter: nn.Parameter = getattr(model, name)
        parameter.data.copy_(found.tensors[name].expand_as(parameter))
    model.candidates.requires_grad_(not found.about["frozen"])
    return model


def _parts(model: InducingModel | Posterior) -> dict[str, Packed]:
    return {
        "kernel": packed_kernel(model.kernel),
        "mean": packed_mean(model.mean),
        "likelihood": packed_likelihood(model.likelihood),
    }


PACKINGS = {
    "Posterior": Packing(packed_posterior, posterior_from),
    "SparseGP": Packing(_packed_sparse, _sparse_from),
    "VariationalGP": Packing(_packed_variational, _variational_from),
}
