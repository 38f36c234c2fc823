"""How to differentiate E_q[L(Z)], a sum over 2^K subsets, with respect to q and to the model.

Each gradient turns a process and a function that scores subsets into an `Estimate`: a number whose
value estimates the expectation and whose `backward()` estimates its gradient, both for the logits
of q and for whatever parameters the scores depend on.

| gradient        | bias                              | cost a step               |
|-----------------|-----------------------------------|---------------------------|
| `Enumeration`   | none, no variance either          | 2^K scores, K ≤ 12        |
| `ScoreFunction` | none                              | S scores of sampled sizes |
| `Relaxed`       | shrinks with the temperature      | S scores of all K points  |
"""

from winnowgp.gradients.baselines import Baseline, DecayingAverage, LeaveOneOut, NoBaseline
from winnowgp.gradients.enumeration import Enumeration, all_masks
from winnowgp.gradients.gradient import Estimate, Gradient
from winnowgp.gradients.relaxed import Relaxed, Temperature
from winnowgp.gradients.score_function import ScoreFunction

__all__ = [
    "Baseline",
    "DecayingAverage",
    "Enumeration",
    "Estimate",
    "Gradient",
    "LeaveOneOut",
    "NoBaseline",
    "Relaxed",
    "ScoreFunction",
    "Temperature",
    "all_masks",
]
