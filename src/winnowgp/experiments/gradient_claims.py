"""What appendix B.3 says of gradients, and what we say, judged from rows."""

from collections.abc import Sequence
from statistics import fmean

from winnowgp.experiments.alike import alike
from winnowgp.experiments.experiment import claim
from winnowgp.experiments.level import MARGIN
from winnowgp.experiments.runs import Row

_PATHS = ("score", "relaxed", "natural")
_NOISES = (("score", None), ("flips", None), ("relaxed", 0.1), ("relaxed", 1.0))


def gradient_claims(rows: Sequence[Row]) -> list[str]:
    """A line each, of paths and of variances; none while runs that it rests on are missing."""
    walked = [row for row in rows if row["kind"] == "path"]
    weakest = min((row["alpha"] for row in walked), default=0.0)
    paths = alike([row for row in walked if row["alpha"] == weakest], "gradient")
    noises = [row for row in rows if row["kind"] == "variance"]
    by_name = {mine[0]["gradient"]: mine for mine in paths}
    by_kind = {
        (mine[0]["gradient"], mine[0].get("temperature")): mine
        for mine in alike(noises, "gradient", "temperature")
    }
    return [
        *(_path_claims(by_name) if _level([by_name.get(name, []) for name in _PATHS]) else []),
        *_cost_claims(walked),
        *(_noise_claims(by_kind) if _level([by_kind.get(key, []) for key in _NOISES]) else []),
    ]


def _level(groups: Sequence[Sequence[Row]]) -> bool:
    """Whether all have rows of the same seeds and places."""
    keys = [sorted((row["seed"], row.get("at", "")) for row in rows) for rows in groups]
    return bool(keys[0]) and all(each == keys[0] for each in keys)


def _path_claims(paths: dict[str, list[Row]]) -> list[str]:
    """What the appendix says of the two gradients, then what we say of the third."""
    ends = {name: [row["objective"][-1] for row in mine] for name, mine in paths.items()}
    score, relaxed, natural = (fmean(ends[name]) for name in ("score", "relaxed", "natural"))
    target = {row["seed"]: row for row in paths["score"]}
    sooner = [_sooner(row, target[row["seed"]]) for row in paths["natural"]]
    reached = [ratio for ratio in sooner if ratio is not None]
    rows = paths["score"][0]["N"]
    return [
        claim(
            "score function and relaxed gradient give comparable results",
            agrees=abs(score - relaxed) <= MARGIN * rows,
            found=f"they end at {score:.1f} and {relaxed:.1f} nats; {MARGIN} nats a row apart "
            "would still count as comparable",
        ),
        claim(
            "beyond the paper: natural all-flip updates end no lower than the score function",
            agrees=natural >= score,
            found=f"{natural:.1f} against {score:.1f} nats",
        ),
        claim(
            "beyond the paper: and are there sooner",
            agrees=len(reached) == len(sooner) and min(reached) > 1,
            found=f"where the score function ends after {min(reached):.0f} to {max(reached):.0f} "
            "times less CPU time"
            if reached
            else "they never get there",
        ),
    ]


def _cost_claims(paths: Sequence[Row]) -> list[str]:
    """What a step costs at each α, judged where fewer than half of the candidates are kept."""
    lines = []
    for mine in alike(paths, "alpha"):
        by = {of[0]["gradient"]: of for of in alike(mine, "gradient")}
        score, relaxed = by.get("score", []), by.get("relaxed", [])
        if not _level([score, relaxed]):
            continue
        expected, K = fmean([row["expected"] for row in score]), score[0]["candidates"]
        ms = {name: fmean([_step_ms(row) for row in of]) for name, of in by.items()}
        found = (
            f"α = {mine[0]['alpha']:g}: {ms['score']:.1f} ms with four subsets of {expected:.0f} "
            f"points on average, {ms['relaxed']:.1f} ms with one relaxed draw of all {K}, "
            f"{ms['score'] / ms['relaxed']:.2f} times as much"
        )
        if quick := ms.get("score by statistics"):
            found += f"; {quick:.1f} ms by statistics, {quick / ms['relaxed']:.2f} times"
        if expected < K / 2:
            said = "a step of the score function costs less where the prior is strong"
            lines.append(claim(said, agrees=ms["score"] < ms["relaxed"], found=found))
        else:
            lines.append(f"a step where the prior is weak and most points are kept: {found}")
    return lines


def _noise_claims(by: dict[tuple[str, float | None], list[Row]]) -> list[str]:
    ratios = _ratios(by["score", None], by["flips", None], samples=4)
    cold, hot = (fmean([_relative_bias(r) for r in by["relaxed", t]]) for t in (0.1, 1.0))
    growth = _ratios(by["relaxed", 0.1], by["relaxed", 1.0], samples=4)
    return [
        claim(
            "beyond the paper: all flips vary less than the score function with as many subsets",
            agrees=min(ratios) > 1,
            found=f"{min(ratios):.3g} to {max(ratios):.3g} times less variance with four subsets",
        ),
        claim(
            "a lower temperature lessens the bias of the relaxed gradient and adds variance",
            agrees=cold < hot and min(growth) > 1,
            found=f"mean bias {100 * cold:.0f} % of the gradient at τ = 0.1 and {100 * hot:.0f} % "
            f"at τ = 1; {min(growth):.3g} to {max(growth):.3g} times the variance",
        ),
    ]


def _step_ms(row: Row) -> float:
    """Of a step in the second half of a path, when the size has settled."""
    half = len(row["steps"]) // 2
    steps = row["steps"][-1] - row["steps"][half]
    return 1e3 * (row["cpu"][-1] - row["cpu"][half]) / steps


def _sooner(natural: Row, score: Row) -> float | None:
    """Times less CPU time until the objective that the score function ends with."""
    for seconds, objective in zip(natural["cpu"], natural["objective"], strict=True):
        if objective >= score["objective"][-1]:
            return score["cpu"][-1] / seconds
    return None


def _ratios(first: Sequence[Row], second: Sequence[Row], *, samples: int) -> list[float]:
    """Of variances at the same λ."""
    at = {(row["at"], row["seed"]): row for row in second}
    index = [row["samples"].index(samples) for row in (first[0], second[0])]
    return [
        row["variance"][index[0]] / at[row["at"], row["seed"]]["variance"][index[1]]
        for row in first
    ]


def _relative_bias(row: Row) -> float:
    """Length of the bias in lengths of the gradient, from the estimates with the most draws."""
    return (max(row["bias"][-1], 0.0) / row["norm"]) ** 0.5
