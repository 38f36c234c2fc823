"""Interfaces of selection: the bound of a subset of the candidates, and its marginal gains.

A model that implements `SubsetObjective.value` can have its inducing points selected by the paper's
gradient estimators. Exact marginal gains (`MarginalGainObjective`) and cheap moves between
neighbouring subsets (`SearchObjective`) make discrete search and natural gradients fast.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from winnowgp.typing import Mask, Masks, Nats, Weights


class SubsetObjective(ABC):
    """The bound of a model on its data, as a function of the subset of candidates in use."""

    @property
    @abstractmethod
    def K(self) -> int:
        """Number of candidates."""

    @abstractmethod
    def value(self, mask: Masks) -> Nats:
        """Return the bound L(Z) of each of S subsets in nats, summed over the data.

        Differentiable with respect to the model's parameters where the model is.
        """


class MarginalGainObjective(SubsetObjective):
    """An objective that computes the marginal gains of all candidates exactly and cheaply."""

    @abstractmethod
    def marginal_gains(self, mask: Mask) -> Float[Tensor, " K"]:
        """Return L(Z ∪ k) − L(Z \\ k) in nats for every candidate k at once."""


@dataclass(frozen=True, slots=True)
class BlockRemoval:
    """Included candidates that are removed in turn.

    Attributes:
        rows: positions among the candidates of a state.
        gains: marginal gain of each when it is removed, those before it being removed, in nats.
        bases: matrices with orthonormal rows, from which the state computes what is left.
    """

    rows: Int[Tensor, " B"]
    gains: Float[Tensor, " B"]
    bases: tuple[Float[Tensor, "B C"], ...]


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
        joint, explained = _squared_norms(self._H), _squared_norms(self._ER) / prior - 1
        fit = _squared_norms(self._H @ self._y) / joint
        return fit + self._P * (explained + np.log(joint / prior))

    def remove(self, index: int, *, along: NDArray[np.floating]) -> None:
        """Project the rows off that of a candidate, along which those of E have components."""
        self._ER -= np.outer(along, self._ER[index])
        _project(self._H, index)


@final
@dataclass(frozen=True, slots=True)
class _Term:
    """The rows of one prior covariance."""

    E: NDArray[np.floating]
    data: tuple[ContenderRows, ...]


@final
class Contenders:
    """Included candidates, numbered from zero, whose gains are followed as some of them leave.

    The gains of c candidates, and their changes as these candidates leave, depend only on the c × c
    triangles of their dual rows (`elimination`). Each of hundreds of steps takes some twenty
    operations on matrices of a few thousand entries. NumPy takes a fifth of PyTorch's time for one
    of them, most of which is the call.

    Args:
        terms: for each kernel the duals E of its L, and the rows that depend on the data.
    """

    def __init__(
        self, terms: Sequence[tuple[Float[Tensor, "c c"], tuple[ContenderRows, ...]]]
    ) -> None:
        self._terms = [_Term(_array(E), data) for E, data in terms]
        self.included = np.ones(len(self._terms[0].E), dtype=bool)

    def marginal_gains(self) -> NDArray[np.floating]:
        """Return L(Z) − L(Z \\ k) in nats for each candidate k in the subset, ∞ for others."""
        gains = np.zeros(len(self.included), dtype=self._terms[0].E.dtype)
        with np.errstate(divide="ignore", invalid="ignore"):  # rows of candidates that left
            for term in self._terms:
                prior = _squared_norms(term.E)
                for rows in term.data:
                    gains += 0.5 * rows.gains(prior)
        gains[~self.included] = np.inf
        return gains

    def remove(self, index: int) -> None:
        """Remove a candidate that is in the subset; O(c²)."""
        for term in self._terms:
            along = _project(term.E, index)
            for rows in term.data:
                rows.remove(index, along=along)
        self.included[index] = False

    def remove_least(self, count: int) -> Int[Tensor, " count"]:
        """Remove `count` candidates, each that of smallest gain when it leaves; return them."""
        order = np.empty(count, dtype=np.int64)
        for step in range(count):
            order[step] = self.marginal_gains().argmin()
            self.remove(int(order[step]))
        return from_numpy(order)


def _array(rows: Tensor) -> NDArray[np.floating]:
    """Return a copy in NumPy, on the CPU."""
    return np.array(rows.cpu().numpy())


def _squared_norms(rows: NDArray[np.floating]) -> NDArray[np.floating]:
    return np.einsum("ij,ij->i", rows, rows)


def _project(rows: NDArray[np.floating], index: int) -> NDArray[np.floating]:
    """Project rows off one of them, in place; return the component of each along it."""
    row = rows[index].copy()
    along = rows @ row
    along /= along[index]
    rows -= np.outer(along, row)
    return along


class SearchState(ABC):
    """A subset during a search, with its marginal gains and cheap moves to neighbouring subsets."""

    candidates: Int[Tensor, " J"]
    """Candidates that the search still considers."""
    included: Bool[Tensor, " J"]
    """Mask of these candidates: True for those in the subset."""
    bound: Float[Tensor, ""]
    """L(Z) in nats."""

    @property
    @abstractmethod
    def mask(self) -> Bool[Tensor, " K"]:
        """The subset as a mask over all K candidates."""

    @abstractmethod
    def marginal_gains(self) -> Float[Tensor, " J"]:
        """Return L(Z ∪ k) − L(Z \\ k) in nats for each of the J candidates."""

    @abstractmethod
    def toggle(self, index: int, *, gain: Float[Tensor, ""]) -> "SearchState":
        """Return the state after adding candidate `index`, or removing it if it is included.

        Args:
            index: position among `candidates`.
            gain: entry `index` of `marginal_gains`; added to the bound, or subtracted from it.
        """

    @abstractmethod
    def cosines(self, rows: Int[Tensor, " c"]) -> Float[Tensor, "c c"]:
        """Return how strongly removals of a few included candidates affect each other, in [0, 1].

        If an entry is zero, removing one of the two candidates leaves the conditional precisions of
        the other as they are.
        """

    @abstractmethod
    def block_removal(self, rows: Int[Tensor, " B"]) -> "BlockRemoval":
        """Return the removal of several included candidates in turn; O(B² K).

        All J candidates must be included.
        """

    @abstractmethod
    def remove_block(self, removal: "BlockRemoval") -> "SearchState":
        """Return the state without the candidates of a block, which are considered no more."""

    @abstractmethod
    def contenders(self, rows: Int[Tensor, " c"]) -> Contenders:
        """Return a few included candidates on the CPU, of which some leave in O(c²) each.

        Their gains are those of the whole state as long as no other candidate leaves the subset.
        """


class SearchObjective(MarginalGainObjective):
    """An objective for discrete search: moving to a neighbouring subset is cheap."""

    @property
    @abstractmethod
    def N(self) -> int | float:
        """Number of observations; with sample weights, their sum."""

    @property
    @abstractmethod
    def empty(self) -> Float[Tensor, ""]:
        """Bound L(∅) without inducing points, in nats."""

    @abstractmethod
    def search_state(self, mask: Mask) -> SearchState:
        """Return the search state of a subset."""

    @abstractmethod
    def restrict(self, mask: Mask) -> "SearchObjective":
        """Return the same objective for a subset of the candidates, numbered from zero."""


class RelaxedObjective(SubsetObjective):
    """An objective that is also defined for weights in [0, 1] instead of masks."""

    @abstractmethod
    def relaxed_value(self, weights: Weights) -> Nats:
        """Return L̂(Z*; b) in nats, which equals `value` where every weight is 0 or 1."""
