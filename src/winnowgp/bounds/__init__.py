"""Lower and upper bounds on the log evidence of sparse Gaussian processes.

Bounds are pure functions of kernel blocks and targets; `bounds.collapsed` defines the blocks. Nats
are summed over rows and outputs, and larger is better. The modules hold

- `collapsed`: the collapsed bound, its sufficient statistics in chunks of rows, the exact evidence
  and an upper bound on it, subsets of the candidates, and weights in [0, 1];
- `two_pass`: the gradient of the collapsed bound;
- `uncollapsed`: the bound of an explicit q(u);
- `row_blocks`, `panels`: sums over rows, in memory or out of core, in one process or several, and
  products with large triangular matrices;
- `evidence`: the log evidence of Gaussian regression, exact with its gradient, or between bounds;
- `mixing`: the bound of outputs that mix several processes, with its gradient;
- `sites`: Gaussian sites for other likelihoods;
- `streaming`, `streaming_gradient`: the bound of a stream, in which earlier rows are remembered at
  inducing points, and its gradient;
- `gplvm`: psi statistics of uncertain inputs, and the bound of the GP-LVM.
"""

from winnowgp.bounds.collapsed import (
    collapsed_bound,
    exact_log_marginal,
    masked_bound,
    project,
    subset_blocks,
    upper_bound,
)
from winnowgp.bounds.evidence import Evidence
from winnowgp.bounds.uncollapsed import uncollapsed_bound

__all__ = [
    "Evidence",
    "collapsed_bound",
    "exact_log_marginal",
    "masked_bound",
    "project",
    "subset_blocks",
    "uncollapsed_bound",
    "upper_bound",
]
