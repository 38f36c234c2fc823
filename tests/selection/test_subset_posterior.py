"""The posterior over subsets of a fit: marginals, pairs and sizes of each kind."""

import pytest
import torch
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.gradients import all_masks
from winnowgp.point_processes import Bernoulli, Determinantal
from winnowgp.selection import SubsetPosterior
from winnowgp.selection.subset_samples import SubsetSamples

K = 4
LOGITS = torch.tensor([1.0, -0.5, 0.3, 2.0], dtype=torch.float64)
FEATURES = torch.tensor([[1.0, 0.2], [0.9, -0.3], [0.0, 1.5], [0.4, 0.4]], dtype=torch.float64)


def samples() -> SubsetSamples:
    masks = torch.rand(2, 40, K, generator=torch.Generator().manual_seed(0)) < 0.6
    share = masks.double().mean(1)
    return SubsetSamples(masks, torch.randn(2, 40).double(), share, torch.zeros(K + 1).double())


def weighted(q: Bernoulli | Determinantal | SubsetSamples) -> tuple[Tensor, Tensor]:
    """All subsets with their probabilities, or the samples with equal weights."""
    if isinstance(q, SubsetSamples):
        return q.pooled.double(), torch.full((80,), 1 / 80, dtype=torch.float64)
    return all_masks(K).double(), q.log_prob(all_masks(K)).exp()


@pytest.mark.parametrize(
    ("q", "kind"),
    [
        (Bernoulli(LOGITS), "mean-field"),
        (Determinantal(LOGITS, FEATURES), "determinantal"),
        (samples(), "gibbs"),
    ],
    ids=["mean-field", "determinantal", "gibbs"],
)
def test_subset_posterior_matches_enumeration(q, kind: str) -> None:
    posterior = SubsetPosterior(q)
    masks, p = weighted(q)
    assert posterior.kind == kind
    torch.testing.assert_close(posterior.inclusion, p @ masks)
    torch.testing.assert_close(posterior.pairwise_inclusion(), masks.mT @ (p[:, None] * masks))
    sizes = torch.stack([p[masks.sum(1) == m].sum() for m in range(K + 1)])
    torch.testing.assert_close(posterior.size_probabilities(), sizes)
    for level in (0.5, 0.9):
        low, high = posterior.credible_size(level)
        tail = 0.5 - level / 2
        # At most a tail lies strictly outside on each side, and with one size less more would.
        assert sizes[:low].sum() < tail <= sizes[: low + 1].sum()
        assert sizes[:high].sum() < 1 - tail <= sizes[: high + 1].sum()
    assert (posterior.r_hat is None) == (kind != "gibbs")
    assert (posterior.effective_samples is None) == (kind != "gibbs")


def test_credible_size_level_outside_raises() -> None:
    with pytest.raises(InputError, match="`level`"):
        SubsetPosterior(Bernoulli(LOGITS)).credible_size(1.0)
