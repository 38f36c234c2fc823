"""The one question that carries the library: what is the bound if only this subset is used?"""

from abc import ABC, abstractmethod

from jaxtyping import Float
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


class FlipObjective(SubsetObjective):
    """An objective that knows, exactly and cheaply, what every single candidate is worth."""

    @abstractmethod
    def flips(self, mask: Mask) -> Float[Tensor, " K"]:
        """L(Z ∪ k) − L(Z without k) in nats for every candidate k at once."""


class RelaxedObjective(SubsetObjective):
    """An objective that also answers in between: weights in [0, 1] instead of in or out."""

    @abstractmethod
    def relaxed_value(self, weights: Weights) -> Nats:
        """L̂(Z*; b), which is `value` where every weight is 0 or 1."""
