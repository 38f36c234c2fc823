"""Words that a model has never seen, gathered while a table goes by."""

from winnowgp.data import Columns, TableEncoder

# As many are kept of a column, however large the table is.
_MOST = 1000


class UnseenWords:
    """The words of each column that were not in the training rows."""

    def __init__(self, encoder: TableEncoder) -> None:
        self._encoder = encoder
        self._words: dict[str, set[str]] = {}

    def see(self, table: Columns) -> None:
        """Some more rows."""
        for name, words in self._encoder.unseen(table).items():
            kept = self._words.setdefault(name, set())
            kept.update(words[: _MOST - len(kept)])

    def notes(self) -> list[str]:
        """A line a column."""
        found = []
        for name, words in self._words.items():
            shown = ", ".join(repr(word[:30]) for word in sorted(words)[:5])
            count = f"{len(words)} words" if len(words) < _MOST else f"{_MOST} words or more"
            found.append(
                f"{count} of column {name!r} were not in the training rows ({shown}); they count "
                "as no category."
            )
        return found
