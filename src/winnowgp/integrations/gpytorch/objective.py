"""A user's model as a function of the subset of its points."""

from dataclasses import dataclass
from typing import Any, final

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from winnowgp.integrations.gpytorch.checks import Rows, check_likelihood
from winnowgp.integrations.gpytorch.pruning import pruned
from winnowgp.integrations.gpytorch.sites import Evidence
from winnowgp.selection import SubsetObjective
from winnowgp.typing import Masks, Nats


@final
@dataclass(frozen=True, slots=True)
class PrunedObjective(SubsetObjective):
    """The bound of the user's own model with some of its points, at the marginal q(u) of these.

    The candidates of all strategies stand in one row; a strategy with several sets of locations
    drops the same places from each. Each value is one evaluation of the model on all rows: any
    gradient of `winnowgp.gradients` can learn from it, and no parameter gets a gradient from it.
    """

    evidence: Evidence

    @property
    def K(self) -> int:
        return sum(found.K for found in self.evidence.strategies)

    def value(self, mask: Masks) -> Nats:
        return torch.tensor([self._bound(row) for row in mask], dtype=torch.float64)

    def _bound(self, mask: Tensor) -> float:
        found = self.evidence.strategies
        parts = mask.split([each.K for each in found])
        keep = [m.expand(len(f.locations), -1) for f, m in zip(found, parts, strict=True)]
        return self.evidence.with_model(pruned(self.evidence.model, keep)).bound()


@torch.inference_mode(False)
def subset_objective(
    model: Any, likelihood: Likelihood, data: tuple[Tensor, Tensor] | Tensor, *, seed: int = 0
) -> PrunedObjective:
    """What is the bound, in nats, if only this subset of the model's points is used?

    Args:
        model: as for `winnow`, and `likelihood` and `data` too.
        seed: of the samples that deep and latent models draw, the same for every subset.
    """
    rows = Rows.of(model, data)
    check_likelihood(likelihood, rows)
    return PrunedObjective(Evidence.of(model, likelihood, rows.x, rows.y, seed=seed))
