"""Bounds and predictions of GPyTorch at given parameters, for `benchmarks/agreement.py`.

    python gpytorch_agreement.py cases.npz rows.jsonl --dtype float64

GPyTorch has no upper bound on the evidence. By default its SGPR adds k_ii − q_ii to the variance of
each training row when it predicts (`sgpr_diagonal_correction`): the posterior of FITC, not the one
whose bound was maximised. The variant does not.
"""

from agreement_rows import SMALL_JITTER, Case, Quantities, main, use_one_cpu_thread

use_one_cpu_thread()

import warnings
from collections.abc import Callable
from contextlib import ExitStack

import gpytorch
import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import InducingPointKernel, Kernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from torch import Tensor


class Regression(gpytorch.models.ExactGP):
    """An exact GP; SGPR if the kernel has inducing points."""

    def __init__(
        self, X: Tensor, y: Tensor, kernel: Kernel, likelihood: GaussianLikelihood
    ) -> None:
        super().__init__(X, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = kernel

    def forward(self, X: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(X), self.covar_module(X))


class SVGP(gpytorch.models.ApproximateGP):
    """A whitened SVGP."""

    def __init__(self, Z: Tensor, kernel: Kernel) -> None:
        q = gpytorch.variational.CholeskyVariationalDistribution(len(Z))
        super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = kernel

    def forward(self, X: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(X), self.covar_module(X))


def quantities(case: Case, dtype: str, variant: str) -> Quantities:
    """Return the quantities of ExactGP, SGPR (`InducingPointKernel`) and SVGP.

    The jitter is absolute: added where a factorisation fails, and always in SVGP.
    """
    X, y, Z, X_test, q_mean, q_factor = map(
        torch.from_numpy, (case.X, case.y, case.Z, case.X_test, case.q_mean, case.q_factor)
    )

    def kernel() -> Kernel:
        result = ScaleKernel(RBFKernel(ard_num_dims=X.shape[1])).to(X)
        # A Python number would be rounded to float32.
        result.outputscale = torch.from_numpy(case.variance)
        result.base_kernel.lengthscale = torch.from_numpy(case.lengthscales)
        return result

    def likelihood() -> GaussianLikelihood:
        result = GaussianLikelihood(noise_constraint=Positive()).to(X)
        result.noise = torch.from_numpy(case.noise)
        return result

    def regression(*, sparse: bool) -> Regression:
        noise = likelihood()
        prior = InducingPointKernel(kernel(), Z.clone(), noise) if sparse else kernel()
        return Regression(X, y, prior, noise).to(X)

    def evidence(model: Regression) -> Tensor:
        model.train()
        return len(y) * ExactMarginalLogLikelihood(model.likelihood, model)(model(X), y)

    def svgp() -> SVGP:
        model = SVGP(Z.clone(), kernel()).to(X)
        q = model.variational_strategy._variational_distribution
        q.variational_mean.data.copy_(q_mean)
        q.chol_variational_covar.data.copy_(q_factor)
        # Otherwise the first call replaces q(u) by the prior.
        model.variational_strategy.variational_params_initialized.fill_(1)
        return model

    def uncollapsed() -> Tensor:
        model = svgp().train()
        bound = VariationalELBO(likelihood().train(), model, num_data=len(y))
        return len(y) * bound(model(X), y)

    def predicted(model: torch.nn.Module, moment: str) -> Tensor:
        return getattr(model.eval()(X_test), moment)

    def with_jitter(evaluate: Callable[[], Tensor]) -> Callable[[], object]:
        def call() -> object:
            settings = gpytorch.settings
            with ExitStack() as stack, warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                # Computed by Cholesky, whatever the number of rows.
                stack.enter_context(settings.max_cholesky_size(len(X) + 1))
                if variant:
                    jitter = case.small_jitter
                    stack.enter_context(settings.sgpr_diagonal_correction(False))
                    for setting in (settings.cholesky_jitter, settings.variational_cholesky_jitter):
                        stack.enter_context(setting(float_value=jitter, double_value=jitter))
                return evaluate().numpy()

        return call

    functions: dict[str, Callable[[], Tensor]] = {
        "collapsed bound": lambda: evidence(regression(sparse=True)),
        "uncollapsed bound": uncollapsed,
        "exact evidence": lambda: evidence(regression(sparse=False)),
        "collapsed mean": lambda: predicted(regression(sparse=True), "mean"),
        "collapsed variance": lambda: predicted(regression(sparse=True), "variance"),
        "uncollapsed mean": lambda: predicted(svgp(), "mean"),
        "uncollapsed variance": lambda: predicted(svgp(), "variance"),
    }
    return {name: with_jitter(function) for name, function in functions.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    variant = f"{SMALL_JITTER}, no diagonal correction"
    main("GPyTorch", gpytorch.__version__, quantities, variant=variant)
