"""What a person should know about a new table, found while it goes by."""

from collections.abc import Iterable, Iterator

from winnowgp.data import Columns
from winnowgp.estimators import TabularModel

# Unseen words are kept to this number a column, however large the table is.
_MOST = 1000


class TableNotes:
    """Words that a model has never seen, and whether rows have names."""

    def __init__(self, model: TabularModel) -> None:
        self._model = model
        self._words: dict[str, set[str]] = {}
        self._unnamed = False

    def watched(self, blocks: Iterable[Columns]) -> Iterator[Columns]:
        """The same blocks."""
        id_column = self._model.id_column
        for block in blocks:
            self._model.encoder.check_has_columns(block)
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
