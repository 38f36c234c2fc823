"""Whether torchrun started the command, and which of its processes this is."""

import os


def launched() -> bool:
    """Whether it is one of several that torchrun started, or may have."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def speaks() -> bool:
    """Whether it is the one that prints and writes."""
    return not launched() or os.environ.get("RANK") == "0"


def name() -> str:
    """What it calls itself in messages: processes that are not the first give their number."""
    return "winnow" if speaks() else f"winnow (process {int(os.environ['RANK']) + 1})"
