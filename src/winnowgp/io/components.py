"""Serialisation of GPyTorch's kernels, means and likelihoods: a configuration and a state dict.

The configuration is the name of the class and the arguments of its constructor, among them the
constraints and priors, which GPyTorch registers under the names of these arguments. The state dict
must fit the module that the configuration describes.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from gpytorch import constraints, kernels, likelihoods, means, priors
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.noise_models import HomoskedasticNoise, MultitaskHomoskedasticNoise
from gpytorch.means import Mean
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.errors import ModelFileError, NotSaveableError
from winnowgp.io.registry import listed, register
from winnowgp.models.heteroscedastic import LogVarianceLikelihood
from winnowgp.models.kernels import BoxKernel
from winnowgp.models.likelihoods import copy_likelihood
from winnowgp.models.priors import LongLengthscalePrior
from winnowgp.models.target_likelihoods import TargetLikelihoods

Config = dict[str, Any]

_DIMS = ("ard_num_dims", "active_dims")

# Classes, and those of their arguments that are attributes of the same name.
_KERNELS = {
    kernels.RBFKernel: _DIMS,
    kernels.MaternKernel: ("nu", *_DIMS),
    kernels.RQKernel: _DIMS,
    kernels.PeriodicKernel: _DIMS,
    kernels.CosineKernel: ("active_dims",),
    kernels.LinearKernel: _DIMS,
    kernels.PolynomialKernel: ("power", "active_dims"),
    kernels.PiecewisePolynomialKernel: ("q", *_DIMS),
    kernels.SpectralMixtureKernel: ("num_mixtures", *_DIMS),
    kernels.ConstantKernel: ("active_dims",),
    kernels.ScaleKernel: ("active_dims",),
    BoxKernel: ("widths", "nodes"),
    kernels.AdditiveKernel: (),
    kernels.ProductKernel: (),
}
_MEANS = {means.ZeroMean: (), means.ConstantMean: (), means.LinearMean: ()}
_LIKELIHOODS = {
    likelihoods.GaussianLikelihood: (),
    likelihoods.BernoulliLikelihood: (),
    likelihoods.PoissonLikelihood: (),
    likelihoods.StudentTLikelihood: (),
    likelihoods.LaplaceLikelihood: (),
    likelihoods.BetaLikelihood: (),
    likelihoods.NegativeBinomialLikelihood: (),
    likelihoods.SoftmaxLikelihood: ("num_features", "num_classes"),
    LogVarianceLikelihood: (),
}
_CONSTRAINTS = {
    constraints.Positive: (),
    constraints.GreaterThan: ("lower_bound",),
    constraints.LessThan: ("upper_bound",),
    constraints.Interval: ("lower_bound", "upper_bound"),
}
_PRIORS = {
    priors.GammaPrior: ("concentration", "rate"),
    priors.NormalPrior: ("loc", "scale"),
    priors.LogNormalPrior: ("loc", "scale"),
    LongLengthscalePrior: ("loc", "scale"),
    priors.HalfNormalPrior: ("scale",),
    priors.HalfCauchyPrior: ("scale",),
    priors.UniformPrior: ("a", "b"),
}
_Table = dict[Any, tuple[str, ...]]

_TRANSFORMS = {"Softplus": constraints.constraints.softplus, "exp": torch.exp}

# Arguments that are sizes. The modules that a file describes have no more numbers than its state
# dict has, up to a few modules without parameters, and no argument exceeds the largest value.
_SIZES = ("ard_num_dims", "num_mixtures", "num_features", "num_classes", "input_size", "num_tasks")
_MAX_ARGUMENT, _MAX_MODULES = 1_000_000, 1_000


def _register(kind: str, cls: type, config_of: Callable[[Any], Config], make: Any) -> None:
    def state_of(module: nn.Module) -> dict[str, Any]:
        state = {"config": config_of(module), "state": dict(module.state_dict())}
        try:  # what could not be loaded is refused now
            build(**state)
        except (ModelFileError, RuntimeError, TypeError, ValueError) as error:
            raise NotSaveableError(
                f"this {type(module).__name__} cannot be saved: {str(error).splitlines()[0]}"
            ) from error
        return state

    @register(kind, cls, state=state_of, frozen=True, subclasses=True)
    def build(config: dict[str, Any], state: dict[str, Tensor]) -> nn.Module:
        if _size(config) > sum(tensor.numel() for tensor in state.values()) + _MAX_MODULES:
            raise ModelFileError(f"describes a {kind} of an impossible size")
        return _with_state(make(config), state, kind)


def _size(config: Config) -> int:
    """Return the least number of parameters that a configuration describes, at least one."""
    arguments = config["arguments"]
    # A softmax without mixing weights has sizes but no parameters.
    sizes = _SIZES if arguments.get("mixing_weights", True) else ()
    own = prod(max(1, abs(int(arguments.get(size, 1)))) for size in sizes)
    inner = [config["base_kernel"]] if "base_kernel" in config else config.get("kernels", [])
    return own + sum(map(_size, inner))


def _with_state(module: nn.Module, state: dict[str, Tensor], kind: str) -> nn.Module:
    """Load a state dict, which must fit exactly, into a module; the module takes its dtype."""
    floating = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
    if floating:
        module = module.to(floating[0])
    own = module.state_dict()
    differing = {
        name
        for name in own.keys() | state.keys()
        if name not in own
        or name not in state
        or own[name].shape != state[name].shape
        or own[name].is_floating_point() != state[name].is_floating_point()
    }
    if differing:
        raise ModelFileError(
            f"the state of a {kind} does not fit its configuration: {listed(differing)}"
        )
    if not all(torch.isfinite(state[name]).all() for name, _ in module.named_parameters()):
        raise ModelFileError(f"the parameters of a {kind} are not finite")
    module.load_state_dict(state)
    return module


def _kernel_config(kernel: Any) -> Config:
    config = _config(kernel, _KERNELS)
    if isinstance(kernel, kernels.ScaleKernel):
        config["base_kernel"] = _kernel_config(kernel.base_kernel)
        if kernel.base_kernel.active_dims is not None:
            del config["arguments"]["active_dims"]  # the constructor takes those of the base
    if isinstance(kernel, BoxKernel):
        config["base_kernel"] = _kernel_config(kernel.base_kernel)
    if isinstance(kernel, kernels.AdditiveKernel | kernels.ProductKernel):
        config["kernels"] = [_kernel_config(inner) for inner in kernel.kernels]
    return config


def _kernel(config: Config) -> Kernel:
    cls, arguments = _class(config, _KERNELS), _arguments(config)
    if cls in (kernels.ScaleKernel, BoxKernel):
        return cls(_kernel(config["base_kernel"]), **arguments)
    if "kernels" in config:
        return cls(*map(_kernel, config["kernels"]))
    return cls(**arguments)


def _mean_config(mean: Any) -> Config:
    config = _config(mean, _MEANS)
    if isinstance(mean, means.LinearMean):
        weights: Any = mean.weights
        config["arguments"] = {"input_size": len(weights), "bias": mean.bias is not None}
    return config


def _mean(config: Config) -> Mean:
    return _class(config, _MEANS)(**_arguments(config))


def _likelihood_config(likelihood: Any) -> Config:
    config = _config(likelihood, _LIKELIHOODS)
    if isinstance(likelihood, likelihoods.GaussianLikelihood):
        # The noise is a module of its own, with one variance for all columns or one for each.
        noise: Any = likelihood.noise_covar
        config |= {"constraints": _constraint_configs(noise), "priors": _prior_configs(noise)}
        if type(noise) is MultitaskHomoskedasticNoise:
            config["arguments"]["num_tasks"] = noise.noise.shape[-1]
        elif type(noise) is not HomoskedasticNoise:
            raise NotSaveableError(f"the noise model {type(noise).__name__} cannot be saved.")
    if isinstance(likelihood, likelihoods.SoftmaxLikelihood):
        config["arguments"]["mixing_weights"] = likelihood.mixing_weights is not None
    return config


def _likelihood(config: Config) -> Likelihood:
    cls, arguments = _class(config, _LIKELIHOODS), _arguments(config)
    if "num_tasks" not in arguments:
        return copy_likelihood(cls(**arguments))
    likelihood = cls()
    likelihood.noise_covar = MultitaskHomoskedasticNoise(**arguments)
    return copy_likelihood(likelihood)


def _config(module: Any, table: _Table) -> Config:
    """Return the name of a module's class, and the arguments that all constructors share."""
    arguments = {name: getattr(module, name) for name in _argument_names(module, table)}
    return {
        "name": type(module).__name__,
        "arguments": {
            name: value.tolist() if isinstance(value, Tensor) else value
            for name, value in arguments.items()
            if value is not None
        },
        "constraints": _constraint_configs(module),
        "priors": _prior_configs(module),
    }


def _arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of the constructor that a configuration describes."""
    plain = config["arguments"]
    for value in plain.values():
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(n, int | float) and abs(n) <= _MAX_ARGUMENT for n in numbers):
            raise ModelFileError("describes a component of an impossible size")
    return {
        **plain,
        **{name: _constraint(inner) for name, inner in config["constraints"].items()},
        **{name: _prior(inner) for name, inner in config["priors"].items()},
    }


def _constraint_configs(module: Any) -> dict[str, Config]:
    registered = getattr(module, "_constraints", {})
    return {
        name.removeprefix("raw_"): _constraint_config(constraint)
        for name, constraint in registered.items()
    }


def _constraint_config(constraint: Any) -> Config:
    names = _argument_names(constraint, _CONSTRAINTS)
    transform = constraint._transform
    if type(constraint) is constraints.Interval and transform is torch.sigmoid:
        transform_name = "default"
    elif transform is None:
        transform_name = None
    else:
        transform_name = getattr(transform, "__name__", type(transform).__name__)
        if transform_name not in _TRANSFORMS:
            raise NotSaveableError(f"a constraint's transform {transform_name} cannot be saved.")
    return {
        "name": type(constraint).__name__,
        "bounds": {name: getattr(constraint, name).tolist() for name in names},
        "transform": transform_name,
    }


def _constraint(config: Config) -> Any:
    cls = _class(config, _CONSTRAINTS)
    bounds = {
        name: torch.tensor(config["bounds"][name], dtype=torch.float64)
        for name in _CONSTRAINTS[cls]
    }
    if config["transform"] in ("default", "Softplus"):
        return cls(**bounds)
    transform = None if config["transform"] is None else _TRANSFORMS[config["transform"]]
    return cls(**bounds, transform=transform, inv_transform=None)


def _prior_configs(module: Any) -> dict[str, Config]:
    return {name: _prior_config(entry[0]) for name, entry in getattr(module, "_priors", {}).items()}


def _prior_config(prior: Any) -> Config:
    names = _argument_names(prior, _PRIORS)
    values = {name: torch.as_tensor(getattr(prior, name)).tolist() for name in names}
    return {"name": type(prior).__name__, "values": values}


def _prior(config: Config) -> Any:
    cls = _class(config, _PRIORS)
    return cls(**{name: torch.tensor(config["values"][name]) for name in _PRIORS[cls]})


def _argument_names(component: Any, table: _Table) -> tuple[str, ...]:
    """Return the arguments of exactly this class; a subclass may compute something else."""
    cls = type(component)
    if cls not in table:
        raise NotSaveableError(
            f"{cls.__module__}.{cls.__name__} cannot be saved; use one of "
            f"{', '.join(known.__name__ for known in table)}. Use pickle for other components, "
            "where the file is trusted."
        )
    return table[cls]


def _class(config: Config, table: _Table) -> Any:
    for cls in table:
        if cls.__name__ == config["name"]:
            return cls
    raise ModelFileError(
        f"contains a {config['name']!r:.60}, which this version of winnowgp does not know"
    )


@register(
    "TargetLikelihoods",
    TargetLikelihoods,
    state=lambda each: {"parts": list(each.parts), "offset": each.offset.detach()},
)
def _target_likelihoods(parts: list[Likelihood], offset: Float[Tensor, " P"]) -> TargetLikelihoods:
    if len(parts) != len(offset):
        raise ModelFileError("likelihoods of several targets have offsets of another number")
    return TargetLikelihoods(parts, offset=offset)


_register("Kernel", Kernel, _kernel_config, _kernel)
_register("Mean", Mean, _mean_config, _mean)
_register("Likelihood", Likelihood, _likelihood_config, _likelihood)
