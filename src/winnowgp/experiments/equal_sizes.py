"""Chosen points against as many that nobody chose, after as many updates."""

from collections.abc import Mapping
from math import inf
from statistics import fmean, stdev

from winnowgp.experiments.experiment import claim, counted

STARTS_SAID = {"random": "random rows", "kmeans": "k-means centres"}
CLEAR = 2.0
"""Standard errors that a mean gain must exceed; less can be the luck of folds or seeds."""


def equal_size_claims(
    chosen: Mapping[int, float], others: Mapping[str, Mapping[int, float]], *, each: str
) -> list[str]:
    """A line for every way to place points that has a run where the choice has one.

    The choice beats them if its gain, fold by fold or seed by seed, is clear of chance; one fold
    alone cannot show that.

    Args:
        chosen: test log density in nats a row, by fold or seed.
        others: the same for each way to place points without a choice.
        each: what the numbers are of, a fold or a seed.
    """
    lines = []
    for start, found in others.items():
        both = sorted(chosen.keys() & found.keys())
        if not both:
            continue
        mine, theirs = (fmean([side[key] for key in both]) for side in (chosen, found))
        gains = [chosen[key] - found[key] for key in both]
        error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else inf
        lines.append(
            claim(
                f"beyond the paper: chosen points beat as many {STARTS_SAID[start]} in every layer",
                agrees=fmean(gains) > CLEAR * error,
                found=f"test log density {mine:.3f} against {theirs:.3f} nats a row after as many "
                f"updates, higher on {sum(gain > 0 for gain in gains)} of "
                f"{counted(len(both), each)}; gain {fmean(gains):+.4f} with a standard error of "
                f"{error:.4f}, {CLEAR:g} of which would be clear of chance",
            )
        )
    return lines
