import torch
from torch import Tensor

from winnowgp.gradients import ScoreFunction
from winnowgp.point_processes import Bernoulli
from winnowgp.training.paper import Estimates


def test_a_score_that_is_not_a_number_is_not_remembered(generator: torch.Generator) -> None:
    estimates = Estimates(ScoreFunction(), generator)
    q = Bernoulli(torch.zeros(3, dtype=torch.float64))

    def fine(masks: Tensor) -> Tensor:
        return masks.double().sum(1)

    def broken(masks: Tensor) -> Tensor:
        return torch.full((len(masks),), torch.nan, dtype=torch.float64)

    estimates.next(q, fine)
    before = estimates.state_dict()["state"]
    assert torch.isnan(estimates.next(q, broken))
    assert estimates.state_dict()["state"] is before
    assert torch.isfinite(estimates.next(q, fine))
    assert estimates.state_dict()["state"] is not before
