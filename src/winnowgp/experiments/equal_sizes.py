"""Chosen points against as many that nobody chose, after as many updates."""

from collections.abc import Mapping
from statistics import fmean

from winnowgp.experiments.experiment import claim

STARTS_SAID = {"random": "random rows", "kmeans": "k-means centres"}


def equal_size_claims(
    chosen: Mapping[int, float], others: Mapping[str, Mapping[int, float]], *, each: str
) -> list[str]:
    """A line for every way to place points that has a run where the choice has one.

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
        better = sum(chosen[key] > found[key] for key in both)
        lines.append(
            claim(
                f"beyond the paper: chosen points beat as many {STARTS_SAID[start]} in every layer",
                agrees=mine > theirs,
                found=f"test log density {mine:.3f} against {theirs:.3f} nats a row after as many "
                f"updates, higher on {better} of {len(both)} {each}{'s' * (len(both) > 1)}",
            )
        )
    return lines
