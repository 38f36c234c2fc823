"""Regression of observations of several fidelities: a linear or a nonlinear relation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from winnowgp.bounds.evidence import Evidence
from winnowgp.data import Dataset, Source, Standardiser
from winnowgp.errors import InputError, UnavailableAttributeError
from winnowgp.estimators import validation
from winnowgp.estimators.base import cpu_scaler, documented
from winnowgp.estimators.kernels import (
    ComposedKernel,
    KernelExpression,
    NamedKernel,
)
from winnowgp.estimators.processes import ProcessEstimator
from winnowgp.estimators.selection import HYPER, resolve_hyper_by_rows
from winnowgp.models import MultiOutputPosterior
from winnowgp.models.fidelity_posterior import (
    FidelityModel,
    FidelityPosterior,
    NonlinearFidelityPosterior,
    chain_inputs,
)
from winnowgp.models.multi_output_posterior import ProcessMixture
from winnowgp.training import Checkpoint, FitResult
from winnowgp.training.laplace import process_members

# Fidelities at most.
_MOST_FIDELITIES = 20


def _gaussian_only(name: str, value: Any) -> Likelihood:
    """Validate the likelihood of a model whose noise must be Gaussian."""
    if value != "gaussian":
        raise InputError(
            f"`{name}` must be 'gaussian' for several fidelities; got {value!r}. Use "
            "`MultiOutputGPRegressor` with a target for each fidelity for other likelihoods."
        )
    return validation.likelihood_from("gaussian")


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class MultiFidelityGPRegressor(ProcessEstimator):
    """Regression of observations of several fidelities, the lower of which are cheaper.

    A column of `X` has the fidelity at which each row was observed, or is to be predicted. Each
    fidelity has inducing points and noise of its own.

    With a linear relation the function of a fidelity is a multiple of the lower ones plus a
    discrepancy (Kennedy and O'Hagan 2000): f_0 = δ_0, f_1 = ρ_10 δ_0 + δ_1,
    f_2 = ρ_20 δ_0 + ρ_21 δ_1 + δ_2. Each δ is a process, and all are fitted together. With a
    nonlinear one it is a function of the inputs and of the lower fidelities, plus a discrepancy
    (after Perdikaris et al. 2017): f_t = g_t(x, f_0(x), …, f_{t−1}(x)) + δ_t(x). Fidelities are
    fitted one after another from the lowest, at the means of those below; their uncertainty widens
    predictions, but does not enter the fit.

    Args:
        fidelity: the column of `X` that is the fidelity, by number or name; the last by default.
            Its values may be any numbers, larger ones are higher fidelities.
        relation: "linear", "nonlinear", or "auto": both are fitted, and the one with the higher
            ELBO − ½ k log N is kept, where k is its number of hyper-parameters (the Bayesian
            information criterion). It is linear where the nonlinear one has no kernel: with
            `widths`, or a GPyTorch kernel.
        kernel: a kernel string, with one lengthscale per column (see
            `winnowgp.estimators.kernels`), or for a linear relation a GPyTorch kernel: that of
            every δ. A nonlinear relation has the kernel
            linear[f_0] + … + linear[f_{t−1}] + k_x · rbf[f_{t−1}] + k_x.
        max_points: largest number of inducing points of all processes together; they are allocated
            where they gain most. For a nonlinear relation it is that of each fidelity. With a
            `tolerance` fewer are selected if they are within it.
        hyper: "laplace" averages predictions over the hyper-parameters, which few rows of a high
            fidelity leave uncertain, as in `SparseGPRegressor`; "point" takes the most probable
            ones, and "auto" averages with up to 500 rows. Predictions of a linear relation then
            take 16 times as long.
        likelihood: "gaussian", the only value.
        priors: "weak" adds priors of short lengthscales, kernel variances and noise; None adds
            none. The noise of a simulator is small: its prior has the mode 0.03, and that of the
            discrepancies makes irrelevant columns improbable.

    Attributes:
        fidelities_: values of the column of fidelities, in ascending order.
        relation_: "linear" or "nonlinear".
        rho_: the mixing of the discrepancies `[F F]`, a lower triangle with ones on its diagonal;
            for a linear relation.
        n_inducing_: number of inducing points of each fidelity, a tuple.
        inducing_points_: their locations, one array `[M D]` per fidelity.
        elbo_: lower bound on the log evidence of standardised targets, in nats.
        alpha_: strength of the prior that the selection implies; one for each fidelity for a
            nonlinear relation, and likewise `frontier_`.

    >>> x = np.linspace(0, 1, 30)
    >>> low, high = np.column_stack([x, 0 * x]), np.column_stack([x[::6], 0 * x[::6] + 1])
    >>> y = np.concatenate([np.sin(8 * x), 2 * np.sin(8 * x[::6]) + x[::6]])
    >>> model = MultiFidelityGPRegressor(relation="linear", hyper="point", random_state=0)
    >>> model = model.fit(np.concatenate([low, high]), y)
    >>> model.predict([[0.5, 1.0]]).round(1)
    array([-1.])
    """

    fidelity: int | str = -1
    relation: str = "auto"
    hyper: str = "auto"

    _noise_prior: ClassVar[tuple[float, float]] = (0.03, 1.5)

    _constraints: ClassVar[Mapping[str, validation.Constraint]] = {
        **ProcessEstimator._constraints,
        "fidelity": validation.column_or_name,
        "relation": validation.one_of("auto", "linear", "nonlinear"),
        "hyper": validation.one_of(*HYPER),
        "likelihood": _gaussian_only,
    }

    @property
    def fidelities_(self) -> np.ndarray[Any, Any]:
        """Values of the column of fidelities, in ascending order."""
        return self.posterior_.levels.numpy()

    @property
    def relation_(self) -> str:
        """The relation between the fidelities, "linear" or "nonlinear"."""
        nonlinear = isinstance(self.posterior_, NonlinearFidelityPosterior)
        return "nonlinear" if nonlinear else "linear"

    @property
    def rho_(self) -> np.ndarray[Any, Any]:
        """The mixing of the discrepancies `[F F]`."""
        return self._processes.mixing.numpy()

    def _check_columns(self, params: validation.Parameters, D: int) -> None:
        names = [str(name) for name in getattr(self, "feature_names_in_", ())]
        params.column = validation.column_number("fidelity", params.fidelity, names, D)
        if D < 2:
            raise InputError("`X` must have at least one column besides the fidelity; got one.")
        others = [d for d in range(D) if d != params.column]
        # Widths are columns of X; the processes see the columns without the fidelity.
        widths = [
            validation.column_number("widths", each, names, D) for each in params.widths or ()
        ]
        if params.column in widths:
            raise InputError(f"`widths` must not be the fidelity; got {self.widths!r}.")
        params.widths = [others.index(d) for d in widths]
        self._check_inputs(params, [names[d] for d in others] if names else (), D - 1)
        plain = isinstance(params.kernel, KernelExpression)
        if params.relation == "auto" and (widths or not plain):
            params.relation = "linear"
        if params.relation != "nonlinear":
            return
        if widths:
            raise InputError("`widths` are for `relation='linear'`; leave them out.")
        if not plain:
            raise InputError(
                "`kernel` must be a string such as 'rbf' for `relation='nonlinear'`, which has a "
                f"kernel of the lower fidelity too; got {self.kernel!r}."
            )

    def _check_targets(self, params: validation.Parameters, data: Source) -> None:
        super()._check_targets(params, data)
        rows = data.require_dataset("several fidelities")
        if (found := len(rows.X[:, params.column].unique())) > _MOST_FIDELITIES:
            raise InputError(
                f"`fidelity` must be a column of at most {_MOST_FIDELITIES} levels; got column "
                f"{params.column}, which has {found} different values. Name the column that says "
                "at which fidelity a row was observed."
            )
        resolve_hyper_by_rows(params, rows)

    def _fit(self, rows: Source, params: validation.Parameters) -> None:
        data = rows.require_dataset("several fidelities")
        levels, level = data.X[:, params.column].unique(return_inverse=True)
        others = [d for d in range(data.D) if d != params.column]
        inputs = replace(data, X=data.X[:, others])
        params.hyperparameters = 0
        if params.relation == "auto":
            self._fit_better(inputs, params, levels, level)
        elif params.relation == "linear":
            self._fit_joint(inputs, params, levels, level)
        else:
            self._fit_chain(inputs, params, levels, level)
        shift, scale = torch.zeros(data.D).double(), torch.ones(data.D).double()
        shift[others], scale[others] = self._x_scaler.shift, self._x_scaler.scale
        self._x_scaler = Standardiser(shift, scale)
        self._set_processes()

    def _fit_better(
        self, data: Dataset, params: validation.Parameters, levels: Tensor, level: Tensor
    ) -> None:
        """Fit both relations, and keep the better one by the Bayesian information criterion.

        The nonlinear relation has more hyper-parameters, which its ELBO has been maximised over.
        Those of kernels, mixing and noise count; shift and scale of the targets do not.
        """
        states = []
        for relation, fit in (("linear", self._fit_joint), ("nonlinear", self._fit_chain)):
            own = validation.Parameters(**vars(params) | {"relation": relation})
            own.checkpoint = _subfolder(params.checkpoint, relation)
            fit(data, own, levels, level)
            penalty = 0.5 * own.hyperparameters * log(data.observations)
            states.append((self.elbo_ - penalty, dict(vars(self))))
            if len(levels) == 1:
                break  # Both would be the same model.
        vars(self).update(max(states, key=lambda state: state[0])[1])

    def _fit_joint(
        self, data: Dataset, params: validation.Parameters, levels: Tensor, level: Tensor
    ) -> None:
        """Give each fidelity a target of its own, and train a model of all of them."""
        Y = torch.full((data.N, len(levels)), torch.nan, dtype=data.dtype)
        Y.scatter_(1, level[:, None], data.Y)
        noise = None if data.noise is None else data.noise.expand(Y.shape)
        super()._fit(replace(data, Y=Y, noise=noise), params)
        self.posterior_ = FidelityPosterior(self.posterior_, column=params.column, levels=levels)

    def _fit_chain(
        self, data: Dataset, params: validation.Parameters, levels: Tensor, level: Tensor
    ) -> None:
        """Train a model of each fidelity, whose inputs are X and the means of those below."""
        params.common_scaler = cpu_scaler(super()._input_scaler(data, params))
        checkpoint: Checkpoint | None = params.checkpoint
        functions: list[ProcessMixture] = []
        targets, fits = [], []
        for t in range(len(levels)):
            rows = data.part((level == t).nonzero().flatten())
            scaler = Standardiser.of(rows.Y, weights=rows.weights)
            X = chain_inputs(functions, params.common_scaler.forward(rows.X))
            noise = None if rows.noise is None else rows.noise / scaler.scale.square()
            params.checkpoint = _subfolder(checkpoint, f"fidelity-{t}")
            params.chained = bool(functions)
            super()._fit(Dataset(X, scaler.forward(rows.Y), rows.weights, noise), params)
            functions.append(self.posterior_)
            targets.append(scaler)
            fits.append({name: getattr(self, name) for name in _PER_FIDELITY})
        self._x_scaler = params.common_scaler
        self.posterior_ = NonlinearFidelityPosterior(
            functions,
            column=params.column,
            levels=levels,
            shift=torch.cat([scaler.shift for scaler in targets]),
            scale=torch.cat([scaler.scale for scaler in targets]),
        )
        for name in ("alpha_", "frontier_"):
            setattr(self, name, tuple(fit[name] for fit in fits))
        for name in ("candidates_", "inclusion_"):
            setattr(self, name, tuple(each for fit in fits for each in fit[name]))
        self.candidates_ = self._locations(tuple(map(torch.from_numpy, self.candidates_)))
        counts = [fit["frontier_"].N for fit in fits]
        pairs = list(zip(fits, counts, strict=True))
        # Of targets that were standardised together, as with a linear relation.
        units = sum(
            count * scaler.scale.log().item() for count, scaler in zip(counts, targets, strict=True)
        )
        self.elbo_ = sum(fit["elbo_"] for fit in fits) - units
        self.elbo_gap_ = sum(fit["elbo_gap_"] * count for fit, count in pairs) / sum(counts)
        evidences = [fit["evidence_"] for fit in fits]
        kinds = {each.method for each in evidences}
        self.evidence_ = Evidence(
            sum(each.lower for each in evidences) - units,
            sum(each.upper for each in evidences) - units,
            kinds.pop() if len(kinds) == 1 else "trace",
        )

    def _input_scaler(self, rows: Dataset, params: validation.Parameters) -> Standardiser:
        if params.relation == "linear":
            return super()._input_scaler(rows, params)
        # Inputs are standardised already, and so are the fidelities below.
        scale = params.common_scaler.scale
        params.kernel_scale = torch.cat([scale, scale.new_ones(rows.D - len(scale))])
        return Standardiser(torch.zeros(rows.D).double(), torch.ones(rows.D).double())

    def _mixing(self, params: validation.Parameters, P: int) -> tuple[Tensor, Tensor]:
        return torch.ones(P, P).tril(), torch.ones(P, P, dtype=torch.bool).tril(-1)

    def _kernels(self, params: validation.Parameters, D: int, Q: int) -> list[Kernel]:
        if params.relation == "linear" or not params.chained:
            return super()._kernels(params, D, Q)
        kernel = chain_kernel(params.kernel, len(params.common_scaler.scale), D)
        return super()._kernels(validation.Parameters(**vars(params) | {"kernel": kernel}), D, Q)

    def _may_be_irrelevant(self, params: validation.Parameters, process: int) -> bool:
        # Higher fidelities have few rows, and depend on what the lower ones depend on.
        return not (process if params.relation == "linear" else params.chained)

    def _after_training(
        self, result: FitResult[Any], data: Any, params: validation.Parameters
    ) -> FitResult[Any]:
        inducing = {id(candidates) for candidates in result.model.candidate_sets}
        learnt = [p for p in result.model.parameters() if p.requires_grad]
        params.hyperparameters += sum(p.numel() for p in learnt if id(p) not in inducing)
        if params.hyper == "laplace":
            members = process_members(result.model, data, generator=params.generator)
        elif params.relation == "nonlinear":
            members = [result.posterior]
        else:
            return result
        return replace(result, posterior=ProcessMixture(result.posterior, members))

    def _set_processes(self) -> None:
        modes = self._modes()
        self.kernels_ = tuple(kernel for mode in modes for kernel in mode.kernels)
        self.n_inducing_ = tuple(size for mode in modes for size in mode.sizes)
        self.inducing_points_ = self._locations(
            tuple(points for mode in modes for points in mode.inducing_points)
        )

    def _modes(self) -> list[MultiOutputPosterior]:
        """Return the posteriors at the fitted hyper-parameters, also during a fit."""
        posterior = self.posterior_
        if isinstance(posterior, FidelityModel):
            return posterior.modes
        return [posterior.mode if isinstance(posterior, ProcessMixture) else posterior]

    @property
    def _processes(self) -> MultiOutputPosterior:
        if isinstance(self.posterior_, NonlinearFidelityPosterior):
            raise UnavailableAttributeError(
                "the mixing and the processes of several fidelities need `relation='linear'`; this "
                "model has a nonlinear one. Fit again with a linear one."
            )
        return self._modes()[0]

    def _process_inputs(self, X: Any) -> Tensor:
        return self._inputs(X)[:, self._others()]

    def _others(self) -> list[int]:
        """Return the columns other than that of the fidelity."""
        return [d for d in range(self.n_features_in_) if d != self.posterior_.column]

    def _locations(self, points: tuple[Tensor, ...]) -> tuple[np.ndarray[Any, Any], ...]:
        scaler = self._x_scaler
        if len(scaler.shift) == self.n_features_in_ and isinstance(self.posterior_, FidelityModel):
            scaler = Standardiser(scaler.shift[self._others()], scaler.scale[self._others()])
        # Locations of a chain have the values of the lower fidelities as last columns.
        D = len(scaler.shift)
        return tuple(scaler.inverse(each.cpu().double()[:, :D]).numpy() for each in points)


# Attributes of the fit of one fidelity of a nonlinear relation.
_PER_FIDELITY = (
    "alpha_",
    "candidates_",
    "elbo_",
    "elbo_gap_",
    "evidence_",
    "frontier_",
    "inclusion_",
)


def _subfolder(checkpoint: Checkpoint | None, name: str) -> Checkpoint | None:
    """Return the checkpoint of a part of the fit."""
    if checkpoint is None:
        return None
    return Checkpoint(Path(checkpoint.folder) / name, checkpoint.every)


def chain_kernel(expression: KernelExpression, D: int, columns: int) -> KernelExpression:
    """Return the kernel of a fidelity given those below, which are the last of the columns.

    It is Σ_s linear[f_s] + k_x · rbf[f_{t−1}] + k_x with the kernel k_x of the inputs: multiples of
    the lower fidelities, a nonlinear function of the next one that may change with the inputs, and
    a discrepancy. The kernel k_x · (linear + rbf)[f_{t−1}] + k_x of Cutajar et al. (2019) has no
    constant multiples, and few rows do not tell that a slope is constant: on the functions of Park
    and Borehole its errors were 1.5 and 6 times as large. With a multiple of the next lower
    fidelity alone, errors on four designs of Branin's function, which has three, were 1.7 times as
    large.

    Args:
        expression: k_x.
        D: number of columns of the inputs.
        columns: number of all columns.

    >>> str(chain_kernel(NamedKernel("rbf", None, None), 2, 4))
    'linear[2] + linear[3] + rbf[0, 1] * rbf[3] + rbf[0, 1]'
    """
    inputs = _on_columns(expression, tuple(range(D)))
    linear = [NamedKernel("linear", (d,), None) for d in range(D, columns)]
    rbf = NamedKernel("rbf", (columns - 1,), None)
    return ComposedKernel(True, (*linear, ComposedKernel(False, (inputs, rbf)), inputs))


def _on_columns(expression: KernelExpression, columns: tuple[int, ...]) -> KernelExpression:
    """Return an expression whose kernels of all columns are kernels of these."""
    if isinstance(expression, ComposedKernel):
        operands = tuple(_on_columns(each, columns) for each in expression.operands)
        return replace(expression, operands=operands)
    return expression if expression.columns is not None else replace(expression, columns=columns)
