"""Bounds and predictions of GPflow at given parameters, for `benchmarks/agreement.py`.

python gpflow_agreement.py cases.npz rows.jsonl --dtype float64
"""

from agreement_rows import Case, Quantities, main, use_one_cpu_thread

use_one_cpu_thread()

import gpflow
import numpy as np

JITTER = gpflow.config.default_jitter()


def quantities(case: Case, dtype: str, variant: str) -> Quantities:
    """Return the quantities of GPR, SGPR and SVGP. The jitter is absolute and always added."""
    gpflow.config.set_default_float(np.dtype(dtype).type)
    gpflow.config.set_default_jitter(case.small_jitter if variant else JITTER)
    kernel = gpflow.kernels.SquaredExponential(case.variance, case.lengthscales)
    # The default transform excludes noise variances up to 1e-6.
    data, noise = (case.X, case.y[:, None]), float(case.noise)
    sgpr = gpflow.models.SGPR(data, kernel, case.Z, noise_variance=noise)
    svgp = gpflow.models.SVGP(
        kernel,
        gpflow.likelihoods.Gaussian(noise),
        case.Z,
        q_mu=case.q_mean[:, None],
        q_sqrt=case.q_factor[None],
        whiten=True,
    )
    return {
        "collapsed bound": sgpr.elbo,
        "upper bound": sgpr.upper_bound,
        "uncollapsed bound": lambda: svgp.elbo(data),
        "exact evidence": gpflow.models.GPR(
            data, kernel, noise_variance=noise
        ).log_marginal_likelihood,
        "collapsed mean": lambda: sgpr.predict_f(case.X_test)[0],
        "collapsed variance": lambda: sgpr.predict_f(case.X_test)[1],
        "uncollapsed mean": lambda: svgp.predict_f(case.X_test)[0],
        "uncollapsed variance": lambda: svgp.predict_f(case.X_test)[1],
    }


if __name__ == "__main__":
    main("GPflow", gpflow.__version__, quantities)
