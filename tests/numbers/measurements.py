"""Numbers of fits and of models, under neutral names, and how two records of them are compared.

Every attribute of the library that is read for a record is named in a table below.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from numpy.typing import NDArray
from torch import Tensor

from winnowgp import (
    GPLVM,
    Dataset,
    DataTable,
    DeepGP,
    DeepGPClassifier,
    DeepGPRegressor,
    LatentVariableGP,
    MaskedMatrix,
    Posterior,
    SparseGP,
    SparseGPClassifier,
    SparseGPRegressor,
    TabularModel,
    VariationalGP,
)
from winnowgp.models import DeepPosterior, SampledLatentGP, deep_layers
from winnowgp.models.gplvm_posterior import LatentPosterior
from winnowgp.selection import SizeFrontier

Numbers: TypeAlias = dict[str, Any]
"""Names of quantities, each with an array, a number, a list of arrays, or None."""

RTOL = 1e-9
# Entries of an array that are written down; of the others their sum alone.
ENTRIES = 14
# Name of a quantity, and the attribute that holds it.
ESTIMATOR = {
    "elbo": "elbo_",
    "elbo_gap": "elbo_gap_",
    "n_inducing": "n_inducing_",
    "inducing_points": "inducing_points_",
    "candidates": "candidates_",
    "inclusion": "inclusion_",
    "alpha": "alpha_",
    "noise": "noise_",
    "latent_mean": "embedding_",
    "latent_std": "embedding_std_",
    "relevance": "relevance_",
    "iterations": "n_iter_",
}
FRONTIER = ("frontier_", "frontiers_")
FIT = {
    "elbo": "elbo",
    "elbo_gap": "elbo_gap",
    "candidates": "candidates",
}
SELECTION = {"inclusion": "inclusion", "n_inducing": "M", "alpha": "alpha", "objective": "trace"}


def rows(N: int, D: int, *, seed: int = 7) -> NDArray[np.float64]:
    """Inputs between 0 and 6."""
    return np.random.default_rng(seed).uniform(0, 6, (N, D))


def deep_rbf_gp(
    X: Tensor,
    Z: Tensor,
    *,
    likelihood: Likelihood | None = None,
    outputs: int = 1,
    hidden_mean: str,
    skip_connections: bool,
) -> DeepGP:
    """A deep GP of two layers, the first with two outputs, with Gaussian noise by default."""
    layers = deep_layers(
        X,
        Z,
        kernel=lambda _, D: ScaleKernel(RBFKernel(ard_num_dims=D)),
        widths=(2, outputs),
        hidden_mean=hidden_mean,
        skip_connections=skip_connections,
    )
    return DeepGP(
        layers,
        likelihood=GaussianLikelihood() if likelihood is None else likelihood,
        targets=1,
        skip_connections=skip_connections,
    )


def estimator_numbers(estimator: Any, *, predicted: bool = True) -> Numbers:
    """Everything that a fitted estimator learnt, and its predictions."""
    found = {
        name: getattr(estimator, attribute)
        for name, attribute in ESTIMATOR.items()
        if hasattr(estimator, attribute)
    }
    for attribute in FRONTIER:
        if hasattr(estimator, attribute):
            found |= _frontier_numbers(getattr(estimator, attribute))
    return found | (predictions(estimator) if predicted else {})


def fit_numbers(fitted: Any) -> Numbers:
    """Everything that a fit of a model returned, and the predictions of its posterior."""
    found = {name: getattr(fitted, attribute) for name, attribute in FIT.items()}
    found = {name: value for name, value in found.items() if value is not None}
    selections, deep = fitted.selections, isinstance(fitted.model, DeepGP)
    if not deep:
        (found["candidates"],) = fitted.candidates
    for name, attribute in SELECTION.items():
        found[name] = [getattr(selection, attribute) for selection in selections]
    found |= _frontier_numbers([selection.frontier for selection in selections])
    model = fitted.model
    found["inducing_points"] = [part.candidates for part in (model.layers if deep else [model])]
    if hasattr(model, "latents"):
        found |= {"latent_mean": model.latents.mean, "latent_variance": model.latents.variance}
    return found | predictions(fitted.posterior)


def _frontier_numbers(frontier: Any) -> Numbers:
    several = frontier if isinstance(frontier, list | tuple) else [frontier]
    known = [each for each in several if each is not None]
    return {
        "frontier_sizes": [each.sizes for each in known],
        "frontier_values": [
            each.elbos if isinstance(each, SizeFrontier) else each.bounds for each in known
        ],
    }


def predictions(model: Any) -> Numbers:
    """What a model of any kind predicts at fixed rows.

    Args:
        model: a fitted estimator, a table's model, a model or a posterior.
    """
    for kinds, measure in _PREDICTIONS:
        if isinstance(model, kinds):
            return measure(model)
    raise TypeError(f"`model` must be of a kind that can be saved; got {type(model).__name__}.")


def _regressor(model: Any) -> Numbers:
    X = rows(12, model.n_features_in_)
    mean, deviation = model.predict(X, return_std=True)
    function_mean, function_deviation = model.predict(X, return_std=True, observed=False)
    found = {"mean": mean, "variance": deviation**2}
    found |= {"function_mean": function_mean, "function_variance": function_deviation**2}
    found["log_density"] = model.log_density(
        X, np.round(mean) if model.likelihood == "poisson" else mean
    )
    if isinstance(model, SparseGPRegressor):
        found["covariance"] = model.predict(X[:3], return_cov=True, observed=False)[1]
        found["samples"] = model.sample_y(X[:3], 2, random_state=0)
    else:
        found["matched_mean"] = model.predict(X, method="matched")
    return found


def _classifier(model: Any) -> Numbers:
    X = rows(12, model.n_features_in_)
    labels = model.predict(X)
    proba = model.predict_proba(X)
    return {"proba": proba, "labels": [str(c) for c in labels]} | {
        "log_density": model.log_density(X, labels)
    }


def _embedding(model: GPLVM) -> Numbers:
    table = model.inverse_transform(model.embedding_[:2] + 0.1)
    if model.likelihood == "poisson":
        table = table.round()
    holed = table.copy()
    holed[0, 0] = np.nan
    mean, deviation = model.reconstruct(holed, return_std=True)
    infer_sites = {
        "position": model.transform(holed),
        "mean": mean,
        "variance": deviation**2,
        "log_density": model.log_density(table, given=holed),
        "row_bound": model.score_samples(holed),
    }
    return {"inverse": table, "inferred": infer_sites} | _latent_posterior(model.posterior_)


def _table(model: TabularModel) -> Numbers:
    found = model.predict(DataTable.of(mixed_columns(20, seed=1)))
    return {
        name: values.tolist() if values.dtype.kind in "OU" else values
        for name, values in found.items()
    }


def _posterior(model: Posterior | DeepPosterior) -> Numbers:
    # The first layer's inputs are those of a deep model.
    Z = model.Z if isinstance(model, Posterior) else model.layers[0].candidates
    X = _standard_rows(12, Z.shape[1]).to(Z)
    latent, observed = model.predict(X), model.predict(X, observed=True)
    found = {"function_mean": latent.mean, "function_variance": latent.variance}
    return found | {"mean": observed.mean, "variance": observed.variance}


def _latent_posterior(model: LatentPosterior) -> Numbers:
    position = _standard_rows(12, model.Q)
    latent = model.predict(position, 0.1 + position.square())
    observed = model.predict(position, 0.1 + position.square(), observed=True)
    found = {"function_mean": latent.mean, "function_variance": latent.variance}
    return found | {"mean": observed.mean, "variance": observed.variance}


def _shallow_model(model: SparseGP | VariationalGP) -> Numbers:
    X = _standard_rows(30, model.candidates.shape[1]).to(model.candidates)
    P = model.P if isinstance(model, VariationalGP) else 1
    # Counts, which every likelihood of these models can have observed.
    Y = torch.stack([(1 + torch.sin(X[:, 0] + p)).round() for p in range(P)], 1)
    data = Dataset.of(X, Y)
    return {"elbo": model.bound(data)} | _posterior(model.posterior(data))


def _deep_model(model: DeepGP) -> Numbers:
    return _posterior(model.posterior(samples=10))


def _latent_model(model: LatentVariableGP | SampledLatentGP) -> Numbers:
    function = model.function if isinstance(model, SampledLatentGP) else None
    P = 2 if function is None else function.P
    table = MaskedMatrix.of((2 + _standard_rows(model.latents.N, P)).round().abs())
    generator = torch.Generator().manual_seed(0)
    found = {"latent_mean": model.latents.mean, "latent_variance": model.latents.variance}
    found["elbo"] = model.bound(table, generator=generator)
    return found | _latent_posterior(model.posterior(table))


def _standard_rows(N: int, D: int) -> Tensor:
    return torch.from_numpy(rows(N, D) / 2 - 1.5)


_PREDICTIONS: list[tuple[Any, Callable[[Any], Numbers]]] = [
    ((SparseGPRegressor, DeepGPRegressor), _regressor),
    ((SparseGPClassifier, DeepGPClassifier), _classifier),
    (GPLVM, _embedding),
    (TabularModel, _table),
    ((Posterior, DeepPosterior), _posterior),
    (LatentPosterior, _latent_posterior),
    ((SparseGP, VariationalGP), _shallow_model),
    (DeepGP, _deep_model),
    ((LatentVariableGP, SampledLatentGP), _latent_model),
]


def mixed_columns(N: int = 90, *, seed: int = 0) -> dict[str, list[Any]]:
    """A table with numbers, missing numbers, categories, dates, names of rows and three targets."""
    rng = np.random.default_rng(seed)
    x, z = rng.uniform(0, 6, N), rng.normal(size=N)
    town = rng.choice(["Oslo", "Rome", "Turin"], N)
    y = np.sin(x) + 1.5 * (town == "Rome") + 0.2 * z + 0.1 * rng.normal(size=N)
    return {
        "id": [f"r{i}" for i in range(N)],
        "x": ["" if i % 20 == 7 else f"{x[i]:.4f}" for i in range(N)],
        "z": [f"{value:.4f}" for value in z],
        "town": town.tolist(),
        "day": [f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(N)],
        "y": [f"{value:.4f}" for value in y],
        "up": ["yes" if value > 0.7 else "no" for value in y],
        "visits": [str(count) for count in rng.poisson(np.exp(1 + 0.5 * y))],
    }


def compact(value: Any) -> Any:
    """The value as JSON; of a long array its first entries and its sum."""
    if isinstance(value, dict):
        return {name: compact(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        if not any(isinstance(part, float) for part in value):
            return [compact(part) for part in value]
        value = np.asarray(value)
    if isinstance(value, Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray):
        flat = value.astype(np.float64).ravel()
        found = {"shape": list(value.shape), "entries": flat[:ENTRIES].tolist()}
        if len(flat) > ENTRIES:
            found |= {"sum": flat.sum().item(), "magnitude": np.abs(flat).sum().item()}
        return found
    return value.item() if isinstance(value, np.generic) else value


def differences(
    expected: Any, found: Any, name: str = "", *, infer_sites: float = RTOL, rtol: float = RTOL
) -> Iterator[str]:
    """A line for each quantity that differs by more than a relative tolerance.

    Args:
        expected: what `compact` returned for the record.
        found: what it returned now.
        name: how lines begin.
        inferred: the tolerance of what follows from latent positions of new rows. An optimiser
            infers these until the gradient is small, so that on another machine they agree less.
        rtol: the tolerance of everything else.
    """
    if isinstance(expected, dict) and "entries" in expected:
        yield from _array_differences(expected, found, name, rtol)
    elif isinstance(expected, Mapping):
        names = [*expected, *(key for key in found if key not in expected)]
        for key in names:
            if key not in expected or key not in found:
                there = "recorded" if key in expected else "found now"
                yield f"{name}.{key}: only {there}"
            else:
                both, own = (expected[key], found[key]), infer_sites if key == "inferred" else rtol
                yield from differences(*both, f"{name}.{key}", infer_sites=infer_sites, rtol=own)
    elif isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            yield f"{name}: recorded {len(expected)} parts, found {found}"
            return
        for number, pair in enumerate(zip(expected, found, strict=True)):
            yield from differences(*pair, f"{name}[{number}]", infer_sites=infer_sites, rtol=rtol)
    elif isinstance(expected, float) and isinstance(found, float):
        if not _close(expected, found, rtol):
            yield f"{name}: recorded {expected!r}, found {found!r}"
    elif expected != found:
        yield f"{name}: recorded {expected!r}, found {found!r}"


def _array_differences(expected: Numbers, found: Any, name: str, rtol: float) -> Iterator[str]:
    if not isinstance(found, dict) or found.get("shape") != expected["shape"]:
        yield f"{name}: recorded shape {expected['shape']}, found {found}"
        return
    wrong = ~_close(expected["entries"], found["entries"], rtol)
    if wrong.any():
        at = int(wrong.argmax())
        pair = f"recorded {expected['entries'][at]!r}, found {found['entries'][at]!r}"
        yield f"{name}: {wrong.sum()} entries differ, first entry {at}: {pair}"
    elif "sum" in expected and not _close(
        expected["sum"], found["sum"], rtol, scale=expected["magnitude"]
    ):
        yield f"{name}: recorded sum {expected['sum']!r}, found {found['sum']!r}"


def _close(expected: Any, found: Any, rtol: float, *, scale: float = 0.0) -> NDArray[np.bool_]:
    """Whether numbers agree, each relative to itself; or all of them relative to `scale`."""
    a, b = np.asarray(expected, dtype=np.float64), np.asarray(found, dtype=np.float64)
    # Numbers near zero are sums of much larger ones, and as exact as these.
    most = np.abs(a[np.isfinite(a)]).max(initial=1.0)
    return np.isclose(b, a, rtol=rtol, atol=max(1e-3 * rtol * most, rtol * scale), equal_nan=True)
