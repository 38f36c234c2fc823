"""Fits that processes share."""

from typing import Any

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean

from helpers.shared_rows import D, N, array, dataset, parquet, plain
from helpers.short_fits import shortest_fits
from winnowgp.data import Source, shard, standardise
from winnowgp.data.distributed import ProcessGroup
from winnowgp.models import SparseGP
from winnowgp.training import FastSchedule, MaxPoints, Tolerance, fit

FEW = Tolerance(0.3)
QUICK: dict[str, Any] = {"n_candidates": 6, "rounds": 1, "iterations": 20, "inclusion_steps": 4}


def _fitted(source: Source, **plan: Any) -> dict[str, Any]:
    """Return the result of a fit as plain numbers."""
    kernel = ScaleKernel(RBFKernel(ard_num_dims=D))
    model = SparseGP(kernel, torch.zeros(0, D).double(), mean=ConstantMean(), noise=0.1)
    with shortest_fits():
        found = fit(model, source, schedule=FastSchedule(**{**QUICK, **plan}))
    X = standardise(dataset()).part(torch.arange(0, N, 10)).X
    predicted = found.posterior.predict(X)
    assert found.selection.frontier is not None
    assert found.evidence is not None
    return {
        "bound": found.elbo,
        "evidence": [found.evidence.lower, found.evidence.upper],
        "given up": found.elbo_gap,
        "noise": found.model.noise.item(),
        "points": plain(found.posterior.Z),
        "candidates": plain(found.candidates[0]),
        "inclusion": plain(found.selection.inclusion),
        "frontier": plain(found.selection.frontier.bounds),
        "mean": plain(predicted.mean),
        "variance": plain(predicted.variance),
    }


def fits(process_group: ProcessGroup) -> dict[str, Any]:
    """Fit weighted rows in memory, and rows of a source."""
    return {
        "weights": _fitted(standardise(shard(dataset(weighted=True))), goal=FEW),
        "array": _fitted(standardise(shard(array())), goal=FEW),
    }


def more_fits(process_group: ProcessGroup) -> dict[str, Any]:
    """Fit other sources by other schedules."""
    units = standardise(shard(array()))
    return {
        "dataset": _fitted(standardise(shard(dataset())), goal=FEW, rounds=2),
        "parquet": _fitted(standardise(shard(parquet())), goal=FEW, rounds=2),
        "own units": _fitted(shard(array()), goal=FEW),
        "count of points": _fitted(units, goal=MaxPoints(5), iterations=40),
    }
