"""Kernel blocks and targets in, nats out. Pure functions, summed over rows and outputs.

The blocks of M points Z and N rows X, with P outputs sharing one kernel:

| argument | shape   | meaning                                   |
|----------|---------|-------------------------------------------|
| `Kuu`    | `[M M]` | prior covariance of the inducing values   |
| `Kuf`    | `[M N]` | cross covariance to the rows              |
| `kff`    | `[N]`   | prior variance of each row                |
| `Y`      | `[N P]` | targets less the prior mean               |
| `noise`  | `[]`/`[N]` | noise variance, shared or one a row    |

`Kuu` and `Kuf` may carry leading batch axes, one element a subset; M = 0 is the empty subset.
"""

from winnowgp.bounds.collapsed import (
    Subset,
    collapsed_bound,
    collapsed_posterior,
    masked_blocks,
    masked_bound,
    subset_blocks,
    tighter_bound,
    weight_correction,
)
from winnowgp.bounds.evidence import exact_log_marginal, upper_bound
from winnowgp.bounds.gplvm import (
    ObservedColumns,
    gplvm_bound,
    gplvm_moments,
    latent_kl,
    latent_posterior,
    whitening_factor,
)
from winnowgp.bounds.moments import (
    KernelChunk,
    Moments,
    chunked_moments,
    moment_bound,
    moment_posterior,
    moment_upper_bound,
    prior_moments,
)
from winnowgp.bounds.psi import ExpectedKernel, LinearPsi, Psi, RBFPsi, pair_weights
from winnowgp.bounds.row_blocks import (
    ChunkedKernel,
    RowBlock,
    RowBlocks,
    Sums,
    WhitenedChunk,
    WhitenedChunks,
    add_product,
    pairwise_sum,
    rbf_features,
)
from winnowgp.bounds.sites import Sites, SiteSums, site_gradient, site_moments, site_sums
from winnowgp.bounds.two_pass import BoundGradient, ChunkedMean, evidence_gradient, two_pass_bound
from winnowgp.bounds.uncollapsed import (
    gaussian_expected_log_prob,
    marginals,
    masked_marginal,
    subset_marginal,
    uncollapsed_bound,
    whitened_kl,
)

__all__ = [
    "BoundGradient",
    "ChunkedKernel",
    "ChunkedMean",
    "ExpectedKernel",
    "KernelChunk",
    "LinearPsi",
    "Moments",
    "ObservedColumns",
    "Psi",
    "RBFPsi",
    "RowBlock",
    "RowBlocks",
    "SiteSums",
    "Sites",
    "Subset",
    "Sums",
    "WhitenedChunk",
    "WhitenedChunks",
    "add_product",
    "chunked_moments",
    "collapsed_bound",
    "collapsed_posterior",
    "evidence_gradient",
    "exact_log_marginal",
    "gaussian_expected_log_prob",
    "gplvm_bound",
    "gplvm_moments",
    "latent_kl",
    "latent_posterior",
    "marginals",
    "masked_blocks",
    "masked_bound",
    "masked_marginal",
    "moment_bound",
    "moment_posterior",
    "moment_upper_bound",
    "pair_weights",
    "pairwise_sum",
    "prior_moments",
    "rbf_features",
    "site_gradient",
    "site_moments",
    "site_sums",
    "subset_blocks",
    "subset_marginal",
    "tighter_bound",
    "two_pass_bound",
    "uncollapsed_bound",
    "upper_bound",
    "weight_correction",
    "whitened_kl",
    "whitening_factor",
]
