"""Interfaces of selection: the bound of a subset of the candidates, and its marginal gains.

A model that implements `SubsetObjective.value` can have its inducing points selected by the paper's
gradient estimators. Exact marginal gains (`MarginalGainObjective`) and cheap moves between
neighbouring subsets (`SearchObjective`) make discrete search and natural gradients fast.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.selection.contenders import Contenders
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
