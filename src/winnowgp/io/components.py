"""GPyTorch's kernels, means and likelihoods as JSON: a name and constructor arguments.

What a part has learnt is in its state dict; here is what its constructor must be told so that the
state dict fits. Constraints and priors are found by the names GPyTorch registers them under, which
are the constructor's own.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from gpytorch import constraints, kernels, likelihoods, means, priors
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.noise_models import HomoskedasticNoise, MultitaskHomoskedasticNoise
from gpytorch.means import Mean
from torch import Tensor, nn

from winnowgp.errors import ModelFileError, NotSaveableError
from winnowgp.io.format import Packed
from winnowgp.models.likelihoods import copy_likelihood

# A file cannot make us build anything larger than this many of one thing, nor more parts than this
# beyond the numbers that it holds.
_MOST, _MOST_PARTS = 1_000_000, 1_000

_SIZES = ("ard_num_dims", "num_mixtures", "num_features", "num_classes", "input_size", "num_tasks")


@dataclass(frozen=True, slots=True)
class _Kind:
    """A class, and the arguments that can be read from its attributes of the same name."""

    make: type[nn.Module]
    attributes: tuple[str, ...] = ()


_DIMS = ("ard_num_dims", "active_dims")

_KERNELS = {
    "RBFKernel": _Kind(kernels.RBFKernel, _DIMS),
    "MaternKernel": _Kind(kernels.MaternKernel, ("nu", *_DIMS)),
    "RQKernel": _Kind(kernels.RQKernel, _DIMS),
    "PeriodicKernel": _Kind(kernels.PeriodicKernel, _DIMS),
    "CosineKernel": _Kind(kernels.CosineKernel, ("active_dims",)),
    "LinearKernel": _Kind(kernels.LinearKernel, _DIMS),
    "PolynomialKernel": _Kind(kernels.PolynomialKernel, ("power", "active_dims")),
    "PiecewisePolynomialKernel": _Kind(kernels.PiecewisePolynomialKernel, ("q", *_DIMS)),
    "SpectralMixtureKernel": _Kind(kernels.SpectralMixtureKernel, ("num_mixtures", *_DIMS)),
    "ConstantKernel": _Kind(kernels.ConstantKernel, ("active_dims",)),
    "ScaleKernel": _Kind(kernels.ScaleKernel, ("active_dims",)),
    "AdditiveKernel": _Kind(kernels.AdditiveKernel),
    "ProductKernel": _Kind(kernels.ProductKernel),
}

_MEANS = {
    "ZeroMean": _Kind(means.ZeroMean),
    "ConstantMean": _Kind(means.ConstantMean),
    "LinearMean": _Kind(means.LinearMean),
}

_LIKELIHOODS = {
    "GaussianLikelihood": _Kind(likelihoods.GaussianLikelihood),
    "BernoulliLikelihood": _Kind(likelihoods.BernoulliLikelihood),
    "PoissonLikelihood": _Kind(likelihoods.PoissonLikelihood),
    "StudentTLikelihood": _Kind(likelihoods.StudentTLikelihood),
    "LaplaceLikelihood": _Kind(likelihoods.LaplaceLikelihood),
    "BetaLikelihood": _Kind(likelihoods.BetaLikelihood),
    "NegativeBinomialLikelihood": _Kind(likelihoods.NegativeBinomialLikelihood),
    "SoftmaxLikelihood": _Kind(likelihoods.SoftmaxLikelihood, ("num_features", "num_classes")),
}

_CONSTRAINTS = {
    "Positive": (constraints.Positive, ()),
    "GreaterThan": (constraints.GreaterThan, ("lower_bound",)),
    "LessThan": (constraints.LessThan, ("upper_bound",)),
    "Interval": (constraints.Interval, ("lower_bound", "upper_bound")),
}

_PRIORS = {
    "GammaPrior": (priors.GammaPrior, ("concentration", "rate")),
    "NormalPrior": (priors.NormalPrior, ("loc", "scale")),
    "LogNormalPrior": (priors.LogNormalPrior, ("loc", "scale")),
    "HalfNormalPrior": (priors.HalfNormalPrior, ("scale",)),
    "HalfCauchyPrior": (priors.HalfCauchyPrior, ("scale",)),
    "UniformPrior": (priors.UniformPrior, ("a", "b")),
}

_TRANSFORMS = {"Softplus": constraints.constraints.softplus, "exp": torch.exp}


def packed_kernel(kernel: Kernel) -> Packed:
    """A kernel with all its parts; sums, products and scaled kernels included."""
    return _packed("Kernel", kernel, _described_kernel(kernel), kernel_from_packed)


def packed_mean(mean: Mean) -> Packed:
    """A prior mean."""
    return _packed("Mean", mean, _described_mean(mean), mean_from_packed)


def packed_likelihood(likelihood: Likelihood) -> Packed:
    """A likelihood."""
    return _packed("Likelihood", likelihood, _described_likelihood(likelihood), likelihood_from)


def kernel_from_packed(found: Packed) -> Kernel:
    """The way back."""
    _check_size(found)
    return _with_state(_kernel(found.about), found)


def mean_from_packed(found: Packed) -> Mean:
    """The way back."""
    _check_size(found)
    return _with_state(_mean(found.about), found)


def likelihood_from(found: Packed) -> Likelihood:
    """The way back."""
    _check_size(found)
    return _with_state(copy_likelihood(_likelihood(found.about)), found)


def _packed(kind: str, module: nn.Module, about: dict[str, Any], back: Any) -> Packed:
    """With a trial of the way back: what would not fit then is refused now."""
    packed = Packed(kind, about | {"frozen": frozen(module)}, dict(module.state_dict()))
    try:
        back(packed)
    except (ModelFileError, RuntimeError, TypeError, ValueError) as error:
        raise NotSaveableError(
            f"this {type(module).__name__} cannot be saved: {str(error).splitlines()[0]}"
        ) from error
    return packed


def frozen(module: nn.Module) -> list[str]:
    """Names of the parameters that are not to be learnt."""
    return [name for name, p in module.named_parameters() if not p.requires_grad]


def freeze(module: nn.Module, names: list[str]) -> None:
    """Keep these parameters from being learnt."""
    parameters = dict(module.named_parameters())
    for name in names:
        parameters[name].requires_grad_(False)


def _check_size(found: Packed) -> None:
    """Before anything is made: all parts together have no more numbers than the file holds."""
    held = sum(tensor.numel() for tensor in found.tensors.values())
    if _asked(found.about) > held + _MOST_PARTS:
        raise ModelFileError("asks for parts of an impossible size")


def _asked(about: dict[str, Any]) -> int:
    """How many numbers a description is of, at least; a part without any counts for one."""
    arguments = about["arguments"]
    # A softmax without weights is told its sizes and makes nothing of them.
    sizes = _SIZES if arguments.get("mixing_weights", True) else ()
    own = prod(max(1, abs(int(arguments.get(size, 1)))) for size in sizes)
    inner = [about["base_kernel"]] if "base_kernel" in about else about.get("kernels", [])
    return own + sum(_asked(part) for part in inner)


def _with_state(module: Any, found: Packed) -> Any:
    """The module in the dtype of its state, which must fit exactly."""
    state = found.tensors
    floating = [t.dtype for t in state.values() if t.dtype.is_floating_point]
    if floating:
        module = module.to(floating[0])
    own = module.state_dict()
    names = own.keys() | state.keys()
    different = {n for n in names if _shape(own.get(n)) != _shape(state.get(n))}
    if different:
        raise ModelFileError(f"does not fit its description in {', '.join(sorted(different))}")
    numbers = all(t.is_floating_point() == state[n].is_floating_point() for n, t in own.items())
    if not numbers or any(not torch.isfinite(state[n]).all() for n, _ in module.named_parameters()):
        raise ModelFileError(f"holds a {found.kind} whose parameters are not numbers")
    module.load_state_dict(state)
    freeze(module, found.about.get("frozen", []))
    return module


def _shape(tensor: Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape


def _described_kernel(kernel: Any) -> dict[str, Any]:
    name = _known(kernel, _KERNELS)
    about = _described(name, kernel, _KERNELS[name])
    if isinstance(kernel, kernels.ScaleKernel):
        about["base_kernel"] = _described_kernel(kernel.base_kernel)
        if kernel.base_kernel.active_dims is not None:
            del about["arguments"]["active_dims"]  # it takes them from its base
    if isinstance(kernel, kernels.AdditiveKernel | kernels.ProductKernel):
        about["kernels"] = [_described_kernel(part) for part in kernel.kernels]
    return about


def _kernel(about: dict[str, Any]) -> Kernel:
    made: Any = _found(about, _KERNELS).make
    arguments = _arguments(about)
    if made is kernels.ScaleKernel:
        return made(_kernel(about["base_kernel"]), **arguments)
    if "kernels" in about:
        return made(*[_kernel(part) for part in about["kernels"]])
    return made(**arguments)


def _described_mean(mean: Any) -> dict[str, Any]:
    name = _known(mean, _MEANS)
    about = _described(name, mean, _MEANS[name])
    if isinstance(mean, means.LinearMean):
        weights: Any = mean.weights
        about["arguments"] = {"input_size": len(weights), "bias": mean.bias is not None}
    return about


def _mean(about: dict[str, Any]) -> Mean:
    made: Any = _found(about, _MEANS).make
    return made(**_arguments(about))


def _described_likelihood(likelihood: Any) -> dict[str, Any]:
    name = _known(likelihood, _LIKELIHOODS)
    about = _described(name, likelihood, _LIKELIHOODS[name])
    if isinstance(likelihood, likelihoods.GaussianLikelihood):
        # Its noise lives one module further down, a number for all columns or one for each.
        noise: Any = likelihood.noise_covar
        about |= _described(name, noise, _Kind(nn.Module))
        kind = type(noise)
        if kind is MultitaskHomoskedasticNoise:
            about["arguments"]["num_tasks"] = noise.raw_noise.shape[-1]
        elif kind is not HomoskedasticNoise:
            raise NotSaveableError(f"{type(noise).__name__} cannot be saved.")
    if isinstance(likelihood, likelihoods.SoftmaxLikelihood):
        about["arguments"]["mixing_weights"] = likelihood.mixing_weights is not None
    return about


def _likelihood(about: dict[str, Any]) -> Likelihood:
    made: Any = _found(about, _LIKELIHOODS).make
    arguments = _arguments(about)
    if "num_tasks" not in arguments:
        return made(**arguments)
    likelihood = made()
    likelihood.noise_covar = MultitaskHomoskedasticNoise(**arguments)
    return likelihood


def _described(name: str, module: Any, kind: _Kind) -> dict[str, Any]:
    """Name, plain arguments, constraints and priors."""
    arguments = {attribute: getattr(module, attribute) for attribute in kind.attributes}
    for key, value in arguments.items():
        if isinstance(value, Tensor):
            arguments[key] = value.tolist()
    own_constraints = {
        key.removeprefix("raw_"): _described_constraint(value)
        for key, value in getattr(module, "_constraints", {}).items()
    }
    own_priors = {key: _described_prior(v[0]) for key, v in getattr(module, "_priors", {}).items()}
    return {
        "name": name,
        "arguments": {key: value for key, value in arguments.items() if value is not None},
        "constraints": own_constraints,
        "priors": own_priors,
    }


def _arguments(about: dict[str, Any]) -> dict[str, Any]:
    """What the constructor is called with."""
    plain = about["arguments"]
    for value in plain.values():
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(n, int | float) and abs(n) <= _MOST for n in numbers):
            raise ModelFileError("asks for a part of an impossible size")
    return {
        **plain,
        **{key: _constraint(value) for key, value in about["constraints"].items()},
        **{key: _prior(value) for key, value in about["priors"].items()},
    }


def _described_constraint(constraint: Any) -> dict[str, Any]:
    name = _known(constraint, _CONSTRAINTS)
    transform = constraint._transform
    if name == "Interval" and transform is torch.sigmoid:
        known = "default"
    elif transform is None:
        known = None
    else:
        known = getattr(transform, "__name__", type(transform).__name__)
        if known not in _TRANSFORMS:
            raise NotSaveableError(f"the transform {known} of a constraint cannot be saved.")
    bounds = {bound: getattr(constraint, bound).tolist() for bound in _CONSTRAINTS[name][1]}
    return {"name": name, "bounds": bounds, "transform": known}


def _constraint(about: dict[str, Any]) -> Any:
    make, names = _found(about, _CONSTRAINTS)
    bounds = {name: torch.tensor(about["bounds"][name], dtype=torch.float64) for name in names}
    if about["transform"] in ("default", "Softplus"):
        return make(**bounds)
    if about["transform"] is None:
        return make(**bounds, transform=None, inv_transform=None)
    return make(**bounds, transform=_TRANSFORMS[about["transform"]], inv_transform=None)


def _described_prior(prior: Any) -> dict[str, Any]:
    name = _known(prior, _PRIORS)
    values = {value: torch.as_tensor(getattr(prior, value)).tolist() for value in _PRIORS[name][1]}
    return {"name": name, "values": values}


def _prior(about: dict[str, Any]) -> Any:
    make, names = _found(about, _PRIORS)
    return make(**{name: torch.tensor(about["values"][name]) for name in names})


def _known(thing: Any, table: dict[str, Any]) -> str:
    """The name of exactly this class; a subclass may compute something else."""
    name = type(thing).__name__
    kind = table.get(name)
    make = kind.make if isinstance(kind, _Kind) else kind[0] if kind else None
    if type(thing) is not make:
        raise NotSaveableError(
            f"{type(thing).__module__}.{name} cannot be saved; a file knows {', '.join(table)}. "
            "Pickle the model if you trust whoever will load it."
        )
    return name


def _found(about: dict[str, Any], table: dict[str, Any]) -> Any:
    if about["name"] not in table:
        raise ModelFileError(f"holds a {about['name']!r}, which this winnowgp does not know")
    return table[about["name"]]
