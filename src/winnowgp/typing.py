"""Axis letters and tensor aliases: the one glossary that every signature speaks.

| letter | axis                            |
|--------|---------------------------------|
| `N`    | data rows                       |
| `D`    | input columns                   |
| `P`    | output columns                  |
| `K`    | candidates for inducing points  |
| `M`    | points included, the size of Z  |
| `S`    | samples of a subset             |
| `B`    | rows of a minibatch             |

A `mask` says which candidates a subset holds; its `value` is a bound in nats, summed over the
data, larger is better.
"""

from collections.abc import Callable
from typing import TypeAlias

from jaxtyping import Bool, Float
from torch import Tensor

Scalar: TypeAlias = Float[Tensor, ""]
Mask: TypeAlias = Bool[Tensor, " K"]
Masks: TypeAlias = Bool[Tensor, "S K"]
Weights: TypeAlias = Float[Tensor, "S K"]
Nats: TypeAlias = Float[Tensor, " S"]
SizeTable: TypeAlias = Float[Tensor, " sizes"]
"""One number for each size of a subset, 0 to K."""
Noise: TypeAlias = Float[Tensor, ""] | Float[Tensor, " N"]
"""A noise variance: one for all rows, or one a row."""

ScoreMasks: TypeAlias = Callable[[Masks], Nats]
"""Anything that answers: what is the bound, in nats, of each of these S subsets?"""

ScoreWeights: TypeAlias = Callable[[Weights], Nats]
"""The same question for weights in [0, 1], of which masks are the corners."""
