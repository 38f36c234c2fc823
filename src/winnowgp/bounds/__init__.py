"""Lower and upper bounds on the log evidence of sparse Gaussian processes.

Bounds are pure functions of kernel blocks and targets; `bounds.collapsed` defines the blocks. Nats
are summed over rows and outputs, and larger is better. The modules hold

- `collapsed`: the collapsed bound, subsets of the candidates, and weights in [0, 1];
- `uncollapsed`: the bound of an explicit q(u);
- `evidence`: the exact log evidence and an upper bound;
- `moments`: sufficient statistics of the collapsed bound;
- `sites`: Gaussian sites for other likelihoods;
- `psi` and `gplvm`: uncertain inputs;
- `row_blocks` and `two_pass`: out-of-core sums over rows, and gradients.
"""

from winnowgp.bounds.collapsed import (
    Projection,
    collapsed_bound,
    masked_bound,
    project,
    subset_blocks,
)
from winnowgp.bounds.evidence import exact_log_marginal, upper_bound
from winnowgp.bounds.uncollapsed import uncollapsed_bound

__all__ = [
    "Projection",
    "collapsed_bound",
    "exact_log_marginal",
    "masked_bound",
    "project",
    "subset_blocks",
    "uncollapsed_bound",
    "upper_bound",
]
