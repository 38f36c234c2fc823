"""Contenders of backward elimination: few candidates, whose gains are followed as they leave.

Gains of c candidates, and their changes as these candidates leave, depend only on the c × c
triangles of their dual rows (`elimination`). Each of hundreds of steps takes some twenty operations
on matrices of a few thousand entries. NumPy takes a fifth of PyTorch's time for one of them, most
of which is the call; a rank-one update in place by BLAS takes a quarter of NumPy's.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, final

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, from_numpy


@cache
def _rank_one(dtype: np.dtype[Any]) -> Any:
    """Return the rank-one update of BLAS; SciPy takes long to import, and predictions need none."""
    from scipy.linalg import get_blas_funcs

    return get_blas_funcs("ger", dtype=dtype)


@final
class ContenderRows:
    """Dual rows of c candidates for one root of the data, in c coordinates.

    Args:
        ER: duals of L times R.
        H: duals of L R.
        y: targets in the coordinates of H.
        P: number of outputs whose covariance is learnt here.
    """

    def __init__(
        self,
        ER: Float[Tensor, "c c"],
        H: Float[Tensor, "c c"],
        y: Float[Tensor, "c Y"],
        *,
        P: int,
    ) -> None:
        self._ER, self._H, self._y, self._P = _array(ER), _array(H), _array(y), P

    def gains(self, prior: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return twice the marginal gain of each candidate, given the squared norms of E."""
        joint, explained = _row_norms(self._H), _row_norms(self._ER) / prior - 1
        fit = _row_norms(self._H @ self._y) / joint
        return fit + self._P * (explained + np.log(joint / prior))

    def remove(self, index: int, *, along: NDArray[np.floating]) -> None:
        """Project the rows off that of a candidate, along which those of E have components."""
        _subtract_outer(self._ER, along, self._ER[index].copy())
        _project(self._H, index)


@final
class Contenders:
    """Included candidates, numbered from zero, whose gains are followed as some of them leave.

    Args:
        terms: for each kernel the duals E of its L, and the rows that depend on the data.
    """

    def __init__(
        self, terms: Sequence[tuple[Float[Tensor, "c c"], tuple[ContenderRows, ...]]]
    ) -> None:
        self._terms = [(_array(E), data) for E, data in terms]
        self.included = np.ones(len(self._terms[0][0]), dtype=bool)

    def marginal_gains(self) -> NDArray[np.floating]:
        """Return L(Z) − L(Z \\ k) in nats for each candidate k in the subset, ∞ for others."""
        gains = np.zeros(len(self.included), dtype=self._terms[0][0].dtype)
        with np.errstate(divide="ignore", invalid="ignore"):  # rows of candidates that left
            for E, data in self._terms:
                prior = _row_norms(E)
                for rows in data:
                    gains += 0.5 * rows.gains(prior)
        gains[~self.included] = np.inf
        return gains

    def remove(self, index: int) -> None:
        """Remove a candidate that is in the subset; O(c²)."""
        for E, data in self._terms:
            along = _project(E, index)
            for rows in data:
                rows.remove(index, along=along)
        self.included[index] = False

    def remove_least(self, count: int) -> tuple[Int[Tensor, " count"], Float[Tensor, " count"]]:
        """Remove `count` candidates, each that of smallest gain when it leaves.

        Returns: the candidates in the order of removal, and their gains in nats.
        """
        order, least = np.empty(count, dtype=np.int64), np.empty(count)
        for step in range(count):
            gains = self.marginal_gains()
            index = order[step] = int(gains.argmin())
            least[step] = gains[index]
            self.remove(index)
        return from_numpy(order), from_numpy(least)


def _array(rows: Tensor) -> NDArray[np.floating]:
    """Return a copy in NumPy, on the CPU."""
    return np.array(rows.cpu().numpy(), order="C")


def _row_norms(rows: NDArray[np.floating]) -> NDArray[np.floating]:
    return np.einsum("ij,ij->i", rows, rows)


def _project(rows: NDArray[np.floating], index: int) -> NDArray[np.floating]:
    """Project rows off one of them, in place; return the component of each along it."""
    row = rows[index].copy()
    along = rows @ row
    along /= along[index]
    _subtract_outer(rows, along, row)
    return along


def _subtract_outer(
    rows: NDArray[np.floating], along: NDArray[np.floating], row: NDArray[np.floating]
) -> None:
    """Subtract the outer product of two vectors from a matrix, in place."""
    # BLAS has columns first.
    _rank_one(rows.dtype)(-1.0, row, along, a=rows.T, overwrite_a=1)
