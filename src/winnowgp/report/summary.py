"""The summary of a fitted table model that the report shows."""

from typing import TypedDict


class ColumnSummary(TypedDict):
    """One column of the table."""

    name: str
    kind: str
    """"number", "date" or "words"."""
    missing: int
    spread: list[float]
    """Least, lower quartile, median, upper quartile, greatest; empty for words."""
    words: list[tuple[str, int]]
    """The most frequent words and how often they occur; empty for numbers."""
    different: int
    """Number of different values."""
    relevance: float | None
    """1 / lengthscale in standard units, the largest of its features; None if unknown."""


class Choice(TypedDict):
    """Which points were kept, and what that cost."""

    points: int
    candidates: int
    asked: str
    """What the user said about the number of points."""
    alpha: float | None
    bound: float
    """In nats, of standardised targets."""
    evidence_gap: float | None
    given_up: float
    """Nats per observation."""
    rows: int
    inclusion: list[float]
    """Of each candidate of the last choice; the kept ones come first."""
    frontier: list[float] | None
    """Best bound for 0, 1, 2, ... points among those candidates."""


class Metric(TypedDict):
    """A number that says how good predictions are, beside that of a constant prediction."""

    name: str
    value: float
    baseline: float
    better: str
    """"higher" or "lower"."""


class Residuals(TypedDict):
    """Some held-out rows."""

    actual: list[float]
    predicted: list[float]
    sd: list[float]


class Reliability(TypedDict):
    """Rows in one bin of predicted probability."""

    probability: float
    frequency: float
    rows: int


class Confusion(TypedDict):
    """How often each class (a row) was taken for each class (a column)."""

    labels: list[str]
    counts: list[list[int]]


class Quality(TypedDict):
    """Measured on rows that the fit never saw."""

    rows: int
    metrics: list[Metric]
    coverage: list[tuple[float, float]]
    """Nominal level of an interval, and the share of rows within it; empty for classes."""
    pit: list[int]
    """Rows in ten equal bins of the predictive distribution function; empty for classes."""
    residuals: Residuals | None
    reliability: list[Reliability]
    confusion: Confusion | None


class Curve(TypedDict):
    """A prediction along one input."""

    label: str
    mean: list[float]
    lower: list[float]
    upper: list[float]


class Effect(TypedDict):
    """What changing one column does at an otherwise typical row."""

    column: str
    kind: str
    at: list[float] | list[str]
    curves: list[Curve]


class Moment(TypedDict):
    """The fit at one step."""

    phase: str
    step: int
    objective: float | None
    """Nats; phases have objectives of their own, and the first step may have none yet."""
    x: list[float]
    y: list[float]
    """Where the points stand along the two inputs of `Training`."""


class Training(TypedDict):
    """The fit as a film."""

    inputs: list[str]
    """One or two."""
    moments: list[Moment]


class Summary(TypedDict):
    """Everything."""

    target: str
    task: str
    why_task: str
    classes: list[str]
    rows: int
    train_rows: int
    columns: list[ColumnSummary]
    target_summary: ColumnSummary
    kernel: str
    noise_sd: float | None
    choice: Choice
    quality: Quality | None
    effects: list[Effect]
    training: Training
    timings: dict[str, float]
    settings: dict[str, str]
    """Versions, the digest of the data, and the command that does all this again."""
