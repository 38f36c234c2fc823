"""Bounds and predictions of GPJax at given parameters, for `benchmarks/agreement.py`.

    python gpjax_agreement.py cases.npz rows.jsonl --dtype float64

GPJax has no upper bound on the evidence.
"""

from agreement_rows import Case, Quantities, main, use_one_cpu_thread

use_one_cpu_thread()

from importlib.metadata import version

import gpjax
import jax
import jax.numpy as jnp
from gpjax.variational_families import CollapsedVariationalGaussian, WhitenedVariationalGaussian

JITTER = 1e-6


def quantities(case: Case, dtype: str, variant: str) -> Quantities:
    """Return the quantities of both sparse families and of the exact posterior.

    The jitter is absolute and always added. It is 1e-6 in both types by default.
    """
    jax.config.update("jax_enable_x64", dtype == "float64")
    X, y, Z, X_test, q_mean, q_factor = (
        jnp.asarray(a) for a in (case.X, case.y, case.Z, case.X_test, case.q_mean, case.q_factor)
    )
    data = gpjax.Dataset(X=X, y=y[:, None])
    kernel = gpjax.kernels.RBF(
        lengthscale=jnp.asarray(case.lengthscales), variance=jnp.asarray(case.variance)
    )
    prior = gpjax.gps.Prior(
        mean_function=gpjax.mean_functions.Zero(),
        kernel=kernel,
        jitter=case.small_jitter if variant else JITTER,
    )
    model = prior * gpjax.likelihoods.Gaussian(obs_stddev=jnp.sqrt(jnp.asarray(case.noise)))
    collapsed = CollapsedVariationalGaussian(model=model, inducing_inputs=Z)
    whitened = WhitenedVariationalGaussian(
        model=model,
        inducing_inputs=Z,
        variational_mean=q_mean[:, None],
        variational_root_covariance=q_factor,
    )

    def predicted(family: CollapsedVariationalGaussian | WhitenedVariationalGaussian):
        return family.condition(data)(X_test, covariance="diagonal")

    return {
        "collapsed bound": lambda: gpjax.objectives.collapsed_elbo(collapsed, data),
        "uncollapsed bound": lambda: gpjax.objectives.elbo(whitened, data),
        "exact evidence": lambda: gpjax.objectives.conjugate_mll(model, data),
        "collapsed mean": lambda: predicted(collapsed).mean,
        "collapsed variance": lambda: predicted(collapsed).variance,
        "uncollapsed mean": lambda: predicted(whitened).mean,
        "uncollapsed variance": lambda: predicted(whitened).variance,
    }


if __name__ == "__main__":
    main("GPJax", version("gpjax"), quantities)
