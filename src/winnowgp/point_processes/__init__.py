"""Distributions over subsets of K candidates: priors p(Z), processes q(Z), and KL[q ‖ p].

- `bernoulli`: the interface of processes, and independent inclusion;
- `determinantal`: inclusion with repulsion between similar candidates;
- `priors`: priors on the number of inducing points, and KL[q ‖ p].
"""

from winnowgp.point_processes.bernoulli import Bernoulli, poisson_binomial
from winnowgp.point_processes.determinantal import Determinantal, sampled_kl_divergence
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
    "Determinantal",
    "LinearCardinality",
    "SquaredCardinality",
    "Uniform",
    "kl_divergence",
    "poisson_binomial",
    "sampled_kl_divergence",
]
