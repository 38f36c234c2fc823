"""Time of predictions from GPflow's cached posteriors: one JSON object per line.

    python gpflow_predict.py --points 64 --inputs 8 --rows 10000,1 --repeats 20

SGPR and SVGP with M points, their `posterior()` computed once, `predict_f` compiled as GPflow's own
guide to faster predictions does. Times do not depend on what was learnt, so nothing is.
"""

import argparse
import json
import os
import time

# Thread counts are read when the libraries load, so they have to be set before the imports.
for _variable in (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import gpflow
import numpy as np
import tensorflow as tf


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--points", type=int, required=True)
    parser.add_argument("--kernel", choices=("rbf", "matern32"), default="rbf")
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    D, M = arguments.inputs, arguments.points
    X = rng.normal(size=(2000, D))
    y = np.sin(X[:, :1]) + 0.1 * rng.normal(size=(2000, 1))
    kernels = {"rbf": gpflow.kernels.SquaredExponential, "matern32": gpflow.kernels.Matern32}
    kernel = kernels[arguments.kernel](lengthscales=np.full(D, 2.0))
    models = {
        "GPflow SGPR": gpflow.models.SGPR((X, y), kernel, X[:M], noise_variance=0.1),
        "GPflow SVGP": gpflow.models.SVGP(kernel, gpflow.likelihoods.Gaussian(0.1), X[:M]),
    }
    for peer, model in models.items():
        posterior = model.posterior()
        compiled = tf.function(posterior.predict_f, reduce_retracing=True)
        for rows in map(int, arguments.rows.split(",")):
            new = tf.constant(rng.normal(size=(rows, D)))
            compiled(new)
            wall, cpu = [], []
            for _ in range(arguments.repeats if rows > 1 else 20 * arguments.repeats):
                starts = time.perf_counter(), time.process_time()
                mean, variance = compiled(new)
                mean.numpy(), variance.numpy()
                wall.append(time.perf_counter() - starts[0])
                cpu.append(time.process_time() - starts[1])
            row = {"peer": peer, "M": M, "rows": rows, "wall_s": min(wall), "cpu_s": min(cpu)}
            print(json.dumps({**row, "version": gpflow.__version__}), flush=True)


if __name__ == "__main__":
    main()
