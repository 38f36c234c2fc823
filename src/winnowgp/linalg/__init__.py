"""Linear algebra with no Gaussian process in sight."""

from winnowgp.linalg.cholesky import Cholesky, cholesky, definite_cholesky, jitter_ladder
from winnowgp.linalg.resolved_rows import flip_step, resolved_rows, triangular_rows
from winnowgp.linalg.triangular import half_log_det, solve_lower, squared_norm

__all__ = [
    "Cholesky",
    "cholesky",
    "definite_cholesky",
    "flip_step",
    "half_log_det",
    "jitter_ladder",
    "resolved_rows",
    "solve_lower",
    "squared_norm",
    "triangular_rows",
]
