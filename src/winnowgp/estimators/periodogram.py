"""The Lomb-Scargle periodogram of unevenly spaced values, and the chance of its largest peak."""

from dataclasses import dataclass
from math import exp, log, pi, sqrt
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import gammaln
from scipy.stats import f as f_distribution
from scipy.stats import norm, rankdata

Values = NDArray[np.float64]

FEWEST = 24
"""Fewest rows whose residuals are tested."""

_MOST_ROWS, _MOST_FREQUENCIES, _OVERSAMPLED = 1000, 20_000, 3
# A peak is the second or third harmonic of a period if the sinusoids of that period explain more,
# with a p-value of at most so much.
_HARMONICS, _BY_CHANCE = (2, 3), 1e-3


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
