"""Means and standard deviations of columns that come in parts."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ColumnMoments:
    """Total weight w, mean m and sum of squares S = Σ w_i (x_i − m)² of each column.

    Two parts merge to what their union has (Chan, Golub & LeVeque 1979):

        δ = m_b − m_a,   m = m_a + δ w_b / w,   S = S_a + S_b + δ² w_a w_b / w

    No difference of large sums is ever taken, so that a column near 1e9 that varies by 1 keeps its
    digits. Columns are held in units of the power of two below their largest value: squares of
    1e200 do not overflow, and the change of units rounds nothing.

    >>> ColumnMoments.of(torch.tensor([[1.0], [2.0]])).merged(
    ...     ColumnMoments.of(torch.tensor([[6.0]]))
    ... ).mean
    tensor([3.])
    """

    weight: Float[Tensor, ""]
    centre: Float[Tensor, " C"]
    """m, in these units."""
    squares: Float[Tensor, " C"]
    """S, in their squares."""
    unit: Float[Tensor, " C"]

    @classmethod
    def of(
        cls, A: Float[Tensor, "N C"], *, weights: Float[Tensor, " N"] | None = None
    ) -> "ColumnMoments":
        """Of some rows, at least one, each of which may count as more or less than one."""
        largest = A.abs().amax(0)
        # x = mantissa · 2^e: this quotient is 2^(e−1), exactly, and as finite as x is.
        unit = largest / 2 / torch.frexp(largest).mantissa
        unit = torch.where(unit > 0, unit, 1.0)
        scaled = A / unit
        if weights is None:
            weights = torch.ones_like(A[:, 0])
        weight = weights.sum()
        centre = weights @ scaled / weight
        # Once more, so that the mean of a constant column is that constant.
        centre = centre + weights @ (scaled - centre) / weight
        return cls(weight, centre, weights @ (scaled - centre).square(), unit)

    @property
    def mean(self) -> Float[Tensor, " C"]:
        """m."""
        return self.unit * self.centre

    @property
    def sd(self) -> Float[Tensor, " C"]:
        """√(S / w), of the rows themselves: nothing is added for having estimated m."""
        return self.unit * (self.squares / self.weight).sqrt()

    def merged(self, other: "ColumnMoments") -> "ColumnMoments":
        """Of the rows of both."""
        unit = torch.maximum(self.unit, other.unit)
        a, b = self.unit / unit, other.unit / unit
        weight = self.weight + other.weight
        step = other.centre * b - self.centre * a
        centre = self.centre * a + step * (other.weight / weight)
        between = step.square() * (self.weight * other.weight / weight)
        squares = self.squares * a.square() + other.squares * b.square() + between
        return ColumnMoments(weight, centre, squares, unit)
