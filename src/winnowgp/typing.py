"""Axis letters and tensor aliases used in all signatures.

======  =======================================
letter  axis
======  =======================================
``N``   data rows
``D``   input columns
``P``   output columns
``K``   candidate inducing points
``M``   selected inducing points, the size of Z
``S``   sampled subsets
``B``   rows of a minibatch
``L``   layers
======  =======================================

A mask selects candidates. The value of a subset is a bound in nats, summed over the data; larger is
better.
"""

from collections.abc import Callable
from typing import TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor

Scalar: TypeAlias = Float[Tensor, ""]
"""A tensor with a single number."""
Mask: TypeAlias = Bool[Tensor, " K"]
"""One subset of the candidates."""
Masks: TypeAlias = Bool[Tensor, "S K"]
"""S subsets of the candidates."""
Weights: TypeAlias = Float[Tensor, "S K"]
"""S vectors of weights in [0, 1], one weight per candidate."""
Nats: TypeAlias = Float[Tensor, " S"]
"""The bounds of S subsets, in nats."""
SizeTable: TypeAlias = Float[Tensor, " sizes"]
"""One number for each subset size, from 0 to K."""
Noise: TypeAlias = Float[Tensor, ""] | Float[Tensor, " N"]
"""A noise variance: one for all rows, or one per row."""
TargetNoise: TypeAlias = Float[Tensor, ""] | Float[Tensor, " P"]
"""A noise variance: one for all targets, or one per target."""

ScoreMasks: TypeAlias = Callable[[Masks], Nats]
"""A function that returns the bound of each of S subsets, in nats."""

ScoreWeights: TypeAlias = Callable[[Weights], Nats]
"""A function that returns the bound, in nats, of each of S vectors of weights in [0, 1]; a mask is
the special case of weights 0 and 1."""
