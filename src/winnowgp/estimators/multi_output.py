"""Regression of several targets, and by a sum of effects.

Both fit a `winnowgp.models.MultiOutputGP`: the mixing matrix of several targets is learnt, and that
of a sum of effects has ones. `winnowgp.estimators.fidelity` has that of several fidelities.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, ScaleKernel
from torch import Tensor

from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.base import documented
from winnowgp.estimators.kernels import ComposedKernel, parse_kernel
from winnowgp.estimators.processes import ProcessEstimator

# Processes of many targets, if their number is not given.
_PROCESSES = 6


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class MultiOutputGPRegressor(ProcessEstimator):
    """Regression of several targets as combinations of processes with inducing points of their own.

    Target p is Σ_q W_pq f_q(x) plus noise. A smooth process needs few inducing points and a rough
    one many: one search over the candidates of all processes allocates them. Targets may be missing
    (NaN) in some rows, and are then predicted from the others too. Inputs and targets are
    standardised internally. `SparseGPRegressor` fits several targets with one kernel and one set of
    inducing points for all of them.

    Args:
        n_latents: number of processes Q; by default one per target, at most six. A process that is
            not needed has no inducing points.
        mixing: "lmc" learns the mixing matrix (linear model of coregionalisation; ICM of rank one
            with one process). "independent" has one process per target and the identity.

    >>> import numpy as np
    >>> X = np.linspace(0, 6, 40)[:, None]
    >>> Y = np.column_stack([np.sin(X[:, 0]), 1 - 2 * np.sin(X[:, 0])])
    >>> model = MultiOutputGPRegressor(n_latents=1, random_state=0).fit(X, Y)
    >>> model.mixing_.shape, len(model.n_inducing_)
    ((2, 1), 1)
    """

    n_latents: int | None = None
    mixing: str = "lmc"

    _several_targets: ClassVar[bool] = True

    _constraints: ClassVar[Mapping[str, validation.Constraint]] = {
        **ProcessEstimator._constraints,
        "n_latents": validation.optional(validation.integer),
        "mixing": validation.one_of("lmc", "independent"),
    }

    def _check_combination(self, params: validation.Parameters) -> None:
        if params.mixing == "independent" and params.n_latents is not None:
            raise InputError(
                "`n_latents` is for `mixing='lmc'`; independent targets have one process each; got "
                f"{self.n_latents!r}. Leave it out."
            )

    def _mixing(self, params: validation.Parameters, P: int) -> tuple[Tensor, Tensor]:
        if params.mixing == "independent":
            return torch.eye(P), torch.zeros(P, P, dtype=torch.bool)
        Q = params.n_latents or min(P, _PROCESSES)
        # No column is zero: the bound has no gradient there.
        return torch.eye(P)[:, torch.arange(Q) % P], torch.ones(P, Q, dtype=torch.bool)

    def _kernels(self, params: validation.Parameters, D: int, Q: int) -> list[Kernel]:
        kernels = super()._kernels(params, D, Q)
        for kernel in kernels if params.mixing == "lmc" else ():
            if isinstance(kernel, ScaleKernel):
                # The mixing matrix has the variances.
                kernel.raw_outputscale.requires_grad_(False)
        return kernels


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class AdditiveGPRegressor(ProcessEstimator):
    """Regression by a sum of effects, each with a band and inducing points of its own.

    Every term of the kernel is a process. A sum of kernels in `SparseGPRegressor` is the same prior
    with one set of inducing points, which must resolve all terms together; here an effect of one
    column has points along this column only.

    Args:
        kernel: a sum such as "rbf[0] + periodic[1]" or "rbf[size] + rbf[age] + linear" (see
            `winnowgp.estimators.kernels`), or a GPyTorch `AdditiveKernel`.

    Attributes:
        terms_: the terms of the kernel, strings if it is one.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(size=(60, 2))
    >>> y = np.sin(6 * X[:, 0]) + X[:, 1]
    >>> model = AdditiveGPRegressor(kernel="rbf[0] + rbf[1]", random_state=0).fit(X, y)
    >>> model.predict_terms(X).shape, len(model.n_inducing_)
    ((60, 2), 2)
    """

    kernel: Any = "rbf + linear"

    def predict_terms(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of each effect, `[N Q]`, and on request its standard deviation.

        The mean of `predict` is their sum plus the mean of the training targets. A constant may be
        part of any effect, so that the band of an effect includes the uncertainty of its level.

        Args:
            X: inputs `[N D]`.
            return_std: whether to return the standard deviations as well.
        """
        mean, sd = self.predict_processes(X, return_std=True)
        scale = self._y_scaler.columns.scale.numpy()
        return (scale * mean, scale * sd) if return_std else scale * mean

    @property
    def terms_(self) -> list[Any]:
        """The terms of the kernel."""
        if isinstance(self.kernel, str):
            names = [str(name) for name in getattr(self, "feature_names_in_", ())]
            columns = {name: [number] for number, name in enumerate(names)}
            parsed = parse_kernel(self.kernel, self.n_features_in_, columns=columns)
            assert isinstance(parsed, ComposedKernel)
            return [term.text(columns) for term in parsed.operands]
        return list(self.kernels_)

    def _check_columns(self, params: validation.Parameters, D: int) -> None:
        super()._check_columns(params, D)
        expression = params.kernel
        is_sum = isinstance(expression, ComposedKernel) and expression.is_sum
        if not is_sum and not isinstance(expression, AdditiveKernel):
            raise InputError(
                "`kernel` must be a sum, each term of which is an effect, such as "
                f"'rbf[0] + rbf[1]'; got {self.kernel!r}. Use `SparseGPRegressor` for one term."
            )

    def _mixing(self, params: validation.Parameters, P: int) -> tuple[Tensor, Tensor]:
        whole = params.kernel
        Q = len(whole.operands if isinstance(whole, ComposedKernel) else whole.kernels)
        return torch.ones(1, Q), torch.zeros(1, Q, dtype=torch.bool)

    def _kernels(self, params: validation.Parameters, D: int, Q: int) -> list[Kernel]:
        (whole,) = super()._kernels(params, D, 1)
        assert isinstance(whole, AdditiveKernel)
        return [kernel for kernel in whole.kernels if isinstance(kernel, Kernel)]
