"""The Bayesian GP-LVM."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_array
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from winnowgp import training
from winnowgp.data import MaskedMatrix, Source, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators import validation
from winnowgp.estimators.base import BaseGP, cpu_frontier, documented, goal_within, most_points
from winnowgp.estimators.gplvm_initialization import (
    initial_gplvm,
    is_closed_form,
    latent_kernel,
    relevance,
)
from winnowgp.estimators.rows import dates_as_days, explained_inputs, tensor
from winnowgp.models.gplvm import LatentModel
from winnowgp.models.likelihoods import has_noise
from winnowgp.models.observations import fill_with_observed
from winnowgp.report.summary import counted
from winnowgp.training.fast_gplvm import LatentPositions, infer_latents

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Passes over the rows of the paper's schedule, if the user does not give their number.
PASSES = 300
# Number of training rows at whose positions the inference of a new row may start.
_ANCHORS = 1000
# In standard deviations of the prior; rows closer to its centre than this carry no information.
_COLLAPSED = 1e-3

_CANDIDATES = partial(validation.locations, options=("auto",))
_START = partial(validation.locations, options=("pca",))


@final
@documented
@dataclass(kw_only=True, eq=False, repr=False)
class GPLVM(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseGP):
    """Bayesian Gaussian process latent variable model that selects the number of inducing points.

    Every column of a table is a smooth function of a few latent variables per row, which have the
    prior N(0, I). The result is a nonlinear embedding of the rows, with uncertainty. Columns are
    standardised internally; arguments and attributes are in your own units. Missing entries are
    NaN, in training and in new rows. Constant columns carry no information: they are left out of
    the model, and reconstructed by their constant.

    The number of inducing points is set by `tolerance` (the default), by `max_points`, by both
    together, or by a number for `alpha`.

    Args:
        n_components: number of latent dimensions. If there are more than needed, `relevance_` shows
            which ones matter.
        kernel: "rbf", "linear", "matern12", "matern32", "matern52", or a GPyTorch kernel. The first
            two have closed-form expectations, which the fast schedule needs.
        likelihood: "gaussian", "student-t", "laplace", "poisson", or a GPyTorch likelihood with one
            latent function per column. All but the Gaussian need the paper's schedule. A GPyTorch
            `GaussianLikelihood` sets the initial (standardised) noise and whether it is learnt.
        noise: "shared" for one Gaussian noise variance, "column" for one per column.
        alpha: strength of the paper's prior exp(−alpha · M²) on M inducing points; larger values
            select fewer. "auto" derives it from `tolerance`.
        tolerance: largest ELBO gap relative to more inducing points, in nats per observed entry;
            0.01 by default, unless another parameter sets their number.
        max_points: largest number of inducing points; with a `tolerance` fewer are selected if
            they are within it.
        candidates: "auto", or locations in latent space `[K n_components]`.
        move_candidates: whether the locations of the candidates are optimised.
        n_candidates: number of candidates, and largest number of inducing points. By default 100,
            without a limit on the inducing points of the fast schedule.
        start: "pca" for principal components, or initial latent positions of the rows,
            `[N n_components]`.
        standardise: whether columns are scaled to unit variance. Columns are always centred, except
            for likelihoods without noise.
        schedule: "fast"; or "paper", which optimises everything jointly by Adam, with the point
            process active throughout (needs a number for `alpha`).
        max_iter: largest number of iterations of the fast schedule's last L-BFGS run, 300 by
            default; earlier runs have a third of it.
        epochs: number of passes over the rows of the paper's schedule; 300 by default.
        batch_size: rows per step of the paper's schedule; all rows by default.

    Attributes:
        embedding_: mean latent positions of the training rows, `[N n_components]`.
        embedding_std_: standard deviations of these positions, `[N n_components]`.
        relevance_: relevance of each dimension, 1 for the most relevant: squared inverse
            lengthscales, or the variances of a linear kernel.
        n_inducing_: number of inducing points M.
        inducing_points_: their locations in latent space, `[M n_components]`.
        inclusion_: inclusion probability of each candidate in the last selection, `[K]`.
        candidates_: locations of these candidates, `[K n_components]`.
        alpha_: strength of the prior that selects this number of inducing points.
        frontier_: best ELBO for each number of inducing points; None with the paper's schedule.
        elbo_: lower bound on the log evidence of the (standardised) table, in nats.
        elbo_gap_: nats per observed entry by which the ELBO is below the best one seen with more
            inducing points.
        noise_: noise variance of each column (squared scale of Student's t and Laplace) in its
            squared units; NaN if the likelihood has none.
        kernel_: the fitted kernel.
        n_iter_: number of L-BFGS iterations or Adam steps.
        posterior_: the posterior for standardised columns, which also infers positions of new rows.

    >>> angle = np.linspace(0, 3, 40)
    >>> Y = np.stack([np.sin(angle), np.cos(angle), angle], axis=1)
    >>> Y += 0.05 * np.random.default_rng(0).normal(size=Y.shape)
    >>> model = GPLVM(n_components=1, random_state=0).fit(Y)
    >>> bool(abs(np.corrcoef(model.embedding_[:, 0], angle)[0, 1]) > 0.97)
    True
    """

    n_components: int = field(default=2, kw_only=False)
    kernel: str | Kernel = "rbf"
    likelihood: str | Likelihood = "gaussian"
    noise: str = "shared"
    alpha: str | float = "auto"
    max_points: int | None = None
    candidates: str | ArrayLike = "auto"
    move_candidates: bool = True
    n_candidates: int | None = None
    start: str | ArrayLike = "pca"
    standardise: bool = True
    max_iter: int | None = None
    epochs: int | None = None

    _constraints: ClassVar[Mapping[str, validation.Constraint]] = {
        **validation.PARAMETERS,
        "candidates": partial(_CANDIDATES, shape=("K", "Q")),
        "epochs": validation.optional(validation.integer),
        "noise": validation.one_of("shared", "column"),
        "start": partial(_START, shape=("N", "Q")),
        "tolerance": validation.optional(
            partial(validation.positive_number, hint="It is in nats per observed entry.")
        ),
    }

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn the embedding, and select inducing points.

        Args:
            X: the table `[N P]`, NaN where an entry is missing.
            y: ignored.
        """
        params = self._validate()
        raw = MaskedMatrix.of(_checked_table(self, X, reset=True))
        _START("start", params.start, shape=(raw.N, params.n_components))
        varies = _varying_columns(raw) | (not has_noise(params.likelihood))
        scaler = self._scaler(raw, params.likelihood)
        table = MaskedMatrix(scaler.forward(raw.Y), raw.observed & varies)
        counter = _StepCounter(("optimisation", "inclusion"))
        params.callbacks = (counter, *params.callbacks)
        identity = {"X": raw.Y, "observed": raw.observed}
        result = self._train(table, params, identity=identity)
        self._varies, self._x_scaler = varies, scaler
        self.n_iter_ = counter.count
        self._set_fitted(result, table.count)
        self._set_embedding(result.model.cpu(), table, params.generator)
        return self

    def fit_transform(self, X: Any, y: Any = None, **fit_params: Any) -> NDArray[np.float64]:
        """Fit the model to a table and return the positions of its rows, `embedding_`."""
        return self.fit(X, y, **fit_params).embedding_.copy()

    def transform(self, X: Any) -> NDArray[np.float64]:
        """Return the latent positions of new rows, the means of q(x), inferred row by row.

        Args:
            X: rows `[N P]`, NaN where an entry is missing.
        """
        return self._positions(self._table(X)).mean.numpy()

    def predicting_on(self, device: str) -> Self:
        """Raise an `InputError`: a GPLVM infers positions and predicts on the CPU."""
        raise InputError(
            f"a GPLVM infers positions and predicts on the CPU; got `predicting_on({device!r})`. "
            "Call `transform` and `inverse_transform` of the fitted model itself."
        )

    def inverse_transform(self, X: Any) -> NDArray[np.float64]:
        """Return the expected row of the table at each latent position.

        Args:
            X: latent positions `[N n_components]`.
        """
        check_is_fitted(self)
        positions = check_array(X, dtype="float64")
        Q = self.embedding_.shape[1]
        if positions.shape[1] != Q:
            raise InputError(
                f"`X` must have {Q} columns, one per latent dimension; got {positions.shape[1]}."
            )
        with torch.no_grad():
            expected = self.posterior_.function.predict(tensor(positions), observed=True).mean
        return self._x_scaler.inverse(expected).numpy()

    def reconstruct(
        self, X: Any, return_std: bool = False
    ) -> NDArray[np.float64] | tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the expected value of each entry of some rows, given their observed entries.

        Args:
            X: rows `[N P]`, NaN where an entry is missing.
            return_std: whether to return the standard deviation of each entry as well.
        """
        q = self._positions(self._table(X))
        with torch.no_grad():
            prediction = self.posterior_.predict(q.mean, q.variance, observed=True)
        mean = self._x_scaler.inverse(prediction.mean).numpy()
        if not return_std:
            return mean
        sd = prediction.variance.sqrt() * self._x_scaler.scale * self._varies
        return mean, sd.numpy()

    def log_density(self, X: Any, *, given: Any) -> NDArray[np.float64]:
        """Return the log density of each entry, given other entries of the same rows, in nats.

        It is NaN for missing entries, and for columns that were constant in training.

        Args:
            X: entries to be scored `[N P]`.
            given: known entries `[N P]`, NaN elsewhere.
        """
        table, known = self._table(X), self._table(given)
        if table.N != known.N:
            raise InputError(
                f"`given` must have as many rows as `X`: `X` has {table.N} rows and `given` "
                f"{known.N}."
            )
        q = self._positions(known)
        nats = self.posterior_.log_density(fill_with_observed(table), q.mean, q.variance)
        nats = nats - self._x_scaler.scale.log()
        return torch.where(table.observed, nats, torch.nan).numpy()

    def score_samples(self, X: Any) -> NDArray[np.float64]:
        """Return a lower bound on the log density of each row's observed entries, in nats."""
        table = self._table(X)
        scale = (table.observed * self._x_scaler.scale.log()).sum(1)
        return (self._positions(table).nats - scale).numpy()

    def score(self, X: Any, y: Any = None) -> float:
        """Return the mean of `score_samples`, in nats per row; larger is better."""
        del y
        return float(self.score_samples(X).mean())

    def plot(self, labels: Sequence[Any] | None = None, *, ax: Axes | None = None) -> Axes:
        """Plot the embedding in its two most relevant dimensions, with the inducing points.

        Args:
            labels: a label for each training row, which sets its colour.
            ax: axes to draw on; by default those of a new figure.
        """
        from matplotlib.figure import Figure

        from winnowgp.plots.latent import LatentMap, draw_latent_map

        check_is_fitted(self)
        if self.embedding_.shape[1] < 2:
            raise InputError("`n_components` must be at least 2 for a plot; got 1.")
        first, second = np.argsort(-self.relevance_, kind="stable")[:2]
        dims = [int(first), int(second)]
        embedding = LatentMap(
            title=counted(self.n_inducing_),
            latents=tensor(self.embedding_[:, dims]),
            deviation=tensor(self.embedding_std_[:, dims]),
            candidates=tensor(self.candidates_[:, dims]),
            inclusion=tensor(self.inclusion_),
        )
        names = None if labels is None else [str(label) for label in labels]
        drawn = draw_latent_map(embedding, names, ax=Figure().subplots() if ax is None else ax)
        dimensions = self.get_feature_names_out()
        drawn.set(xlabel=dimensions[first], ylabel=dimensions[second])
        if labels is not None:
            drawn.legend(fontsize="small", markerscale=2)
        return drawn

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    @property
    def _n_features_out(self) -> int:
        return self.embedding_.shape[1]

    def _check_combination(self, params: validation.Parameters) -> None:
        params.named_kernel = isinstance(self.kernel, str)
        params.named_likelihood = isinstance(self.likelihood, str)
        params.kernel = latent_kernel(params.kernel, params.n_components)
        _CANDIDATES("candidates", params.candidates, shape=("K", params.n_components))
        if params.noise == "column" and not isinstance(params.likelihood, GaussianLikelihood):
            raise InputError(
                "`noise` must be 'shared' unless the likelihood is Gaussian; got 'column' with "
                f"{type(params.likelihood).__name__}."
            )
        validation.refuse_other_schedule(
            params, fast={"max_iter": None}, paper={"batch_size": None, "epochs": None}
        )
        if params.schedule == "paper":
            validation.refuse_count_of_given(params)
            return
        if not is_closed_form(params):
            raise InputError(
                "`schedule='fast'` needs Gaussian noise and an RBF or linear kernel; use "
                "`schedule='paper'` and a number for `alpha`, such as 1.0."
            )

    def _check_columns(self, params: validation.Parameters, D: int) -> None:
        """Do nothing: no parameter depends on the number of columns."""

    def _initial_model(self, data: MaskedMatrix, params: validation.Parameters) -> LatentModel:
        return initial_gplvm(data, params)

    def _training_schedule(
        self, model: LatentModel, data: MaskedMatrix, params: validation.Parameters
    ) -> training.Schedule:
        del model
        if params.schedule == "paper":
            steps = (params.epochs or PASSES) * max(1, data.N // (params.batch_size or data.N))
            return training.PaperSchedule(params.alpha, joint=steps, batch_size=params.batch_size)
        return training.FastSchedule(
            goal_within(params, most_points(params)),
            n_candidates=params.n_candidates,
            iterations=params.max_iter,
        )

    def _set_fitted(self, result: training.FitResult[Any], observations: float) -> None:
        selection, function = result.selection, result.posterior.cpu().function
        self.posterior_ = result.posterior
        self.kernel_ = function.kernel
        self.relevance_ = relevance(self.kernel_, function.Z.shape[1])
        self.n_inducing_ = function.M
        self.inducing_points_ = function.Z.numpy()
        self.candidates_ = result.candidates[0].cpu().numpy()
        self.inclusion_ = selection.inclusion.cpu().numpy()
        self.alpha_ = selection.alpha
        self.frontier_ = cpu_frontier(selection.frontier)
        self.elbo_ = result.elbo
        self.elbo_gap_ = result.elbo_gap / observations
        self.noise_ = self._noise(len(self._varies))

    def _set_embedding(
        self, model: LatentModel, table: MaskedMatrix, generator: torch.Generator
    ) -> None:
        """Infer the latent positions of the training rows as those of new rows are inferred."""
        latents = model.latents
        order = torch.randperm(table.N, generator=generator, device=generator.device)
        chosen = order[:_ANCHORS].sort().values.cpu()
        self._anchors = latents.mean.detach()[chosen], latents.variance.detach()[chosen]
        q = self._positions(table)
        self.embedding_ = q.mean.numpy()
        self.embedding_std_ = q.variance.sqrt().numpy()
        if np.abs(self.embedding_).max() < _COLLAPSED:
            warnings.warn(
                "the latent positions of all rows are 0: noise alone explains this table better "
                "than any embedding that was found. Try other `n_components`, a `start`, or more "
                "columns.",
                stacklevel=3,
            )

    def _noise(self, P: int) -> NDArray[np.float64]:
        likelihood = self.posterior_.function.likelihood
        if not has_noise(likelihood):
            return np.full(P, np.nan)
        return (likelihood.noise.expand(P) * self._x_scaler.scale.square() * self._varies).numpy()

    def _scaler(self, raw: MaskedMatrix, likelihood: Likelihood) -> Standardiser:
        if not has_noise(likelihood):
            return Standardiser.none(raw.Y)
        scaler = Standardiser.of_entries(raw)
        if self.standardise:
            return scaler
        return Standardiser(scaler.shift, scaler.scale.new_ones(raw.P))

    def _table(self, X: Any) -> MaskedMatrix:
        """Validate rows, and standardise them."""
        check_is_fitted(self)
        Y = _checked_table(self, X, reset=False)
        return MaskedMatrix(self._x_scaler.forward(Y), ~torch.isnan(Y) & self._varies)

    def _positions(self, table: MaskedMatrix) -> LatentPositions:
        """Infer q(x) of each row."""
        return infer_latents(self.posterior_.row_elbo(table), anchors=self._anchors)


@final
class _StepCounter:
    """A callback that counts the steps of some phases, over all runs of a resumed fit."""

    def __init__(self, phases: tuple[str, ...]) -> None:
        self._phases, self.count = phases, 0

    def __call__(self, progress: training.Progress) -> None:
        self.count += progress.phase in self._phases

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def _checked_table(estimator: Any, X: Any, *, reset: bool) -> Float[Tensor, "N P"]:
    """Validate a table in which entries may be missing.

    Args:
        reset: whether to set the estimator's columns and require two rows, as `fit` does; else the
            columns must be those of the fit.
    """
    if isinstance(X, Source):
        raise InputError(
            f"`X` must be a table [N P]; got a {type(X).__name__}. GPLVM does not support "
            "out-of-core or shared sources; pass an array in memory."
        )
    X = dates_as_days(X)
    with explained_inputs(X):
        valid = validate_data(
            estimator,
            X,
            dtype=np.float64,
            ensure_all_finite="allow-nan",
            ensure_min_samples=2 if reset else 1,
            reset=reset,
        )
    return tensor(valid)


def _varying_columns(raw: MaskedMatrix) -> Bool[Tensor, " P"]:
    """Return which columns of a table take more than one value.

    Raises:
        InputError: a column has no observed entry, or none varies.
    """
    empty = torch.nonzero(~raw.observed.any(0))[:, 0].tolist()
    if empty:
        raise InputError(
            f"every column of `X` must have an observed entry; columns {empty[:10]} have none. "
            "Remove them."
        )
    low = torch.where(raw.observed, raw.Y, torch.inf).amin(0)
    high = torch.where(raw.observed, raw.Y, -torch.inf).amax(0)
    if not bool((low < high).any()):
        raise InputError("at least one column of `X` must vary; all of them are constant.")
    return low < high
