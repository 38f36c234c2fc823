"""Linear algebra with no Gaussian process in sight."""

from winnowgp.linalg.cholesky import Cholesky, cholesky, definite_cholesky, jitter_ladder
from winnowgp.linalg.triangular import half_log_det, solve_lower, squared_norm

__all__ = [
    "Cholesky",
    "cholesky",
    "definite_cholesky",
    "half_log_det",
    "jitter_ladder",
    "solve_lower",
    "squared_norm",
]
