"""Tests of the residuals of held-out rows, and of predicted probabilities along columns.

Periodic residuals are found by the Lomb-Scargle periodogram of unevenly spaced values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite, log, pi, sqrt
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import gammaln
from scipy.stats import chi2, kruskal, kurtosistest, norm, rankdata, spearmanr
from scipy.stats import f as f_distribution

from winnowgp.errors import (
    DependentResidualsWarning,
    FitWarning,
    HeavyTailsWarning,
    PeriodicResidualsWarning,
)
from winnowgp.estimators.kernels import column_text
from winnowgp.report.summary import rounded

Values = NDArray[np.float64]

SIGNIFICANT = 0.002
"""Largest p-value of an alarm, after the correction for the number of columns."""

NOTICEABLE = 0.03
"""Least share of the residuals' variance that a pattern must explain."""

FEWEST = 24
"""Fewest rows whose residuals are tested."""

_BINS = 5

_MOST_ROWS, _MOST_FREQUENCIES, _OVERSAMPLED = 1000, 20_000, 3
# A peak is the second or third harmonic of a period if the sinusoids of that period explain more,
# with a p-value of at most so much.
_HARMONICS, _BY_CHANCE = (2, 3), 1e-3


@final
@dataclass(frozen=True, slots=True)
class Column:
    """A column that residuals may depend on: an input, the prediction, or the order of rows."""

    name: str
    kind: str
    """"number", "date", "category", "order" or "prediction"."""
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
        return self.kind == "category"


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
    strongest: tuple[float, str] | None = None
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
            if strongest is None or value < strongest[0]:
                strongest = (
                    value,
                    f"probabilities are wrong along {column.text}: class {labels[c]!r} is "
                    f"predicted with {100 * p[worst].mean():.0f} % and observed in "
                    f"{100 * truth[worst, c].mean():.0f} % of the held-out rows "
                    f"{_where(column, worst)}",
                )
    if strongest is None or strongest[0] >= SIGNIFICANT:
        return None
    return DependentResidualsWarning(
        f"{strongest[1]}. Add columns that explain it, or name another kernel with `kernel` "
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
    period = f"{peak.period:.4g}"
    unit = {"date": "day", "order": "row"}.get(column.kind, "unit") + "s" * (period != "1")
    seen = f"residuals of held-out rows repeat every {period} {unit}"
    share = f"which explains {100 * peak.share:.0f} % of their variance"
    if column.kind == "order":
        return PeriodicResidualsWarning(
            f"{seen}, {share}. Add the time of each row as a column, and a term of that period: "
            f"`kernel='rbf + periodic[time](period={period})'` (`--kernel`) if times count rows."
        )
    term = f"periodic[{column_text(column.name)}](period={period})"
    return PeriodicResidualsWarning(
        f"{seen} of column {column.name!r}, {share}. Add a periodic term: "
        f'`kernel="rbf + {term}"` (`--kernel`).'
    )


def _mean_alarm(z: Values, columns: Sequence[Column]) -> FitWarning | None:
    """Return an alarm if the level of the residuals depends on a column."""
    dependence = _dependence(z, columns)
    if dependence is None:
        return None
    column, rows, _ = dependence
    side = "above" if z[rows].mean() > z.mean() else "below"
    advice = (
        "If the rows are in the order of time, add the time as a column."
        if column.kind == "order"
        else "Name a kernel in which this column has a term of its own, such as "
        f'`kernel="rbf + matern32[{column_text(column.name)}]"` (`--kernel`), or allow more '
        "inducing points."
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
    dependence = _dependence(size, [Column("", "prediction", predicted)]) or _dependence(
        size, columns
    )
    if dependence is None:
        return None
    column, rows, p = dependence
    ratio = size[rows].mean() / max(size.mean(), 1e-12)
    there, elsewhere = ("narrow", "wide") if ratio > 1 else ("wide", "narrow")
    varying = "noise that depends on the inputs (`--likelihood heteroscedastic`)"
    if column.kind == "prediction" and positive:
        advice = "Fit the logarithm of the target (`--log-target`), whose noise is then the same "
        advice += f"everywhere, or {varying}." if likelihood == "gaussian" else "everywhere."
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


@final
@dataclass(frozen=True, slots=True)
class Peak:
    """The largest peak of a periodogram."""

    period: float
    share: float
    """Share of the variance that it explains: one sinusoid, or harmonics up to the peak."""
    probability: float
    """Bound on the probability of such a peak without a period (Baluev 2008)."""


def largest_peak(t: Values, z: Values) -> Peak | None:
    """Return the largest peak of the Lomb-Scargle periodogram, or None if there are too few rows.

    Each frequency f has P(f), the share of the variance of z that a constant and a sinusoid of that
    frequency explain. Frequencies are those with three cycles or more within the rows, up to one
    cycle in two of the small gaps between rows. For n rows, W = f_max √(4π var t) and
    ψ(P) = (1 − P)^((n − 3)/2),

        P(max P > p) ≲ ψ(p) + γ W (1 − p)^((n − 4)/2) √((n − 1) p / 2),
        γ = √(2/(n − 1)) Γ((n − 1)/2) / Γ((n − 2)/2).

    z is replaced by normal scores, so that a few large residuals are not a peak, without their
    linear trend, which would shift the peaks of few cycles. The period is where the share has its
    maximum near the peak; or twice or three times as long, if the peak is a harmonic of it.
    """
    n = len(t)
    gaps = np.diff(np.unique(t))
    if n < FEWEST or len(gaps) < FEWEST // 2:
        return None
    span, highest = np.ptp(t), 0.5 / np.quantile(gaps, 0.1)
    lowest = 3 / span
    if highest <= lowest:
        return None
    if n > _MOST_ROWS:
        used = np.sort(np.random.default_rng(0).choice(n, _MOST_ROWS, replace=False))
        t, z, n = t[used], z[used], _MOST_ROWS
    z = norm.ppf((rankdata(z) - 0.5) / n)
    z = z - np.polyval(np.polyfit(t - t.mean(), z, 1), t - t.mean())
    highest = min(highest, lowest + _MOST_FREQUENCIES / (_OVERSAMPLED * span))
    frequencies = np.arange(lowest, highest, 1 / (_OVERSAMPLED * span))
    shares = explained_shares(t, z, frequencies)
    width = 1 / (_OVERSAMPLED * span)
    frequency, share = _maximum(t, z, float(frequencies[shares.argmax()]), width)
    bandwidth = highest * sqrt(4 * pi * t.var())
    scale = sqrt(2 / (n - 1)) * exp(gammaln((n - 1) / 2) - gammaln((n - 2) / 2))
    rest = log(max(1 - share, 1e-300))
    one = exp(0.5 * (n - 3) * rest)
    many = scale * bandwidth * exp(0.5 * (n - 4) * rest) * sqrt(0.5 * (n - 1) * share)
    probability = min(one + many, 1.0)
    for harmonic in _HARMONICS:
        if frequency / harmonic < lowest:
            break
        fundamental, more = _maximum(t, z, frequency / harmonic, width / harmonic, harmonic)
        added, left = 2 * (harmonic - 1), n - 1 - 2 * harmonic
        ratio = (more - share) / added / (max(1 - more, 1e-12) / left)
        if f_distribution.sf(ratio, added, left) < _BY_CHANCE:
            return Peak(1 / fundamental, more, probability)
    return Peak(1 / frequency, share, probability)


def _maximum(
    t: Values, z: Values, frequency: float, width: float, harmonics: int = 1
) -> tuple[float, float]:
    """Return the frequency near a given one whose harmonics explain most, and the share.

    Args:
        width: largest distance from the given frequency.
        harmonics: number of sinusoids, of the frequency and its multiples.
    """

    def rest(frequency: float) -> float:
        angles = 2 * pi * frequency * (t - t.mean())[:, None] * np.arange(1, harmonics + 1)
        A = np.hstack([np.ones((len(t), 1)), np.cos(angles), np.sin(angles)])
        residual = z - A @ np.linalg.lstsq(A, z, rcond=None)[0]
        return float(residual @ residual / ((z - z.mean()) ** 2).sum())

    grid = frequency + width * np.linspace(-1, 1, 9)
    best = grid[np.argmin([rest(each) for each in grid])]
    step = width / 4
    minimum: Any = minimize_scalar(rest, bounds=(best - step, best + step), method="bounded")
    return float(minimum.x), 1 - float(minimum.fun)


def explained_shares(t: Values, z: Values, frequencies: Values) -> Values:
    """Return the share of the variance of z that a sinusoid of each frequency explains.

    Constant, sine and cosine are fitted by least squares.
    """
    centred, total = z - z.mean(), float(((z - z.mean()) ** 2).sum())
    shares = []
    for part in np.array_split(frequencies, max(1, len(frequencies) * len(t) // 500_000)):
        angles = 2 * pi * part[:, None] * (t - t.mean())
        c, s = np.cos(angles), np.sin(angles)
        c -= c.mean(1, keepdims=True)
        s -= s.mean(1, keepdims=True)
        cc, ss, cs = (c * c).sum(1), (s * s).sum(1), (c * s).sum(1)
        zc, zs = c @ centred, s @ centred
        # A sine that vanishes at all rows has no share of its own.
        determinant = np.maximum(cc * ss - cs**2, 1e-9 * len(t) ** 2)
        shares.append((zc**2 * ss - 2 * zc * zs * cs + zs**2 * cc) / (determinant * total))
    return np.clip(np.concatenate(shares), 0, 1)
