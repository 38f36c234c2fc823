"""How models and their posteriors are packed."""

from gpytorch.likelihoods import SoftmaxLikelihood

from winnowgp.errors import ModelFileError
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
from winnowgp.models import InducingModel, Posterior, SparseGP, VariationalGP, latent_functions


def packed_posterior(posterior: Posterior) -> Packed:
    """With its Cholesky factor: another machine's would differ where K_uu is nearly singular."""
    return Packed(
        "Posterior",
        tensors={name: getattr(posterior, name) for name in ("Z", "q_mean", "q_factor", "L")},
        parts=_parts(posterior),
    )


def posterior_from(found: Packed) -> Posterior:
    """The way back, with a trial: parts that do not belong together are found out now."""
    M, D = found.numbers("Z", None, None).shape
    P = found.numbers("q_mean", M, None).shape[1]
    shared = len(found.numbers("q_factor", None, M, M)) == 1
    likelihood = likelihood_from(found.parts["likelihood"])
    if isinstance(likelihood, SoftmaxLikelihood) and likelihood.num_features != P:
        raise ModelFileError(f"has {P} functions and a likelihood of {likelihood.num_features}")
    posterior = Posterior(
        kernel_from_packed(found.parts["kernel"]),
        found.tensors["Z"],
        mean=mean_from_packed(found.parts["mean"]),
        likelihood=likelihood,
        q_mean=found.tensors["q_mean"],
        q_factor=found.numbers("q_factor", 1 if shared else P, M, M),
        L=found.numbers("L", M, M),
    )
    posterior.predict(posterior.Z.new_zeros(1, D), observed=True)
    return posterior


def _packed_sparse(model: SparseGP) -> Packed:
    return Packed(
        "SparseGP",
        {"frozen": not model.candidates.requires_grad, "precision": model.precision},
        {"candidates": model.candidates},
        _parts(model),
    )


def _sparse_from(found: Packed) -> SparseGP:
    model = SparseGP(
        kernel_from_packed(found.parts["kernel"]),
        found.tensors["candidates"],
        mean=mean_from_packed(found.parts["mean"]),
        precision=found.said("precision", str),
    )
    model.likelihood = likelihood_from(found.parts["likelihood"])
    model.candidates.requires_grad_(not found.about["frozen"])
    return model


def packed_variational(model: VariationalGP) -> Packed:
    """With its q(u)."""
    return Packed(
        "VariationalGP",
        {"frozen": not model.candidates.requires_grad, "targets": model.targets},
        {name: getattr(model, name) for name in ("candidates", "q_mean", "q_factor")},
        _parts(model),
    )


def variational_from(found: Packed) -> VariationalGP:
    """The way back."""
    likelihood, targets = likelihood_from(found.parts["likelihood"]), found.said("targets", int)
    candidates = found.numbers("candidates", None, None)
    # Before anything of a size that the file merely claims is made.
    found.numbers("q_mean", len(candidates), latent_functions(likelihood, targets))
    model = VariationalGP(
        kernel_from_packed(found.parts["kernel"]),
        candidates,
        likelihood=likelihood,
        targets=targets,
        mean=mean_from_packed(found.parts["mean"]),
    )
    model.q_mean.data.copy_(found.numbers("q_mean", model.K, model.P))
    factor = found.numbers("q_factor", None, model.K, model.K)
    model.q_factor.data.copy_(factor.expand_as(model.q_factor))
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
    "VariationalGP": Packing(packed_variational, variational_from),
}
