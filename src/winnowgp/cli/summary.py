"""Summaries printed after a fit."""

import json
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table

from winnowgp.data import DataTable
from winnowgp.estimators import TabularModel
from winnowgp.report import Summary

# What a person should know about a new table, found while it goes by.


# Unseen words are kept to this number a column, however large the table is.
_MOST = 1000


class TableNotes:
    """Words that a model has never seen, and whether rows have names."""

    def __init__(self, model: TabularModel) -> None:
        self._model = model
        self._words: dict[str, set[str]] = {}
        self._unnamed = False

    def watched(self, blocks: Iterable[DataTable]) -> Iterator[DataTable]:
        """The same blocks."""
        id_column = self._model.id_column
        for block in blocks:
            self._model.encoder.require_columns(block)
            self._unnamed = id_column is not None and id_column not in block.values
            for name, words in self._model.encoder.unseen(block).items():
                kept = self._words.setdefault(name, set())
                kept.update(sorted(set(words) - kept)[: _MOST - len(kept)])
            yield block

    def lines(self) -> list[str]:
        """One for each thing to know."""
        found = []
        if self._unnamed:
            found.append(
                f"there is no column {self._model.id_column!r} to name rows by; predictions are in "
                "the order of the rows."
            )
        for name, words in self._words.items():
            shown = ", ".join(repr(word[:30]) for word in sorted(words)[:5])
            count = f"{len(words)} words" if len(words) < _MOST else f"{_MOST} words or more"
            found.append(
                f"{count} of column {name!r} were not in the training rows ({shown}); they count "
                "as no category."
            )
        return found


# A model in a few lines, for people and for machines.


def as_json(summary: Summary, *, file: str) -> str:
    """What `info` knows, in one JSON object."""
    choice = summary["choice"]
    quality = summary["quality"]
    return json.dumps(
        {
            "file": file,
            "target": summary["target"],
            "task": summary["task"],
            "classes": summary["classes"],
            "rows": summary["rows"],
            "train_rows": summary["train_rows"],
            "inputs": [
                {"name": c["name"], "kind": c["kind"], "relevance": c["relevance"]}
                for c in summary["columns"]
            ],
            "points": choice["points"],
            "asked": choice["asked"],
            "alpha": choice["alpha"],
            "bound_nats": choice["bound"],
            "evidence_gap_nats": choice["evidence_gap"],
            "given_up_nats_per_row": choice["given_up"],
            "held_out": None
            if quality is None
            else {
                "rows": quality["rows"],
                **{m["name"]: m["value"] for m in quality["metrics"]},
                "coverage": quality["coverage"],
            },
            "timings": summary["timings"],
            "settings": summary["settings"],
        },
        ensure_ascii=False,
    )


def print_summary(summary: Summary) -> None:
    """Target, inputs, points, and quality beside that of a constant prediction."""
    # Names of columns may hold brackets, as in `weight [kg]`: they are not rich's markup.
    console = Console(markup=False)
    choice, quality = summary["choice"], summary["quality"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("target", f"{summary['target']} ({summary['task']}: {summary['why_task']})")
    table.add_row("inputs", _inputs(summary))
    table.add_row("rows", f"{summary['train_rows']} to learn from, {_held_out(summary)} held out")
    table.add_row("points", f"{choice['points']} inducing points kept; asked for {choice['asked']}")
    table.add_row("given up", f"{choice['given_up']:.4f} nats per row")
    table.add_row(
        "time",
        f"fit {summary['timings']['fit_s']:.1f} s, "
        f"prediction {summary['timings']['predict_us']:.1f} µs a row",
    )
    console.print(table)
    if quality is None:
        return
    scores = Table(title="On held-out rows", title_justify="left")
    for name in ("", "model", "constant"):
        scores.add_column(name, justify="left" if not name else "right")
    for metric in quality["metrics"]:
        scores.add_row(metric["name"], f"{metric['value']:.4g}", f"{metric['baseline']:.4g}")
    for level, share in quality["coverage"]:
        if level == 0.95:
            scores.add_row("within the 95 % interval", f"{100 * share:.1f} %", "")
    console.print(scores)


def _inputs(summary: Summary) -> str:
    ranked = sorted(summary["columns"], key=lambda c: -(c["relevance"] or 0.0))
    shown = ", ".join(c["name"] for c in ranked[:8])
    more = f" and {len(ranked) - 8} more" if len(ranked) > 8 else ""
    order = "most relevant first" if ranked[0]["relevance"] is not None else "in no order"
    return f"{shown}{more} ({order})" if len(ranked) > 1 else shown


def _held_out(summary: Summary) -> int:
    return 0 if summary["quality"] is None else summary["quality"]["rows"]
