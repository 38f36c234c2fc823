"""GPflow's SGPR, fitted by L-BFGS for each number of inducing points: one JSON row per fit.

A zero-mean GP with an ARD squared-exponential kernel and Gaussian noise. Inputs and target are
standardised on the training rows; kernel variance, lengthscales and noise start at 1 (a noise of
0.1 or 0.01 ended no higher in a trial on concrete and energy). Hyper-parameters and inducing
locations move jointly until SciPy's L-BFGS-B stops by its default tolerances or at `--maxiter`.

    python gpflow_sgpr.py --data-dir DIR --dataset concrete --start kmeans --out results.jsonl
"""

from sweeps import STARTS, Problem, parser_of, sweep

# isort: split
# The number of threads is set.
import os
import time

import numpy as np

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import gpflow
import tensorflow as tf
from scipy.optimize import OptimizeResult


def test_scores(model: gpflow.models.SGPR, problem: Problem) -> dict[str, float]:
    """RMSE and mean log density of the test rows, in the target's own units."""
    mean, variance = (moment.numpy()[:, 0] for moment in model.predict_y(problem.X_test))
    return problem.scores(mean, variance)


def fit(problem: Problem, *, M: int, start: str, seed: int, noise: float, maxiter: int) -> dict:
    """Fit one model and describe it; a failed factorisation gives a row with `error`.

    `seconds` covers the choice of the start, graph compilation and optimisation;
    `start_seconds` and `compile_seconds` are parts of it. `cpu_seconds` is the process's own
    time over the same span, which other load on the machine hardly changes. `curve` holds the CPU
    seconds and the bound after each iteration.
    """
    row: dict = {"initial_noise": noise}
    wall, cpu = time.perf_counter(), time.process_time()
    Z = STARTS[start](problem.X, M, seed=seed)
    row["start_seconds"] = time.perf_counter() - wall
    model = gpflow.models.SGPR(
        data=(problem.X, problem.y[:, None]),
        kernel=gpflow.kernels.SquaredExponential(lengthscales=np.ones(problem.X.shape[1])),
        inducing_variable=Z,
        noise_variance=noise,
    )
    optimizer = gpflow.optimizers.Scipy()
    variables = model.trainable_variables
    try:
        # The optimiser caches the compiled graph, so `minimize` does not compile a second time.
        compiling = time.perf_counter()
        evaluate = optimizer.eval_func(model.training_loss, variables, tf_fun_args={})
        evaluate(optimizer.initial_parameters(variables).numpy())
        row["compile_seconds"] = time.perf_counter() - compiling
        curve = []

        def record(intermediate_result: OptimizeResult) -> None:
            curve.append((time.process_time() - cpu, -float(intermediate_result.fun)))

        result = optimizer.minimize(
            model.training_loss,
            variables,
            options={"maxiter": maxiter, "maxfun": 10 * maxiter},
            callback=record,
        )
        row |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        row |= {"elbo": float(model.elbo()), "curve": curve, **test_scores(model, problem)}
    except tf.errors.InvalidArgumentError as failure:
        row |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        return row | {"error": failure.message.splitlines()[0]}
    return row | {
        "n_iterations": int(result.nit),
        "n_evaluations": int(result.nfev),
        "converged": bool(result.success),
        "message": str(result.message),
        "noise": float(model.likelihood.variance.numpy()),
        "kernel_variance": float(model.kernel.variance.numpy()),
        "lengthscales": model.kernel.lengthscales.numpy().tolist(),
    }


def main() -> None:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--noise", type=float, default=1.0, help="initial noise variance")
    parser.add_argument("--maxiter", type=int, default=2000)
    arguments = parser.parse_args()
    own = {"noise": arguments.noise, "maxiter": arguments.maxiter}
    sweep(arguments, "gpflow-sgpr", gpflow.__version__, fit, **own)


if __name__ == "__main__":
    main()
