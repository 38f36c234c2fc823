"""The model that a file holds, if a command can use it."""

from pathlib import Path

from winnowgp.errors import InputError
from winnowgp.estimators import TabularModel
from winnowgp.io import load


def loaded(path: Path) -> TabularModel:
    """A model that `winnow fit` wrote."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a file that `winnow fit` wrote.")
    model = load(path)
    if not isinstance(model, TabularModel):
        raise InputError(
            f"{path} holds a {type(model).__name__}, saved from Python; the command line needs a "
            "file that `winnow fit` wrote. Use `winnowgp.load` in Python."
        )
    return model
