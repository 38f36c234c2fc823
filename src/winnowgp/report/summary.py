"""The summary of a fitted table model in plain JSON, and sentences about it.

Model files contain summaries; the names of their fields are part of the file format. Commands,
reports and warnings show the sentences.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import NotRequired, TypedDict


class ColumnSummary(TypedDict):
    """The contents of a column of the table, and its relevance to the predictions."""

    name: str
    kind: str
    """"number", "date" or "category"."""
    missing: int
    spread: list[float]
    """Minimum, lower quartile, median, upper quartile, maximum; empty for categories."""
    categories: list[tuple[str, int]]
    """The most frequent categories with their numbers of rows; empty for numbers."""
    different: int
    """Number of different values."""
    relevance: float | None
    """1 / lengthscale of standardised inputs, the maximum over the column's features, or None."""
    note: NotRequired[str]
    """What the owner of the table should know about the reading of the column."""


class IgnoredColumn(TypedDict):
    """A column of the table that is neither an input nor the target."""

    name: str
    kind: str
    """"identifier" or "dropped"."""
    missing: int


class Choice(TypedDict):
    """The result of the selection of inducing points."""

    points: int
    """Number of inducing points."""
    candidates: int
    asked: str
    """The requested number of inducing points or tolerance, as text."""
    alpha: float | None
    bound: float
    """ELBO in nats, of standardised targets."""
    elbo_gap: float
    """ELBO gap in nats per observation."""
    rows: int
    inclusion: list[float]
    """Inclusion probability of each final candidate; the selected ones come first."""
    frontier: list[float | None] | None
    """Best ELBO known with at most 0, 1, 2, … inducing points; None where there is none."""
    # Files of earlier versions do not have what follows; it is None or empty there.
    log_densities: list[float | None] | None
    """Held-out log density of each model of the frontier, in nats per observation."""
    exact_evidence: float | None
    """Highest log evidence of the exact GP in nats, the last point of the frontier."""
    exact_log_density: float | None
    """Held-out log density of that exact GP, in nats per observation."""
    sizes: list[int]
    """Numbers of inducing points of the models in the file, in ascending order."""
    resized_from: int | None
    """Number of inducing points of the model that this one was resized from, if it was."""
    kernel: str | None
    """Name of the fitted kernel."""
    kernel_evidence: dict[str, float | None]
    """Nats per observation of each kernel that was compared, relative to the best."""
    evidence: tuple[float, float] | None
    """Lower and upper bound on the log evidence at the fitted hyper-parameters, in nats."""
    evidence_method: str | None
    """How these were computed; "exact" if they are equal."""
    kl: tuple[float, float] | None
    """Lower and upper bound on KL[q ‖ exact posterior], in nats."""
    growth_limit: str | None
    """The limit that ended the growth of the candidates, if one did."""
    last_gain: float | None
    """Nats per observation that the last doubling of the candidates gained."""
    predictive_gap: float | None
    """Held-out log density below that of the largest model, in nats per observation."""
    predictive_gap_se: float | None
    """Standard error of the predictive gap."""
    noise_points: NotRequired[int]
    """Number of inducing points of the log noise, if noise may depend on the inputs."""
    subset_posterior: NotRequired["SubsetChoice"]
    """The posterior over subsets, if inclusion is not independent."""
    hyper_posteriors: NotRequired[int]
    """Number of posteriors that predictions average over, if hyper-parameters are uncertain."""
    earlier_gap: NotRequired[float]
    """ELBO gap of the earlier batches of a stream, in nats, part of the gap of every size."""
    observations: NotRequired[float]
    """Number of observations that gaps are divided by, if it is not that of the rows."""
    constant_weight: NotRequired[float]
    """Weight of a constant in this average, if it is a member."""
    layers: NotRequired[list[int]]
    """Number of inducing points of each layer of a deep GP; `points` is their sum."""
    allocations: NotRequired[list["AllocationSummary"]]
    """Models of a deep GP that the fit has trained, those with the quickest predictions first."""
    shallow: NotRequired["ShallowChoice"]


def bare_choice(
    points: int, candidates: int, *, asked: str, bound: float, elbo_gap: float, rows: int
) -> Choice:
    """Return a choice of which only this is known: all else is None or empty."""
    return {
        "points": points,
        "candidates": candidates,
        "asked": asked,
        "alpha": None,
        "bound": bound,
        "elbo_gap": elbo_gap,
        "rows": rows,
        "inclusion": [],
        "frontier": None,
        "log_densities": None,
        "exact_evidence": None,
        "exact_log_density": None,
        "sizes": [],
        "resized_from": None,
        "kernel": None,
        "kernel_evidence": {},
        "evidence": None,
        "evidence_method": None,
        "kl": None,
        "growth_limit": None,
        "last_gain": None,
        "predictive_gap": None,
        "predictive_gap_se": None,
    }


class AllocationSummary(TypedDict):
    """A deep GP with some number of inducing points in each layer."""

    points: list[int]
    predict_us: float
    """Microseconds per row of a prediction."""
    bound: float
    """ELBO in nats, of standardised targets."""
    elbo_gap: float
    """ELBO gap in nats per observation."""
    log_density: float | None
    """Mean log density of held-out rows, in the units of the target; None if not computed."""


class ShallowChoice(TypedDict):
    """Which of a deep and a shallow GP was selected; gains of the deep one, with standard error."""

    selected: str
    elbo_gain: float
    density_gain: tuple[float, float] | None


class SubsetChoice(TypedDict):
    """The posterior over subsets of the candidates, if inclusion is not independent."""

    kind: str
    """"determinantal" or "gibbs"."""
    credible_size: tuple[int, int]
    """Numbers of inducing points between which 90 % of the posterior lie."""
    r_hat: float | None
    """Largest R-hat of the chains; None if there are none, or if it is infinite."""
    effective_samples: float | None
    """Smallest effective number of samples; None if there are none."""
    averaged: int | None
    """Number of subsets that predictions average over, if they do."""


class Metric(TypedDict):
    """A measure of predictive quality, of the model and of the best constant prediction."""

    name: str
    value: float
    baseline: float
    better: str
    """"higher" or "lower"."""


class Residuals(TypedDict):
    """Observations and predictions of some held-out rows."""

    actual: list[float]
    predicted: list[float]
    sd: list[float]


class Reliability(TypedDict):
    """A bin of predicted probabilities, with the observed frequency."""

    probability: float
    frequency: float
    rows: int


class Confusion(TypedDict):
    """Confusion matrix: rows are true classes, columns the most probable ones."""

    labels: list[str]
    counts: list[list[int]]


class Quality(TypedDict):
    """Predictive quality on held-out rows."""

    rows: int
    metrics: list[Metric]
    coverage: list[tuple[float, float]]
    """Nominal level of an interval and the share of rows within it; empty for classes."""
    pit: list[int]
    """Number of rows in ten bins of the probability integral transform; empty for classes."""
    residuals: Residuals | None
    reliability: list[Reliability]
    confusion: Confusion | None


class Alarm(TypedDict):
    """A warning about the result of the fit."""

    warning: str
    """Name of the class of the warning, one of those in `winnowgp.errors`."""
    message: str


class ColumnImportance(TypedDict):
    """How much worse predictions of held-out rows become if a column is permuted."""

    column: str
    loss: float
    standard_error: float


class Importance(TypedDict):
    """The importance of each column by permutation, the largest first."""

    measure: str
    """What is lost: R², or log probability in nats per observation."""
    rows: int
    columns: list[ColumnImportance]


class Curve(TypedDict):
    """Predictions along one input."""

    label: str
    mean: list[float]
    lower: list[float]
    upper: list[float]
    observed: NotRequired[tuple[list[float], list[float]]]
    """Lower and upper ends of 95 % intervals of an observation, if noise depends on the inputs."""


class Effect(TypedDict):
    """Predictions as one column varies and the others have typical values."""

    column: str
    kind: str
    at: list[float] | list[str]
    curves: list[Curve]
    # Files of earlier versions do not have what follows; it is empty there.
    counts: list[int]
    """Rows of the table in intervals of equal width between the ends, or with each category."""
    term: str
    """The term of a sum kernel that the curves show; empty if they show predictions."""
    note: str
    """What to know about the range that is shown, if anything."""


class Moment(TypedDict):
    """A step of the training history."""

    phase: str
    step: int
    objective: float | None
    """Objective in nats, comparable within a phase only; None if not evaluated at this step."""
    x: list[float]
    y: list[float]
    """Coordinates of the inducing points along the inputs of `Training`."""


class Training(TypedDict):
    """The recorded steps of the training history."""

    inputs: list[str]
    """Names of the one or two inputs that are shown."""
    moments: list[Moment]


class Summary(TypedDict):
    """The summary of a fitted table model, which reports and commands display."""

    target: str
    task: str
    why_task: str
    classes: list[str]
    rows: int
    train_rows: int
    columns: list[ColumnSummary]
    target_summary: ColumnSummary
    ignored: NotRequired[list[IgnoredColumn]]
    kernel: str
    noise_sd: float | None
    choice: Choice
    alarms: list[Alarm]
    quality: Quality | None
    importance: Importance | None
    effects: list[Effect]
    terms: list[Effect]
    """Contributions of the terms of a sum kernel along the columns that they depend on."""
    training: Training
    timings: dict[str, float]
    settings: dict[str, str]
    """Versions, the digest of the data, and the command that reproduces the fit."""


def is_consistent(summary: Summary) -> bool:
    """Return whether the parts of a summary agree, as far as commands and reports rely on it."""
    choice, frontier = summary["choice"], summary["choice"]["frontier"]
    densities, quality = choice["log_densities"], summary["quality"]
    return (
        len(summary["columns"]) > 0
        and 0 < summary["train_rows"] <= summary["rows"]
        and choice["rows"] > 0
        and (quality is None or quality["rows"] > 0)
        and choice["points"] >= 0
        and (frontier is None or len(frontier) > choice["points"])
        and (densities is None or len(densities) == len(frontier or []))
    )


# Nats per observation from which a gain counts as one.
_NOTICEABLE = 5e-4

# Why a model without inducing points was selected although its ELBO is lower than the tolerance
# asks.
_CONSTANT = {
    "chance": "models with them gain no more than they would by chance",
    "held_out": "models with them predict held-out rows no better than a constant",
}


def selection_lines(choice: Choice) -> list[tuple[str, str]]:
    """Return what is known about the selection, as pairs of a label and a sentence.

    Fields that are None, as in files of earlier versions, have no line.
    """
    points = counted(choice["points"])
    if "layers" in choice:
        points += f" in {counted(len(choice['layers']), 'layer')}: {listed(choice['layers'])}"
    lines = [("selected", f"{points}; goal: {choice['asked']}")]
    if "shallow" in choice:
        lines.append(("depth", shallow_sentence(choice["shallow"])))
    if "noise_points" in choice:
        text = "does not vary: its dependence on the inputs gains no more than chance"
        if noise_points := choice["noise_points"]:
            text = f"depends on the inputs; its logarithm has {counted(noise_points)}"
        lines.append(("noise", text))
    if choice["kernel"] is not None:
        lines.append(("kernel", kernel_sentence(choice["kernel"], choice["kernel_evidence"])))
    if "hyper_posteriors" in choice:
        S, constant = choice["hyper_posteriors"], ""
        if "constant_weight" in choice:
            constant = f" and a constant (weight {choice['constant_weight']:.2g})"
        if S == 1 and constant:
            lines.append(("outliers", f"predictions average over the model{constant}"))
        else:
            members = counted(S, "posterior") + constant
            lines.append(("hyper-parameters", f"uncertain: predictions average over {members}"))
    if "subset_posterior" in choice:
        lines.append(("subsets", subset_sentence(choice["subset_posterior"])))
    lines.append(("ELBO gap", f"{choice['elbo_gap']:.4f} nats per observation"))
    if choice["kl"] is not None and choice["evidence"] is not None:
        lines.append(("log evidence", evidence_sentence(choice)))
    if choice["predictive_gap"] is not None:
        gap, error = choice["predictive_gap"], choice["predictive_gap_se"]
        spread = "" if error is None else f" ± {error:.4f}"
        text = f"{gap:.4f}{spread} nats per observation, by held-out log density"
        lines.append(("predictive gap", text))
    if choice["last_gain"] is not None and choice["resized_from"] is None:
        lines.append(("growth", growth_sentence(choice["growth_limit"], choice["last_gain"])))
    if len(choice["sizes"]) > 1:
        sizes = ", ".join(map(str, choice["sizes"]))
        lines.append(("sizes", f"{sizes} inducing points are available (`winnow resize`)"))
    if choice["resized_from"] is not None:
        lines.append(("resized", f"from {counted(choice['resized_from'])}"))
    return lines


def counted(number: int, noun: str = "inducing point") -> str:
    """Return a number and its noun, in the plural unless the number is one.

    >>> counted(1), counted(12)
    ('1 inducing point', '12 inducing points')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(layers: Sequence[int]) -> str:
    """Return the numbers of inducing points of all layers.

    >>> listed([40, 23])
    '40 + 23'
    """
    return " + ".join(map(str, layers))


def rounded(value: float, digits: int = 4) -> str:
    """Return a number with so many significant digits, without an exponent below ten million.

    >>> rounded(0.84991), rounded(396412.0), rounded(-4451.0, 3), rounded(1.25e9)
    ('0.8499', '396400', '-4450', '1.25e+09')
    """
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e+" in text and abs(value) < 1e7 else text


def shallow_sentence(compared: ShallowChoice) -> str:
    """Return which of a deep and a shallow GP was selected, and what the deep one gains."""
    gains, density = f"ELBO {compared['elbo_gain']:+.3f}", compared["density_gain"]
    gains += "" if density is None else ", held-out density {:+.3f} ± {:.3f}".format(*density)
    return f"{compared['selected']}; gains of the deep GP per observation: {gains}"


def subset_sentence(subsets: SubsetChoice) -> str:
    """Return what the posterior over subsets says, and whether its samples can be relied on."""
    low, high = subsets["credible_size"]
    size = f"between {low} and {high}" if low < high else f"{low}"
    text = f"{subsets['kind']} posterior: {size} inducing points with a probability of 90 %"
    if subsets["averaged"] is not None:
        text += f"; predictions average over {subsets['averaged']} subsets"
    if subsets["effective_samples"] is not None:
        r_hat = "∞" if subsets["r_hat"] is None else f"{subsets['r_hat']:.2f}"
        text += f" (R-hat {r_hat}, {subsets['effective_samples']:.0f} independent samples)"
    return text


def kernel_sentence(name: str, evidence: Mapping[str, float | None]) -> str:
    """Return the name of the kernel, and how far other kernels were behind.

    Args:
        evidence: nats per observation of each kernel relative to the best; None for a kernel whose
            evidence could not be computed.

    >>> kernel_sentence("matern32", {"matern52": -0.0124, "rbf": -0.2, "matern32": 0.0})
    'matern32; evidence per observation relative to the best: matern32 0, matern52 -0.012, rbf -0.2'
    """
    known = {kernel: nats for kernel, nats in evidence.items() if nats is not None}
    if len(known) < 2:
        return name
    ranked = sorted(known.items(), key=lambda item: -item[1])
    others = ", ".join(f"{kernel} {nats:.2g}" for kernel, nats in ranked)
    return f"{name}; evidence per observation relative to the best: {others}"


def evidence_sentence(choice: Choice) -> str:
    """Return where the log evidence is relative to the ELBO: exactly, or between two bounds."""
    assert choice["kl"] is not None
    (lower, upper), rows = choice["kl"], choice["rows"]
    if choice["evidence_method"] == "exact":
        return (
            f"exact, ELBO is {upper / rows:.4f} nats per observation below "
            f"(KL[q ‖ posterior] = {upper:.3g} nats)"
        )
    return (
        f"between {lower / rows:.4f} and {upper / rows:.4f} nats per observation above the ELBO "
        f"(KL[q ‖ posterior] between {lower:.3g} and {upper:.3g} nats)"
    )


def growth_sentence(limit: str | None, gain: float) -> str:
    """Return a sentence that says whether more inducing points would pay.

    Args:
        limit: the limit that ended the growth of the candidates, if one did.
        gain: nats per observation that the last doubling gained.

    >>> growth_sentence("work", 0.21)
    'more inducing points still pay: the last doubling gained 0.21 nats per observation \
(limit: work)'
    """
    if limit is None:
        return "ended because more candidates gain less than the tolerance"
    nats = f"{gain:.2g} nats per observation" if isfinite(gain) else "an unknown number of nats"
    if limit in _CONSTANT:
        return f"no inducing points, because {_CONSTANT[limit]} (limit: {limit})"
    if limit == "precision":
        return "ended because rounding errors exceed what more candidates add (limit: precision)"
    if limit == "max_points":
        return f"twice as many inducing points would gain at least {nats} (limit: max_points)"
    verb = "still pay" if gain >= _NOTICEABLE else "may still pay"
    return f"more inducing points {verb}: the last doubling gained {nats} (limit: {limit})"
