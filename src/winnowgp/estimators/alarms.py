"""Tests of a fit's result, each of which returns a warning or None.

They look at rows that were not used for training, so that a well-specified model sets each of them
off in at most a few fits of a thousand: a p-value, corrected for the number of columns, must be
below `SIGNIFICANT`, and the effect must be large enough to matter. `benchmarks/alarms.py` measures
how often well-specified fits set one off.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import isfinite, lgamma, log, sqrt
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, chi2, kruskal, kurtosistest, rankdata, spearmanr

from winnowgp.errors import (
    AllCandidatesWarning,
    CoverageWarning,
    DependentResidualsWarning,
    ExtrapolationWarning,
    FitWarning,
    HeavyTailsWarning,
    LeakageWarning,
    NoInducingPointsWarning,
    PeriodicResidualsWarning,
    WorseThanConstantWarning,
)
from winnowgp.estimators.periodogram import FEWEST, largest_peak
from winnowgp.report.sentences import rounded

Values = NDArray[np.float64]

SIGNIFICANT = 0.002
"""Largest p-value of an alarm, after the correction for the number of columns."""

NOTICEABLE = 0.03
"""Least share of the residuals' variance that a pattern must explain."""

PERFECT = 0.999
"""R², accuracy and rank correlation from which predictions are suspiciously good."""

COUNTS = ("poisson", "negative-binomial")
"""Likelihoods of counts."""

_BINS = 5
_FEW_ROWS, _MANY_ROWS = 10, 50


@final
@dataclass(frozen=True, slots=True)
class Column:
    """A column that residuals may depend on: an input, the prediction, or the order of rows."""

    name: str
    kind: str
    """"number", "date", "words" for categories, "order" or "prediction"."""
    values: NDArray[Any]
    """One entry per row: numbers, dates in days, or categories."""

    @property
    def text(self) -> str:
        """The column in a sentence."""
        if self.kind == "order":
            return "the order of the rows"
        return "the predicted value" if self.kind == "prediction" else f"column {self.name!r}"

    @property
    def is_categorical(self) -> bool:
        """Whether the entries are categories."""
        return self.kind == "words"


def selection_alarms(estimator: Any) -> list[FitWarning]:
    """Return the alarms about the number of inducing points of a fitted sparse estimator."""
    M, frontier = estimator.n_inducing_, estimator.frontier_
    few = frontier is not None and frontier.N < _FEW_ROWS
    if M == 0 and (few or _has_no_noise(estimator)):
        return []  # Of so few rows, or of a constant target, a constant is the model to expect.
    if M == 0:
        constant = "no inducing points were selected: the model predicts the same for every row"
        if estimator.alpha != "auto":
            return [
                NoInducingPointsWarning(
                    f"{constant}, because the prior outweighs what they gain. Lower `alpha` "
                    f"(`--alpha`), which is {estimator.alpha:g}."
                )
            ]
        kernel = "name a kernel such as `kernel='rbf + linear'` (`--kernel`)"
        if estimator.kernel != "auto":
            kernel = "compare kernels with `kernel='auto'`"
        return [
            NoInducingPointsWarning(
                f"{constant}, because models with inducing points gain no more than they would by "
                "chance. Check that the inputs have to do with the target, add columns or rows, or "
                f"{kernel}."
            )
        ]
    goals = (estimator.max_points, estimator.max_predict_us)
    if any(goal is not None for goal in goals):
        return []
    given = estimator.candidates if not isinstance(estimator.candidates, str) else None
    offered = estimator.n_candidates if given is None else len(given)
    # With a tolerance, a `GrowthLimitWarning` says so where more candidates would pay.
    if estimator.alpha != "auto" and offered is not None and offered <= M:
        return [
            AllCandidatesWarning(
                f"all {M} candidates were selected, so more inducing points may pay. Raise "
                "`n_candidates`, or give more `candidates`."
            )
        ]
    rows = 0 if frontier is None else frontier.N
    if rows >= _MANY_ROWS and 0.95 * rows <= M:
        return [
            AllCandidatesWarning(
                f"{M} of {rows:g} training rows became inducing points: the model is hardly "
                "smaller than an exact Gaussian process. Leave out columns that identify rows "
                "with `drop` (`--drop`), or accept fewer points with a larger `tolerance` "
                "(`--tolerance`) or `max_points` (`--max-points`)."
            )
        ]
    return []


def _has_no_noise(estimator: Any) -> bool:
    """Return whether a constant explains standardised targets without noise: they are constant."""
    noise = getattr(estimator.posterior_.likelihood, "noise", None)
    return noise is not None and bool(noise.max() < 0.01)


def constant_alarm(nats: Values, constant: Values) -> FitWarning | None:
    """Return an alarm if the mean log density is not above that of a constant prediction.

    Args:
        nats: log density of each held-out row.
        constant: log density of the same rows under one distribution for all.
    """
    gain, n = nats - constant, len(nats)
    if n < 2 or gain.mean() > 0:
        return None
    error = gain.std(ddof=1) / sqrt(n)
    return WorseThanConstantWarning(
        f"the held-out log density, {nats.mean():.3g} nats per observation, is not above that of "
        f"a constant prediction, {constant.mean():.3g} (difference {gain.mean():.2g} ± "
        f"{error:.2g}, one standard error). Do not rely on these predictions: look for outliers "
        "among the residuals, add columns or rows, or name another `kernel` (`--kernel`)."
    )


def coverage_alarm(inside: NDArray[np.bool_], *, likelihood: str) -> FitWarning | None:
    """Return an alarm if 95 % intervals hold far fewer or more rows, by a binomial test.

    "Far" is a share of rows outside that is above 10 % or below 2.5 %.

    Args:
        inside: whether each held-out row lies in its interval.
        likelihood: of the model. Intervals of counts end at integers, and so hold at least 95 %.
    """
    counts = likelihood in COUNTS
    n, within = len(inside), int(inside.sum())
    outside = 1 - within / n
    if binomtest(within, n, 0.95).pvalue >= 2.5 * SIGNIFICANT:
        return None
    held = f"the 95 % intervals hold {within} of {n} held-out rows ({100 * (1 - outside):.0f} %)"
    if outside > 0.1:
        advice = {
            "poisson": "Counts vary more than Poisson counts do: fit "
            "`likelihood='negative-binomial'` (`--likelihood negative-binomial`).",
            "negative-binomial": "Look for outliers among the counts, or add columns or rows.",
        }.get(
            likelihood,
            "Noise may depend on the inputs or have outliers: try `likelihood='heteroscedastic'` "
            "(`--likelihood heteroscedastic`), 'student-t' or the logarithm of the target, or more "
            "rows.",
        )
        return CoverageWarning(
            f"{held}: they are too narrow, and predictions too certain. {advice}"
        )
    if outside < 0.025 and not counts:
        return CoverageWarning(
            f"{held}: they are too wide. A few extreme targets may have raised the noise: try "
            "`likelihood='student-t'` (`--likelihood student-t`) or the logarithm of the target."
        )
    return None


def leakage_alarm(columns: Sequence[Column], y: NDArray[Any], score: float) -> FitWarning | None:
    """Return an alarm if predictions are nearly perfect and one of several columns suffices.

    Args:
        columns: at least two inputs; with one, it is no surprise that it determines the target.
        y: targets of all rows: numbers, or class labels as strings.
        score: R² or accuracy on held-out rows.
    """
    if score < PERFECT or len(columns) < 2 or len(y) < FEWEST:
        return None
    classes = y.dtype.kind == "U"
    for column in columns:
        determines = _separates if classes else _explains
        if determines(column, y):
            measure = "accuracy" if classes else "R²"
            return LeakageWarning(
                f"{measure} on held-out rows is {score:.4g}, and {column.text} alone determines "
                "the target. If its values are computed from the target, or known only after it, "
                f"leave it out with `drop` (`--drop {column.name!r}`)."
            )
    return None


def residual_alarms(
    z: Values, columns: Sequence[Column], *, predicted: Values, positive: bool, likelihood: str
) -> list[FitWarning]:
    """Return alarms about patterns in residuals: their mean, a period, their spread, their tails.

    Args:
        z: residuals in predicted standard deviations, or normal scores; standard normal if the
            model is right.
        columns: the inputs and the order of the rows.
        predicted: predicted means.
        positive: whether the target is positive, so that it has a logarithm.
        likelihood: of the model.
    """
    if len(z) < FEWEST:
        return []
    # A pattern of the level would be one of the size, and of the tails, as well.
    alarm = (
        periodic_alarm(z, columns)
        or _mean_alarm(z, columns)
        or _spread_alarm(z, columns, predicted, positive=positive, likelihood=likelihood)
        or _tails_alarm(z, positive=positive, likelihood=likelihood)
    )
    return [] if alarm is None else [alarm]


def class_alarm(
    probability: Values, truth: NDArray[np.bool_], labels: Sequence[str], columns: Sequence[Column]
) -> FitWarning | None:
    """Return an alarm if the frequency of a class departs from its probability along a column.

    With groups g of rows, Σ_g (Σ (y − p))² / Σ p (1 − p) has a χ² distribution with one degree of
    freedom per group if the probabilities are right.
    """
    if len(truth) < FEWEST:
        return None
    tested = range(1, 2) if len(labels) == 2 else range(len(labels))
    found: tuple[float, str] | None = None
    for c in tested:
        p = np.clip(probability[:, c], 1e-6, 1 - 1e-6)
        for column in columns:
            groups = [g for g in _groups(column) if (p[g] * (1 - p[g])).sum() >= 1]
            if len(groups) < 2:
                continue
            excess = np.array([(truth[g, c] - p[g]).sum() for g in groups])
            variance = np.array([(p[g] * (1 - p[g])).sum() for g in groups])
            value = float(chi2.sf((excess**2 / variance).sum(), len(groups)))
            value *= len(tested) * len(columns)
            worst = groups[int(np.argmax(excess**2 / variance))]
            if found is None or value < found[0]:
                found = (
                    value,
                    f"probabilities are wrong along {column.text}: class {labels[c]!r} is "
                    f"predicted with {100 * p[worst].mean():.0f} % and observed in "
                    f"{100 * truth[worst, c].mean():.0f} % of the held-out rows "
                    f"{_where(column, worst)}",
                )
    if found is None or found[0] >= SIGNIFICANT:
        return None
    return DependentResidualsWarning(
        f"{found[1]}. Add columns that explain it, or name another kernel with `kernel` "
        "(`--kernel`)."
    )


def periodic_alarm(z: Values, columns: Sequence[Column]) -> FitWarning | None:
    """Return an alarm if residuals repeat along a date, a number or the order of the rows.

    The largest peak of the Lomb-Scargle periodogram of normal scores is compared with Baluev's
    bound on the probability that residuals without a period have a peak as large.
    """
    peaks = [(largest_peak(column.values, z), column) for column in columns if _is_time(column)]
    peaks = [(peak, column) for peak, column in peaks if peak is not None]
    if not peaks:
        return None
    peaks = [
        (peak, column)
        for peak, column in peaks
        if peak.probability * len(peaks) < SIGNIFICANT and peak.share >= NOTICEABLE
    ]
    if not peaks:
        return None
    # Rows are often in the order of a column; the column can be named in a kernel.
    peak, column = min(peaks, key=lambda each: (each[1].kind == "order", each[0].probability))
    seen = f"residuals of held-out rows repeat every {peak.period:.4g}"
    unit = {"date": "days", "order": "rows"}.get(column.kind, "units")
    share = f"which explains {100 * peak.share:.0f} % of their variance"
    if column.kind == "order":
        return PeriodicResidualsWarning(
            f"{seen} rows, {share}. Add the time of each row as a column, and a periodic term: "
            "`kernel='rbf + periodic[time]'` (`--kernel`)."
        )
    term = f"periodic[{column.name!r}](period={peak.period:.4g})"
    return PeriodicResidualsWarning(
        f"{seen} {unit} of column {column.name!r}, {share}. Add a periodic term: "
        f'`kernel="rbf + {term}"` (`--kernel`).'
    )


@final
class FarRows:
    """Counts the rows to predict that lie far outside the training rows, block by block.

    A row is far outside if a number or a date is beyond the training rows by more than half of
    their range.

    Args:
        ranges: least and largest entry of each column of numbers or dates in the training rows.
        dates: names of the columns of dates.
    """

    def __init__(self, ranges: Mapping[str, tuple[float, float]], dates: Set[str]) -> None:
        self._ranges, self._dates = ranges, dates
        self._rows = 0
        self._far: dict[str, tuple[int, int, float]] = {}

    def add(self, values: Mapping[str, Values], rows: int) -> None:
        """Look at the entries of the next rows."""
        for name, (low, high) in self._ranges.items():
            beyond = np.maximum(low - values[name], values[name] - high)
            far = beyond > 0.5 * (high - low)
            if far.any():
                count, row, value = self._far.get(name, (0, -1, 0.0))
                if row < 0:
                    row = int(far.argmax())
                    row, value = self._rows + row, float(values[name][row])
                self._far[name] = (count + int(far.sum()), row, value)
        self._rows += rows

    def alarm(self) -> FitWarning | None:
        """Return an alarm that names the column with the most such rows."""
        if not self._far:
            return None
        name, (count, row, value) = max(self._far.items(), key=lambda item: item[1][0])
        low, high = self._ranges[name]
        given, least, most = (self._text(name, each) for each in (value, low, high))
        others = f" (and {len(self._far) - 1} other columns)" if len(self._far) > 1 else ""
        return ExtrapolationWarning(
            f"{count} of {self._rows} rows lie far outside the training rows: column {name!r} is "
            f"{given} in row {row + 1}, and was {least} to {most} in training{others}. "
            "Predictions there rest on the kernel alone; fit again with such rows."
        )

    def _text(self, name: str, value: float) -> str:
        if name in self._dates:
            return str(np.array(value).astype("datetime64[D]"))
        return f"{value:.6g}"


def _mean_alarm(z: Values, columns: Sequence[Column]) -> FitWarning | None:
    """Return an alarm if the level of the residuals depends on a column."""
    found = _dependence(z, columns)
    if found is None:
        return None
    column, rows, _ = found
    side = "above" if z[rows].mean() > z.mean() else "below"
    advice = (
        "If the rows are in the order of time, add the time as a column."
        if column.kind == "order"
        else "Name a kernel in which this column has a term of its own, such as "
        f"`kernel='rbf + matern32[{column.name}]'` (`--kernel`), or allow more inducing points."
    )
    return DependentResidualsWarning(
        f"residuals of held-out rows depend on {column.text}: targets are {side} their predictions "
        f"{_where(column, rows)}. {advice}"
    )


def _spread_alarm(
    z: Values, columns: Sequence[Column], predicted: Values, *, positive: bool, likelihood: str
) -> FitWarning | None:
    """Return an alarm if the size of the residuals depends on the prediction or a column."""
    size = np.abs(z - np.median(z))
    found = _dependence(size, [Column("", "prediction", predicted)]) or _dependence(size, columns)
    if found is None:
        return None
    column, rows, p = found
    ratio = size[rows].mean() / max(size.mean(), 1e-12)
    there, elsewhere = ("narrow", "wide") if ratio > 1 else ("wide", "narrow")
    varying = "noise that depends on the inputs (`--likelihood heteroscedastic`)"
    if column.kind == "prediction" and positive:
        advice = (
            "Fit the logarithm of the target (`--log-target`), whose noise is then the same "
            f"everywhere, or {varying}."
        )
    elif likelihood == "gaussian":
        advice = (
            f"Intervals are too {there} there and too {elsewhere} elsewhere: fit {varying}, or "
            "transform the target."
        )
    else:
        advice = (
            f"Intervals are too {there} there and too {elsewhere} elsewhere: transform the "
            "target, or add columns that the noise depends on."
        )
    return DependentResidualsWarning(
        f"the noise depends on {column.text} (p = {p:.1g}): residuals are {ratio:.1f} times as "
        f"large as on average {_where(column, rows)}. {advice}"
    )


def _tails_alarm(z: Values, *, positive: bool, likelihood: str) -> FitWarning | None:
    """Return an alarm if the kurtosis of the residuals is above that of a normal distribution."""
    test = kurtosistest(z, alternative="greater")
    centred = z - z.mean()
    kurtosis = float((centred**4).mean() / z.var() ** 2 - 3)
    if not isfinite(kurtosis) or test.pvalue >= SIGNIFICANT or kurtosis < 1.5:
        return None
    skewed = positive and float((centred**3).mean() / z.var() ** 1.5) > 1
    logarithm = ", or the logarithm of the target (`--log-target`)" if skewed else ""
    return HeavyTailsWarning(
        f"residuals of held-out rows have heavy tails (excess kurtosis {kurtosis:.1f}; the largest "
        f"is {np.abs(z).max():.1f} predicted standard deviations). Check these rows for "
        f"errors{_robust(likelihood)}{logarithm}."
    )


def _robust(likelihood: str) -> str:
    """Return a clause that suggests a likelihood with heavier tails, if there is one."""
    if likelihood in ("student-t", "negative-binomial"):
        return ""
    if likelihood == "poisson":
        return (
            ", or fit `likelihood='negative-binomial'` (`--likelihood negative-binomial`), whose "
            "counts vary more"
        )
    return (
        ", or fit `likelihood='student-t'` (`--likelihood student-t`), which is robust to outliers"
    )


def _dependence(
    values: Values, columns: Sequence[Column]
) -> tuple[Column, NDArray[np.intp], float] | None:
    """Return the column that the values depend on most, the rows that differ most, and p.

    p is the probability of such a dependence by chance, of any of the columns.

    Each column is tested by Kruskal and Wallis' test of groups of rows with similar entries;
    numbers also by Spearman's rank correlation, which sees a trend in fewer rows.
    """
    best: tuple[float, Column, list[NDArray[np.intp]]] | None = None
    for column in columns:
        groups = _groups(column)
        if len(groups) < 2 or np.ptp(values) == 0:
            continue
        p = float(kruskal(*(values[g] for g in groups)).pvalue)
        if not column.is_categorical:
            trend: Any = spearmanr(column.values, values)
            p = 2 * min(p, float(trend.pvalue))
        if best is None or p < best[0]:
            best = (p, column, groups)
    if best is None or best[0] * len(columns) >= SIGNIFICANT:
        return None
    p, column, groups = best
    offsets = [values[g].mean() - values.mean() for g in groups]
    between = sum(len(g) * d**2 for g, d in zip(groups, offsets, strict=True))
    if between < NOTICEABLE * ((values - values.mean()) ** 2).sum():
        return None
    return column, groups[int(np.argmax(np.abs(offsets)))], p * len(columns)


def _is_time(column: Column) -> bool:
    """Return whether a column may be a time: a date, in the order of the rows, or on a grid."""
    values = column.values
    if column.is_categorical or len(np.unique(values)) <= len(values) / 2:
        return False
    steps = np.diff(values)
    if column.kind != "number" or (steps >= 0).all() or (steps <= 0).all():
        return True
    gaps = np.diff(np.unique(values))
    multiples = gaps / np.quantile(gaps, 0.1)
    return bool((np.abs(multiples - np.round(multiples)) < 0.05).all())


def _groups(column: Column) -> list[NDArray[np.intp]]:
    """Return the rows of each category, or of up to five intervals with as many rows each."""
    values = column.values
    if not column.is_categorical and len(np.unique(values)) > _BINS:
        bins = min(_BINS, len(values) // 8)
        edges = np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1])
        values = np.searchsorted(edges, values, side="right")
    groups = [np.flatnonzero(values == value) for value in np.unique(values)]
    return [g for g in groups if len(g) >= 5]


def _where(column: Column, rows: NDArray[np.intp]) -> str:
    """Return a clause that says where these rows are."""
    values = column.values[rows]
    if column.is_categorical:
        return f"where it is {values[0]!r}"
    low, high = values.min(), values.max()
    if column.kind == "order":
        return f"in rows {low + 1:.0f} to {high + 1:.0f}"
    if column.kind == "date":
        days = np.array([low, high]).astype("datetime64[D]")
        return f"from {days[0]} to {days[1]}"
    return f"where it is {rounded(low)}" + (f" to {rounded(high)}" if low < high else "")


def _explains(column: Column, y: Values) -> bool:
    """Return whether a numeric target is a monotone function of a column, or constant within it."""
    if column.is_categorical:
        kinds, rows = np.unique(column.values, return_inverse=True)
        if len(kinds) > len(y) / 4:
            return False
        means = np.bincount(rows, y) / np.bincount(rows)
        return bool(((y - means[rows]) ** 2).sum() <= (1 - PERFECT) * ((y - y.mean()) ** 2).sum())
    if np.ptp(column.values) == 0 or np.ptp(y) == 0:
        return False
    correlation = np.corrcoef(rankdata(column.values), rankdata(y))[0, 1]
    return bool(abs(correlation) >= PERFECT)


def _separates(column: Column, labels: NDArray[Any]) -> bool:
    """Return whether each category, or each of as many intervals as classes, has one class.

    The chance that labels in random order are separated so is K! Π n_k! / n! for K classes.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    chance = lgamma(len(classes) + 1) + sum(lgamma(k + 1) for k in sizes) - lgamma(len(labels) + 1)
    if chance > log(1e-4):
        return False
    order = np.argsort(column.values, kind="stable")
    values, ordered = column.values[order], labels[order]
    changes = ordered[1:] != ordered[:-1]
    if (changes & (values[1:] == values[:-1])).any():
        return False
    if column.is_categorical:
        return len(np.unique(values)) <= len(labels) / 4
    return int(changes.sum()) == len(classes) - 1
