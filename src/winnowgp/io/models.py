"""Serialisation of models and posteriors; `save` and `load`."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from gpytorch.likelihoods import SoftmaxLikelihood

from winnowgp.errors import ModelFileError, NotSaveableError, WinnowError
from winnowgp.io.components import (
    freeze,
    frozen,
    kernel_from_packed,
    likelihood_from,
    mean_from_packed,
    packed_kernel,
    packed_likelihood,
    packed_mean,
)
from winnowgp.io.format import Packed, Packing, read_packed, unreadable, write_packed
from winnowgp.models import (
    DeepGP,
    DeepLayer,
    DeepPosterior,
    LatentPosterior,
    Latents,
    LatentVariableGP,
    Posterior,
    SampledLatentGP,
    SparseGP,
    VariationalGP,
)
from winnowgp.models.base import InducingModel
from winnowgp.models.gplvm import LatentModel
from winnowgp.models.gplvm_posterior import ExpectedPosterior, SampledPosterior
from winnowgp.models.likelihoods import observation_model

# How models and their posteriors are packed.


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
    found.numbers("q_mean", len(candidates), observation_model(likelihood).num_latents(targets))
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


# How deep models and their posteriors are packed: layer by layer.


# Far beyond what narrows a prediction, and within memory for a few rows.
_MOST_SAMPLES = 1_000_000


def packed_deep_posterior(posterior: DeepPosterior) -> Packed:
    """With the Cholesky factor of every layer: another machine's might differ."""
    found = _packed("DeepPosterior", posterior)
    found.about["samples"] = posterior.samples
    for number, L in enumerate(posterior.factors):
        found.parts[f"layer.{number}"].tensors["L"] = L
    return found


def deep_posterior_from(found: Packed) -> DeepPosterior:
    """The way back, with a trial: parts that do not belong together are found out now."""
    layers = _layers_from(found)
    likelihood = likelihood_from(found.parts["likelihood"])
    targets = 1 if isinstance(likelihood, SoftmaxLikelihood) else layers[-1].P
    skip_connections, samples = found.said("connected", bool), found.said("samples", int)
    if samples > _MOST_SAMPLES:
        raise ModelFileError(f"asks for {samples} samples of each prediction")
    # Made for what it checks.
    DeepGP(layers, likelihood=likelihood, targets=targets, skip_connections=skip_connections)
    posterior = DeepPosterior(
        layers,
        likelihood=likelihood,
        skip_connections=skip_connections,
        samples=samples,
        factors=[
            found.parts[f"layer.{number}"].numbers("L", layer.K, layer.K)
            for number, layer in enumerate(layers)
        ],
    )
    with torch.no_grad():
        posterior.predict_matched(layers[0].candidates.new_zeros(1, layers[0].D), observed=True)
    return posterior


def _packed_model(model: DeepGP) -> Packed:
    found = _packed("DeepGP", model)
    found.about["targets"] = model.targets
    return found


def _model_from(found: Packed) -> DeepGP:
    return DeepGP(
        _layers_from(found),
        likelihood=likelihood_from(found.parts["likelihood"]),
        targets=found.said("targets", int),
        skip_connections=found.said("connected", bool),
    )


def _packed(kind: str, model: DeepGP | DeepPosterior) -> Packed:
    parts = {f"layer.{n}": _packed_layer(layer) for n, layer in enumerate(model.layers)}
    return Packed(
        kind,
        {"layers": len(model.layers), "connected": model.skip_connections},
        parts={**parts, "likelihood": packed_likelihood(model.likelihood)},
    )


def _layers_from(found: Packed) -> list[DeepLayer]:
    return [_layer_from(found.parts[f"layer.{n}"]) for n in range(found.said("layers", int))]


def _packed_layer(layer: DeepLayer) -> Packed:
    names = ("candidates", "slope", "level", "q_mean", "q_factor")
    return Packed(
        "DeepLayer",
        {"frozen": frozen(layer)},
        {name: getattr(layer, name) for name in names},
        {"kernel": packed_kernel(layer.kernel)},
    )


def _layer_from(found: Packed) -> DeepLayer:
    K, D = found.numbers("candidates", None, None).shape
    (P,) = found.numbers("level", None).shape
    made = DeepLayer(
        kernel_from_packed(found.parts["kernel"]),
        found.tensors["candidates"],
        outputs=P,
        slope=found.numbers("slope", D, P),
    )
    layer = made.with_q(
        found.tensors["candidates"],
        found.numbers("q_mean", K, P),
        found.numbers("q_factor", P, K, K),
    )
    layer.level.data.copy_(found.tensors["level"])
    freeze(layer, found.about["frozen"])
    return layer


PACKINGS |= {
    "DeepPosterior": Packing(packed_deep_posterior, deep_posterior_from),
    "DeepGP": Packing(_packed_model, _model_from),
}


# How latent-variable models and their posteriors are packed.


_POSTERIORS = {"ExpectedPosterior": ExpectedPosterior, "SampledPosterior": SampledPosterior}


def packed_latent_posterior(posterior: LatentPosterior) -> Packed:
    """q(f); how it is averaged over places is in its name."""
    return Packed(
        type(posterior).__name__, parts={"function": packed_posterior(posterior.function)}
    )


def latent_posterior_from(found: Packed) -> LatentPosterior:
    """The way back, with a trial: parts that do not belong together are found out now."""
    if found.kind not in _POSTERIORS:
        raise ModelFileError(f"holds a {found.kind!r} where the posterior of a map belongs")
    posterior = _POSTERIORS[found.kind](posterior_from(found.parts["function"]))
    place = posterior.function.Z.new_zeros(1, posterior.Q)
    posterior.predict(place, place + 1, observed=True)
    return posterior


def _packed_closed(model: LatentVariableGP) -> Packed:
    found = _latent_models_packed(model)
    found.tensors["candidates"] = model.candidates
    found.parts["kernel"] = packed_kernel(model.kernel)
    found.parts["likelihood"] = packed_likelihood(model.likelihood)
    return found


def _closed_from(found: Packed) -> LatentVariableGP:
    latents = _latents_from(found)
    model = LatentVariableGP(
        kernel_from_packed(found.parts["kernel"]),
        latents,
        candidates=found.numbers("candidates", None, latents.Q),
    )
    model.likelihood = likelihood_from(found.parts["likelihood"])
    freeze(model, found.about["frozen"])
    return model


def _packed_sampled(model: SampledLatentGP) -> Packed:
    found = _latent_models_packed(model)
    found.parts["function"] = packed_variational(model.function)
    return found


def _sampled_from(found: Packed) -> SampledLatentGP:
    function, latents = variational_from(found.parts["function"]), _latents_from(found)
    if function.candidates.shape[1] != latents.Q:
        raise ModelFileError("has points of other dimensions than its rows")
    model = SampledLatentGP(function, latents)
    freeze(model, found.about["frozen"])
    return model


def _latent_models_packed(model: LatentModel) -> Packed:
    """The part that grows with the rows of the table: where each of them is."""
    return Packed(
        type(model).__name__,
        {"frozen": frozen(model)},
        {"mean": model.latents.mean, "log_variance": model.latents.log_variance},
    )


def _latents_from(found: Packed) -> Latents:
    mean = found.numbers("mean", None, None)
    latents = Latents(mean)
    # Not through the variance: its logarithm would be off by rounding.
    latents.log_variance.data.copy_(found.numbers("log_variance", *mean.shape))
    return latents


PACKINGS |= {
    "ExpectedPosterior": Packing(packed_latent_posterior, latent_posterior_from),
    "SampledPosterior": Packing(packed_latent_posterior, latent_posterior_from),
    "LatentVariableGP": Packing(_packed_closed, _closed_from),
    "SampledLatentGP": Packing(_packed_sampled, _sampled_from),
}


# `save` and `load`: from a model to a file and back.


# Which module keeps the `PACKINGS` of a kind. Only these are ever imported, whatever a file says.
_HOMES = {
    "Posterior": "winnowgp.io.models",
    "SparseGP": "winnowgp.io.models",
    "VariationalGP": "winnowgp.io.models",
    "DeepPosterior": "winnowgp.io.models",
    "DeepGP": "winnowgp.io.models",
    "ExpectedPosterior": "winnowgp.io.models",
    "SampledPosterior": "winnowgp.io.models",
    "LatentVariableGP": "winnowgp.io.models",
    "SampledLatentGP": "winnowgp.io.models",
    "SparseGPRegressor": "winnowgp.estimators.serialization",
    "SparseGPClassifier": "winnowgp.estimators.serialization",
    "DeepGPRegressor": "winnowgp.estimators.serialization",
    "DeepGPClassifier": "winnowgp.estimators.serialization",
    "GPLVM": "winnowgp.estimators.serialization",
    "TabularModel": "winnowgp.estimators.serialization",
}


def save(model: Any, path: str | os.PathLike[str]) -> Path:
    """Write a model to a file, whole or not at all.

    Its size grows with M, not with N; but a latent-variable model is also where each row is, N · Q
    numbers twice.

    Args:
        model: a fitted estimator, a model, its posterior, or a `TabularModel`.

    Raises:
        NotSaveableError: the model has a part, such as a kernel of your own, that a file has no
            words for.
    """
    return write_packed(packed(model), Path(path))


def load(path: str | os.PathLike[str]) -> Any:
    """What `save` wrote, as it was; on the CPU.

    Raises:
        ModelFileError: the file is not ours, cut short, damaged, or from a newer winnowgp.
    """
    found = read_packed(Path(path))
    try:
        return unpacked(found)
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from error
    except (
        WinnowError,
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:
        # The checksum holds, so this is no accident.
        raise unreadable(Path(path)) from error


def packed(thing: Any) -> Packed:
    """Take a thing apart."""
    kind = type(thing).__name__
    if kind not in _HOMES or not type(thing).__module__.startswith("winnowgp."):
        raise NotSaveableError(
            f"a {kind} cannot be saved; give one of {', '.join(_HOMES)}. "
            "For anything else there is pickle, if you trust whoever wrote the file."
        )
    return _packing(kind).pack(thing)


def unpacked(found: Packed) -> Any:
    """Put a thing together again."""
    if found.kind not in _HOMES:
        raise ModelFileError(f"holds a {found.kind!r}, which this winnowgp does not know")
    return _packing(found.kind).unpack(found)


def _packing(kind: str) -> Packing:
    return import_module(_HOMES[kind]).PACKINGS[kind]
