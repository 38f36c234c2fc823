"""The small data set that travels with the package."""

from importlib.resources import files

import numpy as np
import torch

from winnowgp.data.dataset import Dataset


def hills() -> Dataset:
    """One hundred and eighty noisy heights along a path: flat at first, then ever steeper hills.

    Generated for this package as y = sin(x²/4)·x/6 + 0.1·ε at x ~ U[0, 8]; see `hills.csv`. A
    smooth stretch needs few inducing points and a rough one many, which makes it a good picture.

    >>> hills().N
    180
    """
    text = files(__name__).joinpath("hills.csv").read_text(encoding="utf-8")
    table = torch.from_numpy(np.loadtxt(text.splitlines(), delimiter=",", skiprows=1))
    return Dataset.of(table[:, :1], table[:, 1])
