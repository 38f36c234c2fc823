"""Distributions over subsets of K candidates: priors p(Z), the process q(Z), and KL[q ‖ p]."""

from winnowgp.point_processes.bernoulli import Bernoulli, poisson_binomial
from winnowgp.point_processes.priors import (
    Budget,
    CardinalityPrior,
    LinearCardinality,
    SquaredCardinality,
    Uniform,
    kl_divergence,
)

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
