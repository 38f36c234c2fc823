"""The problems that selectors are compared on: data, candidates, and hyper-parameters to hold."""

from copy import deepcopy
from dataclasses import dataclass

import torch

from winnowgp.data import Dataset, Standardiser, load_table
from winnowgp.estimators import kernel_from
from winnowgp.models import SparseGP
from winnowgp.training.initialization import initialise_hyperparameters
from winnowgp.training.lbfgs import Stop, maximise_elbo

ALPHAS = {"concrete": 0.01, "energy": 0.05, "kin8nm": 0.1, "protein": 0.2}
"""The paper's strength of the prior for each data set."""

K = 200
FIT_ROWS = 4000
"""Hyper-parameters are fitted on at most so many rows."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Rows, and a model of them whose parameters are held."""

    name: str
    data: Dataset
    model: SparseGP
    """With its candidates."""
    note: str
    """How the hyper-parameters came about."""


def standardised(name: str, *, most: int | None = None) -> Dataset:
    """All rows of a data set, or a random part; columns of mean zero and unit variance."""
    raw = load_table(name).dataset()
    X, Y = (Standardiser.of(A).forward(A) for A in (raw.X, raw.Y))
    if most is not None and most < raw.N:
        rows = permuted(raw.N, seed=0)[:most]
        X, Y = X[rows], Y[rows]
    return Dataset(X, Y)


def permuted(N: int, *, seed: int) -> torch.Tensor:
    """The numbers 0..N−1 in an order of their own."""
    return torch.randperm(N, generator=torch.Generator().manual_seed(seed))


def warm(data: Dataset) -> tuple[SparseGP, str]:
    """Hyper-parameters that suit K random candidates held in place; the candidates."""
    order = permuted(data.N, seed=0)
    part = Dataset(data.X[order[:FIT_ROWS]], data.Y[order[:FIT_ROWS]])
    bare = SparseGP(kernel_from("rbf", data.D), data.X[:0])
    model = initialise_hyperparameters(bare, data, order=order).with_candidates(data.X[order[:K]])
    model.candidates.requires_grad_(False)
    stop = Stop(gain=1e-3 * part.N, window=10, iterations=40)
    found = maximise_elbo(model, part.X, objective=model.chunked_bound(part), stop=stop)
    note = f"evidence of up to 1000 rows, then {found.iterations} L-BFGS steps on {part.N} rows"
    return model, note


def problem(name: str, *, most: int | None = None) -> Problem:
    """A data set with K random rows as candidates and fitted hyper-parameters."""
    data = standardised(name, most=most)
    model, note = warm(data)
    return Problem(name, data, model, note)


def moved(model: SparseGP, data: Dataset, *, iterations: int) -> SparseGP:
    """A copy whose hyper-parameters and locations took so many L-BFGS steps."""
    copied = deepcopy(model)
    copied.candidates.requires_grad_(True)
    stop = Stop(gain=0.0, window=iterations, iterations=iterations)
    maximise_elbo(copied, data.X, objective=copied.chunked_bound(data), stop=stop)
    return copied
