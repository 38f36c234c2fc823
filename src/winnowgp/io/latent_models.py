"""How latent-variable models and their posteriors are packed."""

from winnowgp.errors import ModelFileError
from winnowgp.io.gpytorch_parts import (
    freeze,
    frozen,
    kernel_from_packed,
    likelihood_from,
    packed_kernel,
    packed_likelihood,
)
from winnowgp.io.models import (
    packed_posterior,
    packed_variational,
    posterior_from,
    variational_from,
)
from winnowgp.io.packed import Packed
from winnowgp.io.packing import Packing
from winnowgp.models import (
    ExpectedPosterior,
    LatentModel,
    LatentPosterior,
    Latents,
    LatentVariableGP,
    SampledLatentGP,
    SampledPosterior,
)

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
    found = _packed(model)
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
    found = _packed(model)
    found.parts["function"] = packed_variational(model.function)
    return found


def _sampled_from(found: Packed) -> SampledLatentGP:
    function, latents = variational_from(found.parts["function"]), _latents_from(found)
    if function.candidates.shape[1] != latents.Q:
        raise ModelFileError("has points of other dimensions than its rows")
    model = SampledLatentGP(function, latents)
    freeze(model, found.about["frozen"])
    return model


def _packed(model: LatentModel) -> Packed:
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


PACKINGS = {
    "ExpectedPosterior": Packing(packed_latent_posterior, latent_posterior_from),
    "SampledPosterior": Packing(packed_latent_posterior, latent_posterior_from),
    "LatentVariableGP": Packing(_packed_closed, _closed_from),
    "SampledLatentGP": Packing(_packed_sampled, _sampled_from),
}
