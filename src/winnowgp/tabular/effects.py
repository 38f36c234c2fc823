"""What each column does: importance by permutation, effect curves, terms of a sum kernel."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from gpytorch.kernels import AdditiveKernel, Kernel, PeriodicKernel
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor

from winnowgp.data import DataTable
from winnowgp.data.encoding import ColumnEncoding, TableEncoder
from winnowgp.errors import InputError
from winnowgp.estimators.classification import ClassTargets
from winnowgp.estimators.deep import DeepEstimator
from winnowgp.estimators.regression import SparseGPRegressor
from winnowgp.models.heteroscedastic import HeteroscedasticPosterior
from winnowgp.models.kernels import covariance, prior_variance
from winnowgp.models.likelihoods import has_noise
from winnowgp.report.summary import ColumnImportance, Curve, Effect, Importance
from winnowgp.tabular.quality import Regressor, TableEstimator, class_densities

if TYPE_CHECKING:
    from winnowgp.tabular.model import TabularModel

FEWEST_STEPS, MOST_STEPS = 41, 1001
"""Least and largest number of grid points of a curve."""

PER_LENGTHSCALE, PER_PERIOD = 6, 16
"""Grid points within a lengthscale and a period, from which a curve looks smooth."""

MOST_CLASSES = 6
DENSITY_BINS = 40
MOST_TERM_CURVES = 12

_MOST_PREDICTIONS = 100_000
# Share of the prior variance that a term of a sum must exceed: 1 % of the standard deviation.
_NEGLIGIBLE = 1e-4
_MOST_ROWS = 1000

Values = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class RankedColumn:
    """A column whose effect is computed."""

    column: ColumnEncoding
    between: tuple[float, float] | None
    """The ends of the grid; None for categories."""
    values: NDArray[Any]
    """Its entries in the table: numbers, dates in days, or categories."""


def permutation_importance(
    model: "TabularModel", table: DataTable, *, repeats: int = 5, seed: int = 0
) -> Importance:
    """Return how much worse predictions become if the entries of a column are permuted.

    The table should have rows that were not used for training. The loss is that of R² for numbers
    and counts, and of log probability in nats per observation for classes; with its standard error
    over rows. A loss within two standard errors of zero means that the model hardly needs the
    column. Columns that carry the same information share their importance: each is small if the
    model can use the other. `fit_table` does this with the held-out rows.

    Args:
        table: rows with the target.
        repeats: number of permutations of each column.
        seed: seed of the permutations.
    """
    target = model.target
    table.require_columns([target], argument="`table`")
    if isinstance(model.estimator, ClassTargets):
        y: NDArray[Any] = table.strings(target).astype(str)
    else:
        numbers = table.numbers(target)
        if numbers is None:
            raise InputError(
                f"the target {target!r} must be numeric; it has strings. Correct them."
            )
        y = numbers
    X = model.encoder.encode(table)
    return importance(model.estimator, model.encoder, X, y, repeats=repeats, seed=seed)


def importance(
    estimator: TableEstimator,
    encoder: TableEncoder,
    X: Values,
    y: NDArray[Any],
    *,
    repeats: int = 5,
    seed: int = 0,
) -> Importance:
    """Return the importance of each column, of at most 1,000 rows of an encoded table."""
    if len(y) < 2:
        raise InputError(f"importance needs at least 2 rows; got {len(y)}.")
    rng = np.random.default_rng(seed)
    affordable = max(50, _MOST_PREDICTIONS // (repeats * len(encoder.columns)))
    rows = rng.permutation(len(y))[: min(_MOST_ROWS, affordable)]
    X, y = X[rows], y[rows]
    base = _losses(estimator, X, y)
    columns: list[ColumnImportance] = []
    for column, features in zip(encoder.columns, encoder.feature_numbers.values(), strict=True):
        permuted = np.zeros_like(base)
        for _ in range(repeats):
            shuffled = X.copy()
            shuffled[:, features] = X[rng.permutation(len(y))][:, features]
            permuted += _losses(estimator, shuffled, y) / repeats
        loss = permuted - base
        columns.append(
            {
                "column": column.name,
                "loss": float(loss.mean()),
                "standard_error": float(loss.std(ddof=1) / sqrt(len(y))),
            }
        )
    classes = isinstance(estimator, ClassTargets)
    measure = "log probability, nats per observation" if classes else "R²"
    columns.sort(key=lambda each: -each["loss"])
    return {"measure": measure, "rows": len(y), "columns": columns}


def _losses(estimator: TableEstimator, X: Values, y: NDArray[Any]) -> Values:
    """Return the loss of each row: negative log probability, or squared error over variance."""
    if isinstance(estimator, ClassTargets):
        return -class_densities(estimator, X, y)
    return (estimator.predict(X) - y) ** 2 / max(float(np.var(y)), 1e-300)


def relevances(estimator: Any, encoder: TableEncoder) -> dict[str, float] | None:
    """Return 1 / lengthscale of each standardised column, the largest of its features.

    Terms of a sum whose variance is negligible have lengthscales that mean nothing, and are left
    out. The result is None unless a term has one lengthscale per feature, and for deep models: what
    a column matters to their predictions depends on all layers.
    """
    if isinstance(estimator, DeepEstimator):
        return None
    scales = [
        1 / component.lengthscale.detach().reshape(-1).numpy()
        for term in _noticeable_terms(estimator.kernel_, len(encoder.features))
        for component in term.modules()
        if isinstance(component, Kernel)
        and component.has_lengthscale
        and component.lengthscale.numel() == len(encoder.features)
    ]
    if not scales:
        return None
    most = np.max(scales, axis=0)
    return {
        column.name: float(most[features].max()) if features else 0.0
        for column, features in zip(encoder.columns, encoder.feature_numbers.values(), strict=True)
    }


def _noticeable_terms(kernel: Kernel, features: int) -> list[Kernel]:
    """Return the terms of a sum with more than a share `_NEGLIGIBLE` of the prior variance.

    The variance is that of inputs one standard deviation from the mean.
    """
    if not isinstance(kernel, AdditiveKernel):
        return [kernel]
    x = torch.ones(1, features, dtype=torch.float64)
    terms = [term for term in kernel.kernels if isinstance(term, Kernel)]
    with torch.no_grad():
        variances = [prior_variance(term, x).item() for term in terms]
    pairs = zip(terms, variances, strict=True)
    return [term for term, variance in pairs if variance > _NEGLIGIBLE * sum(variances)]


def column_effect(
    model: "TabularModel", column: str, *, between: tuple[float, float] | None = None
) -> Effect:
    """Return the prediction as one column varies and all others have typical values.

    Others have their median or most frequent category. The band is ± 2 standard deviations of the
    latent function, without noise. The grid resolves the shortest lengthscale and period.

    Args:
        column: name of an input of the table.
        between: ends of the grid, for a number or for a date in days since 1970; by default those
            of the effect in the summary, or the range of the column.
    """
    columns = {each.name: each for each in model.encoder.columns}
    if column not in columns:
        known = ", ".join(map(repr, list(columns)[:12]))
        raise InputError(
            f"`column` must be an input of the model; got {column!r}. They are {known}."
        )
    (spread,) = [c["spread"] for c in model.summary["columns"] if c["name"] == column]
    ends = between if between is not None or not spread else (spread[0], spread[-1])
    return effect_curves(model.estimator, model.encoder, columns[column], between=ends)


def effect_curves(
    estimator: TableEstimator,
    encoder: TableEncoder,
    column: ColumnEncoding,
    *,
    between: tuple[float, float] | None,
    values: NDArray[Any] | None = None,
    term: tuple[str, Kernel] | None = None,
) -> Effect:
    """Return the effect of a column on predictions, or its part of one term of the kernel.

    Args:
        between: the ends of the grid, for numbers and dates.
        values: entries of the column in the table, for its density: numbers, or categories.
        term: name and kernel of a term.
    """
    at, note = _grid(estimator, encoder, column, between, None if term is None else term[1])
    X = np.hstack(
        [
            _features(other, at if other is column else [other.typical] * len(at))
            for other in encoder.columns
        ]
    )
    if term is not None:
        curves = [_term_curve(estimator, term[1], X)]
    elif isinstance(estimator, ClassTargets):
        curves = _class_curves(estimator, X)
    else:
        curves = [_curve(estimator, X)]
    return {
        "column": column.name,
        "kind": column.kind,
        "at": [_short(value) for value in at] if between is not None else at,
        "curves": curves,
        "counts": [] if values is None else _counts(values, at, categorical=between is None),
        "term": "" if term is None else term[0],
        "note": note,
    }


def term_effects(
    estimator: TableEstimator,
    encoder: TableEncoder,
    name: str,
    *,
    ranked: Sequence[RankedColumn],
) -> list[Effect]:
    """Return the contribution of each term of a sum kernel along the columns it depends on.

    With k = Σ_j k_j, the terms are independent a priori and f = m + Σ_j f_j. Given q(u),

        E f_j(x) = k_j(x, Z) K_uu⁻¹ E u,
        cov(f_j(x), f_j(x')) = k_j(x, x') − Σ_m s_m (A k_j(Z, x))_m (A k_j(Z, x'))_m,

    as for f itself (see `Posterior`). The data hardly say which term has which level: only their
    sum is known. So curves show f_j minus its average over the grid, and the uncertainty of that.

    Args:
        name: the kernel as an expression, whose terms give the names.
        ranked: the columns, the most important first.
    """
    kernel = None if isinstance(estimator, DeepEstimator) else estimator.kernel_
    if not isinstance(kernel, AdditiveKernel):
        return []
    terms = [term for term in kernel.kernels if isinstance(term, Kernel)]
    names = term_names(name)
    if len(names) != len(terms):
        names = [f"term {number + 1}" for number in range(len(terms))]
    owned = {name: set(numbers) for name, numbers in encoder.feature_numbers.items()}
    each = max(1, MOST_TERM_CURVES // len(terms))
    effects = []
    for label, term in zip(names, terms, strict=True):
        used = _used_features(term, len(encoder.features))
        own = [entry for entry in ranked if owned[entry.column.name] & used]
        effects += [
            effect_curves(
                estimator,
                encoder,
                entry.column,
                between=entry.between,
                values=entry.values,
                term=(label, term),
            )
            for entry in own[:each]
        ]
    return effects[:MOST_TERM_CURVES]


def term_names(kernel: str) -> list[str]:
    """Return the terms of a sum of kernels, as they are written.

    >>> term_names("rbf['a'] * linear + periodic(period=7) + rbf")
    ["rbf['a'] * linear", 'periodic(period=7)', 'rbf']
    """

    def terms(node: ast.expr) -> Iterator[str]:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield from terms(node.left)
            yield from terms(node.right)
        else:
            yield ast.unparse(node)

    try:
        return list(terms(ast.parse(kernel.strip(), mode="eval").body))
    except SyntaxError:
        return [kernel]


def resolution(
    kernel: Kernel, feature: int, features: int, scale: float
) -> tuple[float, float | None]:
    """Return the grid spacing that shows a kernel along a feature, and its shortest period.

    Args:
        feature: number of the feature.
        features: number of all features.
        scale: standard deviation of the feature, by which it was divided.

    Returns: spacing and period in the feature's units; infinity and None if there are none.
    """
    spacing, shortest = np.inf, None
    for component in kernel.modules():
        if not isinstance(component, Kernel):
            continue
        dims: Any = component.active_dims
        own = list(range(features)) if dims is None else dims.tolist()
        if feature not in own or not component.has_lengthscale:
            continue
        position = own.index(feature)
        lengthscale = _entry(component.lengthscale, position)
        if isinstance(component, PeriodicKernel):
            period = _entry(component.period_length, position) * scale
            shortest = period if shortest is None else min(period, shortest)
            # exp(−2 sin²(π d / p) / l): features are as short as p √l / 2π within a period.
            fine = period * min(1.0, 2 * sqrt(lengthscale) / np.pi)
            spacing = min(spacing, fine / PER_PERIOD)
        else:
            spacing = min(spacing, lengthscale * scale / PER_LENGTHSCALE)
    return float(spacing), shortest


def _entry(parameter: Tensor, position: int) -> float:
    values = parameter.detach().reshape(-1)
    return float(values[position if len(values) > 1 else 0])


def _used_features(kernel: Kernel, features: int) -> set[int]:
    """Return the features that a kernel depends on."""
    dims: Any = kernel.active_dims
    if dims is not None:
        return set(dims.tolist())
    inner = [each for each in kernel.children() if isinstance(each, Kernel)]
    inner += [k for each in kernel.children() for k in each.children() if isinstance(k, Kernel)]
    return set().union(*(_used_features(k, features) for k in inner)) or set(range(features))


def _grid(
    estimator: Any,
    encoder: TableEncoder,
    column: ColumnEncoding,
    between: tuple[float, float] | None,
    term: Kernel | None,
) -> tuple[list[Any], str]:
    """Return the grid of an effect, and a note if it is not the whole range."""
    if between is None:
        return list(column.categories), ""
    low, high = between
    feature = encoder.feature_numbers[column.name][0]
    deep = isinstance(estimator, DeepEstimator)
    kernel = estimator.posterior_.layers[0].kernel if deep else term or estimator.kernel_
    scale = float(estimator._x_scaler.scale[feature])
    spacing, period = resolution(kernel, feature, len(encoder.features), scale)
    needed = (high - low) / spacing if spacing > 0 else np.inf
    unit = " days" if column.kind == "date" else ""
    if period is not None and (
        needed > MOST_STEPS - 1 or (term is not None and high - low > 4 * period)
    ):
        # A whole number of periods is readable; all of them together would be a solid band.
        cycles = 3 if term is not None else max(3, int((MOST_STEPS - 1) * spacing / period))
        shown = min(cycles * period, high - low)
        shares = [f"{v:.0f}" if v >= 100 else f"{v:.2g}" for v in (shown, high - low)]
        note = f"the last {shares[0]} of {shares[1]}{unit} are shown"
        low, needed = high - shown, shown / spacing
    else:
        note = ""
    steps = int(min(max(ceil(needed) + 1 if np.isfinite(needed) else 0, FEWEST_STEPS), MOST_STEPS))
    return np.linspace(low, high, steps).tolist(), note


def _counts(values: NDArray[Any], at: Sequence[Any], *, categorical: bool) -> list[int]:
    """Return the number of entries in bins between the ends of a grid, or of each category."""
    if categorical:
        return [int((values == category).sum()) for category in at]
    low, high = float(at[0]), float(at[-1])
    if low == high:
        return [len(values)]
    return np.histogram(values, DENSITY_BINS, range=(low, high))[0].tolist()


def _features(column: ColumnEncoding, values: list[Any]) -> Values:
    if column.kind == "category":
        return np.array(
            [[float(category == value) for category in column.categories] for value in values]
        )
    numbers = np.array(values, dtype=np.float64)[:, None]
    return np.hstack([numbers, np.zeros_like(numbers)]) if column.flagged else numbers


def _short(value: float) -> float:
    """Return a number with nine digits, which is enough for a plot of dates and minutes."""
    return float(f"{value:.9g}")


def _shortened(values: Values) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _as_curve(label: str, mean: Values, lower: Values, upper: Values) -> Curve:
    return {
        "label": label,
        "mean": _shortened(mean),
        "lower": _shortened(lower),
        "upper": _shortened(upper),
    }


def _curve(model: Regressor, X: Values) -> Curve:
    """Return the mean of an observation, and ± 2 sd of the function without noise.

    If noise depends on the inputs, intervals of an observation are added.

    For a model of log y it is the median, which the mean exceeds by a factor that is the noise's.
    """
    latent = model._predict_latent(model._inputs(X), model.posterior_.predict, observed=False)
    sd = latent.variance.sqrt()
    lower, upper = (_in_units(model, latent.mean + 2 * side * sd) for side in (-1, 1))
    mean = _in_units(model, latent.mean) if model._takes_logarithm() else model.predict(X)
    curve = _as_curve("", mean, lower, upper)
    if isinstance(model.posterior_, HeteroscedasticPosterior):
        below, above = (_shortened(end) for end in model.predict_interval(X))
        curve["observed"] = (below, above)
    return curve


def _in_units(model: Regressor, f: Tensor) -> Values:
    """Return the target that belongs to a latent value: itself, eᶠ, or the mean of counts."""
    if has_noise(model.likelihood_):
        return model._y_scaler.values(f)
    return model.likelihood_.forward(f[:, 0]).mean.numpy()


def _class_curves(model: ClassTargets, X: Values) -> list[Curve]:
    """Return the probability of the second of two classes with ± 2 sd, or of several without."""
    probability = model.predict_proba(X)
    if len(model.classes_) == 2:
        latent = model.posterior_.predict(model._inputs(X))
        mean, sd = latent.mean[:, 0].numpy(), latent.variance[:, 0].sqrt().numpy()
        label, ends = str(model.classes_[1]), (norm.cdf(mean - 2 * sd), norm.cdf(mean + 2 * sd))
        return [_as_curve(label, probability[:, 1], *ends)]
    nothing = np.zeros(0)
    return [
        _as_curve(str(label), p, nothing, nothing)
        for label, p in list(zip(model.classes_, probability.T, strict=True))[:MOST_CLASSES]
    ]


@torch.no_grad()
def _term_curve(model: TableEstimator, term: Kernel, X: Values) -> Curve:
    """Return mean and ± 2 sd of a term of the latent function, minus its average over the rows.

    It is that of the first of several functions. In regression with noise it is in the units of the
    target, otherwise in those of the function.
    """
    assert not isinstance(model, DeepEstimator)
    # The terms of the members of a mixture do not add up to averages: those of its mode do.
    posterior, rows = model.posterior_.described, model._inputs(X)
    k = covariance(term, rows, posterior.Z)
    mean = (k @ posterior.weights)[:, 0].numpy()
    mean = mean - mean.mean()
    G = k @ posterior.gain[0]
    C = covariance(term, rows, rows) - (G * posterior.signs[0]) @ G.mT
    variance = C.diagonal() - 2 * C.mean(1) + C.mean()
    sd = variance.clamp_min(0).sqrt().numpy()
    scale = 1.0
    if isinstance(model, SparseGPRegressor):
        scale = model._y_scaler.columns.scale[0].item()
    return _as_curve("", scale * mean, scale * (mean - 2 * sd), scale * (mean + 2 * sd))
