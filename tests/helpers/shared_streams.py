"""A stream whose rows several processes share."""

from typing import Any
from unittest.mock import patch

import numpy as np

from helpers.short_fits import shortest_fits
from winnowgp.data import ArraySource, shard
from winnowgp.data.distributed import ProcessGroup
from winnowgp.errors import InputError
from winnowgp.estimators import SparseGPRegressor, streaming

_RNG = np.random.default_rng(3)
X = _RNG.uniform(0, 6, (48, 2))
Y = np.sin(X[:, 0]) + 0.1 * _RNG.standard_normal(48)


def updates(process_group: ProcessGroup) -> dict[str, Any]:
    """Return a model after three batches, and how many batches and rows this process read."""
    with shortest_fits():
        model = SparseGPRegressor("rbf", random_state=0).fit(X[:12] + 0.01, Y[:12])
    learnt, read = [], []
    once, tensor = SparseGPRegressor._update_once, ArraySource._tensor

    def counted(self: SparseGPRegressor, *arguments: Any) -> None:
        learnt.append(self.n_batches_)
        once(self, *arguments)

    def reading(self: ArraySource, name: str, *arguments: Any) -> Any:
        rows = tensor(self, name, *arguments)
        read.extend(rows.tolist() if name == "X" else [])
        return rows

    source, bad = shard(ArraySource(X, Y)), X.copy()
    bad[40, 1] = np.nan
    assert source.process_group == process_group
    with (
        patch.object(streaming, "BATCH_ROWS", 16),
        patch.object(SparseGPRegressor, "_update_once", counted),
        patch.object(ArraySource, "_tensor", reading),
    ):
        model.partial_fit(source)
        rows = len({tuple(row) for row in read})
        error = ""
        try:
            model.partial_fit(shard(ArraySource(bad, Y)))
        except InputError as raised:
            error = str(raised)
    return {
        "learnt": len([number for number in learnt if number <= 3]),
        "read": rows,
        "predicted": model.predict(X[:5]).tolist(),
        "elbo": model.elbo_,
        "sizes": [record.points for record in model.batches_],
        "error": error,
    }
