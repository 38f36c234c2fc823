"""The one question that carries the library: what is the bound if only this subset is used?"""

from abc import ABC, abstractmethod

from jaxtyping import Bool, Float, Int
from torch import Tensor

from winnowgp.typing import Mask, Masks, Nats, Weights


class SubsetObjective(ABC):
    """A model with its data, seen as a function of the subset of candidates that is used.

    Answering `value` is all that a model must do to have its points chosen.
    """

    @property
    @abstractmethod
    def K(self) -> int:
        """Number of candidates."""

    @abstractmethod
    def value(self, mask: Masks) -> Nats:
        """L(Z) of each of S subsets: nats, summed over the data, larger is better.

        Differentiable with respect to the model's parameters where the model is.
        """


class MarginalGainObjective(SubsetObjective):
    """An objective that knows, exactly and cheaply, what every single candidate is worth."""

    @abstractmethod
    def marginal_gains(self, mask: Mask) -> Float[Tensor, " K"]:
        """L(Z ∪ k) − L(Z without k) in nats for every candidate k at once."""


class SearchState(ABC):
    """A subset that a search stands on: what every flip is worth there, and a step to it."""

    rows: Int[Tensor, " J"]
    """Candidates that the search still looks at."""
    included: Bool[Tensor, " J"]
    """Which of them are in the subset."""
    bound: Float[Tensor, ""]
    """L(Z) in nats."""

    @property
    @abstractmethod
    def mask(self) -> Bool[Tensor, " K"]:
        """The subset as a mask over all candidates."""

    @abstractmethod
    def marginal_gains(self) -> Float[Tensor, " J"]:
        """L(Z ∪ k) − L(Z without k) in nats of each of the rows."""

    @abstractmethod
    def flip(self, at: int, *, worth: Float[Tensor, ""]) -> "SearchState":
        """The subset with row `at` on the other side; `worth` is its entry of `flips`."""

    @abstractmethod
    def drop(self, at: Int[Tensor, " 1"], *, worth: Float[Tensor, " 1"]) -> "SearchState":
        """The subset without its row `at`, for walks down: flips of rows outside mean nothing then.

        `at` is a tensor and never read: no step waits for a GPU.
        """

    @abstractmethod
    def only(self, keep: Bool[Tensor, " J"]) -> "SearchState":
        """The same subset, looking at fewer rows; those included must be kept."""


class SearchObjective(MarginalGainObjective):
    """An objective that searches walk over, for a step to a neighbour is cheap."""

    @property
    @abstractmethod
    def N(self) -> int | float:
        """Number of observations: of rows, unless they have weights."""

    @property
    @abstractmethod
    def empty(self) -> Float[Tensor, ""]:
        """L(∅) in nats."""

    @abstractmethod
    def search_state(self, mask: Mask) -> SearchState:
        """A subset to start from."""


class RelaxedObjective(SubsetObjective):
    """An objective that also answers in between: weights in [0, 1] instead of in or out."""

    @abstractmethod
    def relaxed_value(self, weights: Weights) -> Nats:
        """L̂(Z*; b), which is `value` where every weight is 0 or 1."""
