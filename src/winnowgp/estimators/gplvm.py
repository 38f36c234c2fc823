"""The Bayesian GP-LVM for scikit-learn."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_array
from sklearn.utils.validation import check_is_fitted

from winnowgp.data import MaskedMatrix, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators.gplvm_parameters import LatentRequest, relevance
from winnowgp.estimators.validation import (
    Folder,
    checked_table,
    checkpoint_of,
    drawn_seed,
    has_noise,
    open_checkpoint_log,
    tensor,
    varying_columns,
)
from winnowgp.io import save
from winnowgp.models.likelihoods import fill_with_observed
from winnowgp.training import Callbacks, FitResult, Progress, fit
from winnowgp.training.callbacks import as_callbacks
from winnowgp.training.latent_inference import LatentPositions, infer_latents

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# How many steps a fit took.


@final
class CountedSteps:
    """A callback that counts the steps of some phases."""

    def __init__(self, phases: tuple[str, ...]) -> None:
        self._phases = phases
        self.count = 0

    def __call__(self, progress: Progress) -> None:
        """Count the step if its phase is one of those."""
        self.count += progress.phase in self._phases

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count."""
        self.count = state["count"]


# Dimensionality reduction for people who know scikit-learn.


# Training rows that a new row may start at.
ANCHORS = 1000
# Standard deviations of the prior; rows closer to its centre than this are all in one place.
NOWHERE = 1e-3


@final
class GPLVM(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A map of the rows of a table, with uncertainty, that decides how many inducing points it
    needs.

    The Bayesian Gaussian-process latent-variable model: every column is a smooth function of a few
    unknown inputs a row, which have a prior N(0, I). Columns are standardised inside; what you see
    is in your own units. Missing entries are NaN, in training and in new rows. Columns that never
    vary say nothing of a row: they are left out, and come back as they are.

    Args:
        n_components: latent dimensions. With more than needed, `relevance_` says which matter.
        kernel: "rbf", "linear", "matern12", "matern32", "matern52", or a GPyTorch kernel. The first
            two have closed forms, which the fast schedule needs.
        likelihood: "gaussian", "student-t", "laplace", "poisson", or a GPyTorch likelihood of one
            latent function a column. All but the Gaussian need the paper's schedule. A Gaussian
            one that is given says where its noise, in standard units, starts and if it is learnt.
        noise: "shared" for one Gaussian noise variance, "column" for one a column.
        alpha: "auto", or the strength of the paper's prior exp(−alpha · M²) on M points.
        tolerance: nats per observed entry that may be given up relative to more points.
        max_points: most points.
        candidates: "auto", or where points may be in latent space, `[K n_components]`.
        move_candidates: whether points may move away from given candidates.
        n_candidates: how many points to choose from; 100.
        start: "pca", or where rows start in latent space, `[N n_components]`.
        standardise: whether columns are scaled to unit variance; they are centred in any case,
            except under likelihoods without noise.
        schedule: "fast", or "paper": everything jointly by Adam, the point process on throughout
            (needs a number for `alpha`).
        max_iter: most L-BFGS iterations of the fast schedule's last climb; earlier ones have a
            third.
        epochs: passes over the rows of the paper's schedule.
        batch_size: rows a step of the paper's schedule looks at; all of them if not given.
        random_state: a seed or RandomState; the same seed gives the same fit.
        callbacks: None, a function called with the `winnowgp.training.Progress` of every step, or a
            sequence of such functions.
        checkpoint: a folder, or a `Checkpoint`, in which the fit writes down how far it has come.
            Run again with the same one after it was killed, it goes on to the same answer.

    Attributes:
        embedding_: where the training rows are, `[N n_components]`.
        embedding_std_: how sure that is, `[N n_components]`.
        relevance_: relevance of each dimension, 1 for the most relevant: squared inverse
            lengthscales, or variances of a linear kernel.
        n_inducing_: number of points kept.
        inducing_points_: where they are in latent space, `[M n_components]`.
        inclusion_: probability of each candidate of the last choice, `[K]`.
        candidates_: where those candidates are, `[K n_components]`.
        alpha_: strength of the prior that keeps this many points.
        frontier_: best bound for each number of points; None with the paper's schedule.
        elbo_: lower bound on the log evidence of the (standardised) table, in nats.
        elbo_gap_: nats per observed entry below the best bound seen with more points.
        noise_: noise of each column in its own squared units: the variance, or the squared scale of
            Student-t and Laplace; NaN if there is none.
        kernel_: the fitted kernel.
        n_iter_: steps of L-BFGS or Adam taken.
        posterior_: predictor of standardised columns, and placer of new rows.

    >>> angle = np.linspace(0, 3, 40)
    >>> Y = np.stack([np.sin(angle), np.cos(angle), angle], axis=1)
    >>> Y += 0.05 * np.random.default_rng(0).normal(size=Y.shape)
    >>> model = GPLVM(n_components=1, random_state=0).fit(Y)
    >>> bool(abs(np.corrcoef(model.embedding_[:, 0], angle)[0, 1]) > 0.97)
    True
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        kernel: str | Kernel = "rbf",
        likelihood: str | Likelihood = "gaussian",
        noise: str = "shared",
        alpha: str | float = "auto",
        tolerance: float = 0.01,
        max_points: int | None = None,
        candidates: str | ArrayLike = "auto",
        move_candidates: bool = True,
        n_candidates: int = 100,
        start: str | ArrayLike = "pca",
        standardise: bool = True,
        schedule: str = "fast",
        max_iter: int = 300,
        epochs: int = 300,
        batch_size: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        callbacks: Callbacks = None,
        checkpoint: Folder | None = None,
    ) -> None:
        self.n_components = n_components
        self.kernel = kernel
        self.likelihood = likelihood
        self.noise = noise
        self.alpha = alpha
        self.tolerance = tolerance
        self.max_points = max_points
        self.candidates = candidates
        self.move_candidates = move_candidates
        self.n_candidates = n_candidates
        self.start = start
        self.standardise = standardise
        self.schedule = schedule
        self.max_iter = max_iter
        self.epochs = epochs
        self.batch_size = batch_size
        self.random_state = random_state
        self.callbacks = callbacks
        self.checkpoint = checkpoint

    def fit(self, X: Any, y: Any = None) -> "GPLVM":
        """Learn the map, and which candidates to keep.

        Args:
            X: the table `[N P]`, NaN where an entry is missing.
            y: ignored.
        """
        raw = MaskedMatrix.of(checked_table(self, X, reset=True))
        checkpoint = checkpoint_of(self.checkpoint)
        checkpoint_log = open_checkpoint_log(self, checkpoint, X=raw.Y, observed=raw.observed)
        seed = drawn_seed(self.random_state, checkpoint_log)
        generator = torch.Generator().manual_seed(seed)
        request = self._request()
        varies = varying_columns(raw) | (not has_noise(request.likelihood))
        units = self._units_of(raw, request.likelihood)
        table = MaskedMatrix(units.forward(raw.Y), raw.observed & varies)
        model = request.model(table, raw, generator=generator)
        counted = CountedSteps(("optimisation", "inclusion"))
        fitted = fit(
            model,
            table,
            schedule=request.plan(table.N),
            generator=generator,
            callbacks=(counted, *as_callbacks(self.callbacks)),
            checkpoint=checkpoint_log,
        )
        self._varies, self._units = varies, units
        self.n_iter_ = counted.count
        self._keep(fitted, table, generator)
        checkpoint_log.finish()
        return self

    def fit_transform(self, X: Any, y: Any = None, **fit_params: Any) -> NDArray[np.float64]:
        """Where the rows are after a fit to them, `embedding_`."""
        return self.fit(X, y, **fit_params).embedding_.copy()

    def transform(self, X: Any) -> NDArray[np.float64]:
        """Where new rows are: the means of q(x), each row infer_latents on its own.

        Args:
            X: rows `[N P]`, NaN where an entry is missing.
        """
        return self._placed(self._table(X)).mean.numpy()

    def inverse_transform(self, X: Any) -> NDArray[np.float64]:
        """The expected row of the table at each place `[N n_components]`."""
        check_is_fitted(self)
        at = check_array(X, dtype="float64")
        Q = self.embedding_.shape[1]
        if at.shape[1] != Q:
            raise InputError(
                f"`X` must have {Q} columns, one a latent dimension; got {at.shape[1]}."
            )
        with torch.no_grad():
            expected = self.posterior_.function.predict(tensor(at), observed=True).mean
        return self._units.inverse(expected).numpy()

    def reconstruct(
        self, X: Any, return_std: bool = False
    ) -> NDArray[np.float64] | tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What each entry of some rows is expected to be, missing or not, given what is there.

        Args:
            X: rows `[N P]`, NaN where an entry is missing.
            return_std: whether to return the standard deviation of each entry as well.
        """
        at = self._placed(self._table(X))
        with torch.no_grad():
            found = self.posterior_.predict(at.mean, at.variance, observed=True)
        mean = self._units.inverse(found.mean).numpy()
        if not return_std:
            return mean
        return mean, (found.variance.sqrt() * self._units.scale * self._varies).numpy()

    def log_density(self, X: Any, *, given: Any) -> NDArray[np.float64]:
        """Log density of each entry of `X`, given other entries of the same rows; NaN stays NaN.

        Columns that never varied have no density: NaN too.

        Args:
            X: entries to be scored `[N P]`.
            given: entries that are known `[N P]`, NaN elsewhere.
        """
        table, known = self._table(X), self._table(given)
        if table.N != known.N:
            raise InputError(f"`X` has {table.N} rows and `given` {known.N}; pair them.")
        at = self._placed(known)
        nats = self.posterior_.log_density(fill_with_observed(table), at.mean, at.variance)
        nats = nats - self._units.scale.log()
        return torch.where(table.observed, nats, torch.nan).numpy()

    def score_samples(self, X: Any) -> NDArray[np.float64]:
        """A lower bound on the log density of each row's observed entries, in nats."""
        table = self._table(X)
        units = (table.observed * self._units.scale.log()).sum(1)
        return (self._placed(table).nats - units).numpy()

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of `score_samples`: nats a row, larger is better."""
        return float(self.score_samples(X).mean())

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to a file that `winnowgp.load` reads.

        It holds the places of all training rows, 16 · N · n_components bytes; the rest grows with
        the number of points.
        """
        return save(self, path)

    def plot(self, labels: Sequence[Any] | None = None, *, ax: Axes | None = None) -> Axes:
        """The map in its two most relevant dimensions, with uncertainty and inducing points.

        Args:
            labels: a word for each training row, which decides its colour.
            ax: where to draw; a new figure if not given.
        """
        from matplotlib.figure import Figure

        from winnowgp.plots import LatentMap, draw_latent_map

        check_is_fitted(self)
        if self.embedding_.shape[1] < 2:
            raise InputError("a map needs `n_components` of at least 2; got 1.")
        first, second = np.argsort(-self.relevance_, kind="stable")[:2]
        dims = [int(first), int(second)]
        found = LatentMap(
            title=f"{self.n_inducing_} inducing points",
            latents=tensor(self.embedding_[:, dims]),
            deviation=tensor(self.embedding_std_[:, dims]),
            candidates=tensor(self.candidates_[:, dims]),
            inclusion=tensor(self.inclusion_),
        )
        words = None if labels is None else [str(label) for label in labels]
        drawn = draw_latent_map(found, words, ax=Figure().subplots() if ax is None else ax)
        names = self.get_feature_names_out()
        drawn.set(xlabel=names[first], ylabel=names[second])
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

    def _units_of(self, raw: MaskedMatrix, likelihood: Likelihood) -> Standardiser:
        if not has_noise(likelihood):
            return Standardiser.none(raw.Y)
        units = Standardiser.of_entries(raw)
        return units if self.standardise else Standardiser(units.shift, units.scale.new_ones(raw.P))

    def _request(self) -> LatentRequest:
        return LatentRequest.checked(
            n_components=self.n_components,
            kernel=self.kernel,
            likelihood=self.likelihood,
            noise=self.noise,
            alpha=self.alpha,
            tolerance=self.tolerance,
            max_points=self.max_points,
            candidates=self.candidates,
            move_candidates=self.move_candidates,
            n_candidates=self.n_candidates,
            start=self.start,
            schedule=self.schedule,
            max_iter=self.max_iter,
            epochs=self.epochs,
            batch_size=self.batch_size,
        )

    def _keep(self, fitted: FitResult, table: MaskedMatrix, generator: torch.Generator) -> None:
        """What was learnt."""
        latents, posterior = fitted.model.latents, fitted.posterior
        chosen = torch.randperm(table.N, generator=generator)[:ANCHORS].sort().values
        self._anchors = latents.mean.detach()[chosen], latents.variance.detach()[chosen]
        self.posterior_ = posterior
        self.kernel_ = posterior.function.kernel
        self.relevance_ = relevance(self.kernel_, latents.Q)
        self.n_inducing_ = posterior.function.M
        self.inducing_points_ = posterior.function.Z.numpy()
        self.candidates_ = fitted.candidates[0].numpy()
        self.inclusion_ = fitted.selection.inclusion.numpy()
        self.alpha_ = fitted.selection.alpha
        self.frontier_ = fitted.selection.frontier
        self.elbo_ = fitted.elbo
        self.elbo_gap_ = fitted.elbo_gap / table.count
        self.noise_ = self._noise(table.P)
        found = self._placed(table)
        self.embedding_ = found.mean.numpy()
        self.embedding_std_ = found.variance.sqrt().numpy()
        if np.abs(self.embedding_).max() < NOWHERE:
            warnings.warn(
                "every row was placed at 0: noise alone explains this table better than any map "
                "that was found. Try other `n_components`, a `start`, or more columns.",
                stacklevel=3,
            )

    def _noise(self, P: int) -> NDArray[np.float64]:
        likelihood = self.posterior_.function.likelihood
        if not has_noise(likelihood):
            return np.full(P, np.nan)
        return (likelihood.noise.expand(P) * self._units.scale.square() * self._varies).numpy()

    def _table(self, X: Any) -> MaskedMatrix:
        """Checked rows in standard units."""
        check_is_fitted(self)
        Y = checked_table(self, X, reset=False)
        return MaskedMatrix(self._units.forward(Y), ~torch.isnan(Y) & self._varies)

    def _placed(self, table: MaskedMatrix) -> LatentPositions:
        return infer_latents(self.posterior_.row_elbo(table), anchors=self._anchors)
