"""A deep Gaussian process as a function of the subset that each of its layers uses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from winnowgp.models.deep_layer import DeepLayer
from winnowgp.models.propagation import propagated
from winnowgp.selection import SubsetObjective
from winnowgp.typing import Masks, Nats


@final
@dataclass(frozen=True, slots=True)
class DeepObjective(SubsetObjective):
    """The bound of any combination of subsets, the candidates of all layers in one row.

    A mask holds those of the first layer, then those of the second, and so on. All S masks meet the
    same ε (common random numbers), so that their scores differ by what the subsets are worth and
    not by luck; each score is unbiased, and all are one batched pass.
    """

    layers: Sequence[DeepLayer]
    X: Float[Tensor, "N D"]
    expected_log_prob: Callable[[Tensor, Tensor], Tensor]
    """From means and variances `[S T N F]` to nats of each row and target."""
    noise: Sequence[Tensor]
    scale: float
    """Rows that each row stands for."""
    connected: bool

    @property
    def K(self) -> int:
        return sum(layer.K for layer in self.layers)

    def value(self, mask: Masks) -> Nats:
        parts = mask.split([layer.K for layer in self.layers], dim=1)
        pairs = zip(self.layers, parts, strict=True)
        points = [layer.subset_points(part) for layer, part in pairs]
        found = propagated(
            self.layers, points, self.X, noise=self.noise, connected=self.connected
        ).last
        nats = self.expected_log_prob(found.mean, found.variance).sum((-2, -1)).mean(-1)
        for used in points:
            nats = nats - used.kl() / self.scale
        return self.scale * nats
