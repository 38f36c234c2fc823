"""What separates w equal observations from one of w times the precision."""

from math import log, pi

from jaxtyping import Float
from torch import Tensor

from winnowgp.typing import Scalar


def repetition(weights: Float[Tensor, " N"], noise: Scalar) -> Scalar:
    """Σ_i log [N(y_i | f_i, σ²)^w_i / N(y_i | f_i, σ²/w_i)], which depends on neither y nor f.

    = ½ Σ_i [(1 − w_i) log 2πσ² − log w_i]. A bound with noise σ²/w_i a row, plus this for each
    output, is the bound in which row i counts as w_i equal rows.
    """
    return 0.5 * ((1 - weights).sum() * (log(2 * pi) + noise.log()) - weights.log().sum())
