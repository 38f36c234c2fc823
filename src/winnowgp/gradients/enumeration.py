"""The oracle: the full sum over all 2^K subsets."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch

from winnowgp.errors import InputError
from winnowgp.gradients.gradient import Estimate, Gradient
from winnowgp.point_processes import Bernoulli
from winnowgp.typing import Masks, ScoreMasks

MOST_CANDIDATES = 12


def all_masks(K: int, *, device: torch.device | None = None) -> Masks:
    """All 2^K subsets of K candidates, counting in binary; K ≤ 12.

    >>> all_masks(2).int().tolist()
    [[0, 0], [1, 0], [0, 1], [1, 1]]
    """
    if not 0 <= K <= MOST_CANDIDATES:
        raise InputError(
            f"enumerating {K} candidates means 2^{K} subsets; the most is {MOST_CANDIDATES}. "
            "Use ScoreFunction instead."
        )
    number = torch.arange(2**K, device=device)
    return (number[:, None] >> torch.arange(K, device=device)) % 2 == 1


@final
@dataclass(frozen=True, slots=True)
class Enumeration(Gradient[None]):
    """E_q[L(Z)] = Σ_Z q(Z) L(Z), exactly, for K ≤ 12 candidates."""

    scores_weights: ClassVar[bool] = False

    def init(self) -> None:
        return None

    def step(
        self,
        q: Bernoulli,
        score: ScoreMasks,
        *,
        state: None = None,
        generator: torch.Generator | None = None,
    ) -> Estimate[None]:
        masks = all_masks(q.K, device=q.logits.device)
        values = score(masks)
        surrogate = (q.log_prob(masks).exp() * values).sum()
        return Estimate(surrogate, values.detach(), None)
