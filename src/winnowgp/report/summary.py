"""The summary of a fitted table model that the report shows."""

from math import isfinite
from types import NoneType, UnionType
from typing import Any, TypedDict, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from winnowgp.errors import ModelFileError

# What is known of a fitted model, in plain JSON: all that a report, a table or a picture needs.


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


# Whether JSON from a file has the shape of `Summary`.


def validated_summary(value: Any) -> Summary:
    """The value itself, if every field is there and of its type; an error that names it if not."""
    _check(value, Summary, "findings")
    return cast(Summary, value)


def _check(value: Any, kind: Any, where: str) -> None:
    if not _fits(value, kind, where):
        raise ModelFileError(f"{where} is not what winnowgp writes there")


def _fits(value: Any, kind: Any, where: str) -> bool:
    """Whether a value is of a type; parts of it that are not raise an error of their own."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None:
            return NoneType in inner
        others = [k for k in inner if k is not NoneType]
        return any(_quietly(value, k, where) for k in others[1:]) or _fits(value, others[0], where)
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            return False
        for name, hint in hints.items():
            _check(value[name], hint, f"{where}.{name}")
        return True
    if origin is list:
        return isinstance(value, list) and all(_fits(v, inner[0], where) for v in value)
    if origin is tuple:
        # JSON has no tuples.
        return (
            isinstance(value, list | tuple)
            and len(value) == len(inner)
            and all(_fits(v, k, where) for v, k in zip(value, inner, strict=True))
        )
    if origin is dict:
        return isinstance(value, dict) and all(
            isinstance(k, str) and _fits(v, inner[1], where) for k, v in value.items()
        )
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return type(value) is kind


def _quietly(value: Any, kind: Any, where: str) -> bool:
    try:
        return _fits(value, kind, where)
    except ModelFileError:
        return False
