"""What a quick look leaves out, read off the settings themselves."""

from winnowgp.experiments.experiment import Experiment, Scope, counted
from winnowgp.experiments.runs import Row

_MOST = 4


def quick_cuts(experiment: Experiment, scope: Scope) -> str:
    """How the settings of a quick scope differ from those of a full one, in one line."""
    quick, full = experiment.settings(scope, []), experiment.settings(Scope(), [])
    parts = [f"{counted(len(quick), 'run')} instead of {len(full)}"]
    less, more = _values(quick), _values(full)
    for name, values in less.items():
        if name in more and set(values) != set(more[name]):
            parts.append(f"{name} {_said(values)} instead of {_said(more[name])}")
    return "; ".join(parts)


def _values(settings: list[Row]) -> dict[str, list[str]]:
    """The different values of each setting; those inside another by both names."""
    found: dict[str, dict[str, None]] = {}
    for row in settings:
        for name, value in row.items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            for part, inner in parts:
                found.setdefault(f"{name} {part}".strip(), {})[_word(inner)] = None
    return {name: list(values) for name, values in found.items()}


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _said(values: list[str]) -> str:
    shown = values if len(values) <= _MOST else [*values[:2], "...", values[-1]]
    return ", ".join(shown)
