"""The summary of a fitted table model in plain JSON.

Model files contain summaries; the names of their fields are part of the file format.
"""

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
    """Comparison of a deep GP with a shallow one, if the fit compared them."""


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
    """A deep GP beside a shallow GP of the same rows; gains are those of the deep one."""

    selected: str
    """"deep" or "shallow"."""
    elbo_gain: float
    """Difference of the ELBOs, in nats per observation."""
    density_gain: float | None
    """Difference of the mean log densities of held-out rows; None if it was not computed."""
    density_gain_error: float | None
    """Standard error of this difference."""


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
