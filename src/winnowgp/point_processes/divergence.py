"""How far the variational process is from the prior."""

from winnowgp.errors import InputError
from winnowgp.point_processes.bernoulli import Bernoulli
from winnowgp.point_processes.cardinality import CardinalityPrior
from winnowgp.typing import Scalar


def kl_divergence(q: Bernoulli, p: CardinalityPrior) -> Scalar:
    """KL[q(Z) ‖ p(Z)] = −H(q) − E_q[w(|Z|)] + log Σ_Z exp(w(|Z|)), in nats, in closed form.

    A true KL: non-negative, and zero when q = p. Equation 3 of the paper with slips 1 and 2 mended.

    >>> import torch
    >>> from winnowgp.point_processes import LinearCardinality
    >>> q = Bernoulli(torch.full((5,), -0.7, dtype=torch.float64))
    >>> round(abs(kl_divergence(q, LinearCardinality(5, 0.7)).item()), 12)
    0.0
    """
    if q.K != p.K:
        raise InputError(f"q has {q.K} candidates and p has {p.K}; build the prior with K={q.K}.")
    return p.log_normaliser(q.logits) - q.entropy() - p.expected_log_weight(q)
