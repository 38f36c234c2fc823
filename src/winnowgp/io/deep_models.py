"""How deep models and their posteriors are packed: layer by layer."""

import torch
from gpytorch.likelihoods import SoftmaxLikelihood

from winnowgp.errors import ModelFileError
from winnowgp.io.gpytorch_parts import (
    freeze,
    frozen,
    kernel_from_packed,
    likelihood_from,
    packed_kernel,
    packed_likelihood,
)
from winnowgp.io.packed import Packed
from winnowgp.io.packing import Packing
from winnowgp.models import DeepGP, DeepLayer, DeepPosterior

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
    connected, samples = found.said("connected", bool), found.said("samples", int)
    if samples > _MOST_SAMPLES:
        raise ModelFileError(f"asks for {samples} samples of each prediction")
    # Made for what it checks.
    DeepGP(layers, likelihood=likelihood, targets=targets, connected=connected)
    posterior = DeepPosterior(
        layers,
        likelihood=likelihood,
        connected=connected,
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
        connected=found.said("connected", bool),
    )


def _packed(kind: str, model: DeepGP | DeepPosterior) -> Packed:
    parts = {f"layer.{n}": _packed_layer(layer) for n, layer in enumerate(model.layers)}
    return Packed(
        kind,
        {"layers": len(model.layers), "connected": model.connected},
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


PACKINGS = {
    "DeepPosterior": Packing(packed_deep_posterior, deep_posterior_from),
    "DeepGP": Packing(_packed_model, _model_from),
}
