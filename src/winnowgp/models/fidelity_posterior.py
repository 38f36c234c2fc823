"""Predictions of functions that were observed at several fidelities, which a column names.

Every prediction is a mixture of S Gaussians: over the hyper-parameters, which few rows of a high
fidelity leave uncertain, and for a nonlinear relation also over the values of the lower fidelity.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import torch
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float, Int
from torch import Tensor, nn

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.models.mixture import GaussianMixture
from winnowgp.models.multi_output_posterior import MultiOutputPosterior, ProcessMixture
from winnowgp.models.observations import LEAST_NOISE, Prediction, gaussian_noise, target_noise
from winnowgp.models.quadrature import standard_deviation

Update: TypeAlias = Callable[
    [MultiOutputPosterior | ProcessMixture, Dataset], MultiOutputPosterior | ProcessMixture
]
"""A function that returns a posterior after more rows."""

# Gaussians of the mixture that predicts a nonlinear relation.
_COMPONENTS = 64


class FidelityModel(GaussianMixture):
    """The base class of posteriors that predict each row at the fidelity in one of its columns.

    Args:
        column: the column of the inputs that is the fidelity.
        levels: values of this column, in ascending order.
    """

    levels: Tensor

    def __init__(self, *, column: int, levels: Float[Tensor, " F"]) -> None:
        super().__init__()
        self.column = column
        self.register_buffer("levels", levels.detach().clone())

    @property
    @abstractmethod
    def modes(self) -> list[MultiOutputPosterior]:
        """Posteriors at the fitted hyper-parameters."""

    @property
    @abstractmethod
    def likelihood(self) -> Likelihood:
        """Gaussian noise with a variance for each fidelity."""

    @abstractmethod
    def updated(self, data: Dataset, update: Update) -> "FidelityModel":
        """Return the posterior whose functions have learnt from more rows of any fidelity.

        Args:
            data: the rows, whose inputs have the column of the fidelity.
            update: returns the posterior of a function after rows of its fidelity.
        """

    def condition_on(self, data: Dataset) -> "FidelityModel":
        """Return the posterior after more rows of any fidelity, with the same inducing points."""
        return self.updated(data, lambda function, rows: function.condition_on(rows))

    @abstractmethod
    def _components(
        self, inputs: Float[Tensor, "N d"], level: int, *, observed: bool
    ) -> tuple[Float[Tensor, "S N"], Float[Tensor, "S N"]]:
        """Return means and variances of the Gaussians of rows of one fidelity."""

    @property
    def Z(self) -> Float[Tensor, "M _"]:
        """Inducing points of the first process."""
        return self.modes[0].inducing_points[0]

    @property
    def M(self) -> int:
        """Number of inducing points of all processes."""
        return sum(mode.M for mode in self.modes)

    @property
    def P(self) -> int:
        """Number of targets, which is one."""
        return 1

    def component_predictions(
        self,
        X: Float[Tensor, "N D"],
        *,
        observed: bool = False,
        noise: Float[Tensor, "N 1"] | None = None,
    ) -> Prediction:
        """Return means and variances of the Gaussians of each row at its fidelity, `[S N 1]`."""
        inputs, level = self._divided(X)
        mean = X.new_zeros(len(self.component_weights), len(X))
        variance = torch.zeros_like(mean)
        for each in level.unique().tolist():
            rows = level[:, 0] == each
            mean[:, rows], variance[:, rows] = self._components(
                inputs[rows], each, observed=observed
            )
        variance = variance[..., None]
        return Prediction(mean[..., None], variance if noise is None else variance + noise)

    def _divided(self, X: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N d"], Int[Tensor, "N 1"]]:
        """Return the other columns, and the index of each row's fidelity."""
        values = X[:, self.column].contiguous()
        level = torch.searchsorted(self.levels, values).clamp_max(len(self.levels) - 1)
        unknown = values[self.levels[level] != values]
        if len(unknown):
            raise InputError(
                f"`X` must have one of the fidelities {self.levels.tolist()} in column "
                f"{self.column}; got {unknown[0].item():g}."
            )
        others = [d for d in range(X.shape[1]) if d != self.column]
        return X[:, others], level[:, None]


@final
class FidelityPosterior(FidelityModel):
    """Fidelities that are linear combinations of processes (Kennedy and O'Hagan 2000).

    Args:
        function: the posterior of all fidelities, one target each, or a mixture of them.
        column: the column of the inputs that is the fidelity.
        levels: values of this column, in ascending order, one for each target of `function`.
    """

    def __init__(
        self,
        function: MultiOutputPosterior | ProcessMixture,
        *,
        column: int,
        levels: Float[Tensor, " F"],
    ) -> None:
        super().__init__(column=column, levels=levels)
        self.function: MultiOutputPosterior | ProcessMixture = function

    @property
    def modes(self) -> list[MultiOutputPosterior]:
        """The posterior at the fitted hyper-parameters."""
        function = self.function
        return [function.mode if isinstance(function, ProcessMixture) else function]

    @property
    def likelihood(self) -> Likelihood:
        """Gaussian noise with a variance for each fidelity."""
        return self.modes[0].likelihood

    @property
    def component_weights(self) -> Float[Tensor, " S"]:
        """Weights of the members of a mixture; one without."""
        if isinstance(self.function, ProcessMixture):
            return self.function.member_weights
        return self.function.mixing.new_ones(1)

    def updated(self, data: Dataset, update: Update) -> "FidelityPosterior":
        """Return the posterior whose function has learnt from more rows of any fidelity."""
        inputs, level = self._divided(data.X)
        Y = data.Y.new_full((data.N, len(self.levels)), torch.nan).scatter(1, level, data.Y)
        noise = None if data.noise is None else data.noise.expand(Y.shape)
        function = update(self.function, Dataset(inputs, Y, data.weights, noise))
        return FidelityPosterior(function, column=self.column, levels=self.levels)

    def _components(
        self, inputs: Float[Tensor, "N d"], level: int, *, observed: bool
    ) -> tuple[Float[Tensor, "S N"], Float[Tensor, "S N"]]:
        function = self.function
        members = function.members if isinstance(function, ProcessMixture) else [function]
        each = [member.predict(inputs, observed=observed) for member in members]
        means, variances = ([getattr(y, n)[:, level] for y in each] for n in ("mean", "variance"))
        return torch.stack(means), torch.stack(variances)


@final
class NonlinearFidelityPosterior(FidelityModel):
    """Fidelities that are functions of the lower ones (after Perdikaris et al. 2017).

        f_0 = g_0(x),   f_t = g_t(x, f_0(x), …, f_{t−1}(x))

    The values of lower fidelities are uncertain, and g_t is not linear in them: predictions are
    mixtures of 64 Gaussians. Each follows one value of every lower fidelity upwards, and draws the
    hyper-parameters of every g_t from its mixture. The draws are quasi-random (Sobol) and the same
    for every row and call.

    Args:
        functions: g_t of each fidelity, for targets that were standardised fidelity by fidelity;
            the last t input columns of g_t are the standardised f_0, …, f_{t−1}. Functions with one
            such column have f_{t−1} alone.
        column: the column of the inputs that is the fidelity.
        levels: values of this column, in ascending order, one for each function.
        shift: subtracted from the targets of each fidelity.
        scale: by which they were then divided.
    """

    shift: Tensor
    scale: Tensor
    uniform: Tensor

    def __init__(
        self,
        functions: Sequence[ProcessMixture],
        *,
        column: int,
        levels: Float[Tensor, " F"],
        shift: Float[Tensor, " F"],
        scale: Float[Tensor, " F"],
    ) -> None:
        super().__init__(column=column, levels=levels)
        self._functions = nn.ModuleList(functions)
        self.register_buffer("shift", shift.detach().clone())
        self.register_buffer("scale", scale.detach().clone())
        # Of each fidelity a uniform number for the member and one for its value.
        engine = torch.quasirandom.SobolEngine(2 * len(functions), scramble=True, seed=0)
        tiny = torch.finfo(torch.float32).eps
        uniform = engine.draw(_COMPONENTS).clamp(tiny, 1 - tiny)
        self.register_buffer("uniform", uniform.to(shift), persistent=False)

    @property
    def functions(self) -> list[ProcessMixture]:
        """The function g_t of each fidelity."""
        return [each for each in self._functions if isinstance(each, ProcessMixture)]

    @property
    def modes(self) -> list[MultiOutputPosterior]:
        """The posterior of each g_t at its fitted hyper-parameters."""
        return [each.mode for each in self.functions]

    @property
    def likelihood(self) -> Likelihood:
        """Gaussian noise with a variance for each fidelity, of at least 2e-6."""
        noise = torch.cat([target_noise(mode.likelihood) for mode in self.modes])
        return gaussian_noise((noise * self.scale.square()).clamp_min(2 * LEAST_NOISE))

    @property
    def component_weights(self) -> Float[Tensor, " S"]:
        """Equal weights."""
        return self.shift.new_full((_COMPONENTS,), 1 / _COMPONENTS)

    def updated(self, data: Dataset, update: Update) -> "NonlinearFidelityPosterior":
        """Return the posterior whose functions have learnt from more rows of any fidelity.

        Rows update the function of their own fidelity, from the lowest upwards, at the means of the
        fidelities below. What higher fidelities learnt from earlier rows stays as it was.
        """
        inputs, level = self._divided(data.X)
        functions = self.functions
        for t in range(len(functions)):
            rows = level[:, 0] == t
            if not bool(rows.any()):
                continue
            X = chain_inputs(functions[:t], inputs[rows])
            Y = (data.Y[rows] - self.shift[t]) / self.scale[t]
            noise = None if data.noise is None else data.noise[rows] / self.scale[t].square()
            weights = None if data.weights is None else data.weights[rows]
            changed = update(functions[t], Dataset(X, Y, weights, noise))
            assert isinstance(changed, ProcessMixture)
            functions[t] = changed
        return NonlinearFidelityPosterior(
            functions, column=self.column, levels=self.levels, shift=self.shift, scale=self.scale
        )

    def _components(
        self, inputs: Float[Tensor, "N d"], level: int, *, observed: bool
    ) -> tuple[Float[Tensor, "S N"], Float[Tensor, "S N"]]:
        functions = self.functions[: level + 1]
        mean, variance = _followed(functions, inputs, self.uniform, observed=observed)[-1]
        scale = self.scale[level]
        return scale * mean + self.shift[level], scale.square() * variance


@torch.no_grad()
def chain_inputs(
    functions: Sequence[ProcessMixture], X: Float[Tensor, "N d"]
) -> Float[Tensor, "N _"]:
    """Return the inputs of the next fidelity: X and the means of all functions below.

    Args:
        functions: the functions g_t of all lower fidelities; X is returned if there are none.
    """
    if not functions:
        return X
    below = NonlinearFidelityPosterior(
        functions,
        column=0,
        levels=torch.arange(len(functions)).to(X),
        shift=X.new_zeros(len(functions)),
        scale=X.new_ones(len(functions)),
    )
    each = _followed(functions, X, below.uniform, observed=False)
    return torch.cat([X, *(mean.mean(0)[:, None] for mean, _ in each)], 1)


def _followed(
    functions: Sequence[ProcessMixture],
    X: Float[Tensor, "N d"],
    uniform: Float[Tensor, "S U"],
    *,
    observed: bool,
) -> list[tuple[Float[Tensor, "S N"], Float[Tensor, "S N"]]]:
    """Return means and variances of each function, along S values of the ones before.

    Args:
        uniform: numbers that choose members, one column for each function, and then values.
        observed: whether those of the last function are of observations.
    """
    S, N = len(uniform), len(X)
    values: list[Tensor] = []
    results: list[tuple[Tensor, Tensor]] = []
    for t, function in enumerate(functions):
        if t:
            mean, variance = results[-1]
            normal = torch.special.ndtri(uniform[:, uniform.shape[1] // 2 + t - 1])
            values.append(mean + standard_deviation(variance) * normal[:, None])
        # Functions of earlier versions have the next lower fidelity only.
        below = function.mode.inducing_points[0].shape[1] - X.shape[1]
        lower = [f[..., None] for f in values[len(values) - below :]]
        inputs = torch.cat([X.expand(S, -1, -1), *lower], 2)
        member = function.member_of(uniform[:, t])
        mean, variance = X.new_zeros(S, N), X.new_zeros(S, N)
        for number in member.unique().tolist():
            own = member == number
            # Without a lower fidelity the rows of all draws are equal.
            rows = inputs[own] if t else X[None]
            noisy = observed and t == len(functions) - 1
            y = function.members[number].predict(rows.flatten(0, 1), observed=noisy)
            mean[own], variance[own] = y.mean.view(-1, N), y.variance.view(-1, N)
        results.append((mean, variance))
    return results
