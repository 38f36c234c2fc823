"""Probability on subsets of the K candidates: priors p(Z), the process q(Z), and KL[q ‖ p]."""

from winnowgp.point_processes.bernoulli import Bernoulli
from winnowgp.point_processes.budget import Budget
from winnowgp.point_processes.cardinality import CardinalityPrior
from winnowgp.point_processes.count import poisson_binomial
from winnowgp.point_processes.divergence import kl_divergence
from winnowgp.point_processes.linear_cardinality import LinearCardinality
from winnowgp.point_processes.squared_cardinality import SquaredCardinality
from winnowgp.point_processes.uniform import Uniform

__all__ = [
    "Bernoulli",
    "Budget",
    "CardinalityPrior",
    "LinearCardinality",
    "SquaredCardinality",
    "Uniform",
    "kl_divergence",
    "poisson_binomial",
]
