"""Dimensionality reduction for people who know scikit-learn."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags, check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from winnowgp.data import Entries, Standardiser
from winnowgp.errors import InputError
from winnowgp.estimators.arguments import positive, whole
from winnowgp.estimators.latent_start import (
    START_VARIANCE,
    awakened,
    latent_kernel,
    latent_rows,
    places,
    relevance,
    scaled,
)
from winnowgp.estimators.likelihoods import has_noise, likelihood_from
from winnowgp.estimators.tensors import tensor
from winnowgp.io import save
from winnowgp.models import (
    LatentModel,
    Latents,
    LatentVariableGP,
    SampledLatentGP,
    VariationalGP,
    gaussian_noise,
    has_psi,
    valid,
)
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import (
    FastLatent,
    FixedAlpha,
    Goal,
    JointLatent,
    LatentFit,
    LatentSchedule,
    MaxPoints,
    OnProgress,
    Places,
    Progress,
    Tolerance,
    fit_latent,
    placed,
    silent,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        on_progress: told of every step of the fit; see `winnowgp.training.Progress`.

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
        given_up_: nats per observed entry below the best bound seen with more points.
        noise_: noise variance of each column, in its own squared units; NaN if there is none.
        kernel_: the fitted kernel.
        n_iter_: steps of L-BFGS or Adam taken.
        posterior_: predictor of standardised columns, and placer of new rows.

    >>> angle = np.linspace(0, 3, 40)
    >>> Y = np.stack([np.sin(angle), np.cos(angle), angle], axis=1)
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
        on_progress: OnProgress = silent,
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
        self.on_progress = on_progress

    def fit(self, X: Any, y: Any = None) -> "GPLVM":
        """Learn the map, and which candidates to keep.

        Args:
            X: the table `[N P]`, NaN where an entry is missing.
            y: ignored.
        """
        X = validate_data(
            self, X, dtype=np.float64, ensure_all_finite="allow-nan", ensure_min_samples=2
        )
        raw = Entries.of(tensor(X))
        seed = int(check_random_state(self.random_state).randint(2**31))
        generator = torch.Generator().manual_seed(seed)
        likelihood = likelihood_from(self.likelihood)
        self._check(likelihood)
        self._varies = _varying(raw) | (not has_noise(likelihood))
        self._units = self._units_of(raw, likelihood)
        table = self._standardised(raw)
        model = self._model(table, raw, likelihood, generator)
        self.n_iter_ = 0

        def on_progress(progress: Progress) -> None:
            self.n_iter_ += progress.phase in ("move", "joint")
            self.on_progress(progress)

        fitted = fit_latent(
            model,
            table,
            schedule=self._plan(model.K),
            generator=generator,
            on_progress=on_progress,
        )
        self._keep(fitted, table, generator)
        return self

    def fit_transform(self, X: Any, y: Any = None, **fit_params: Any) -> NDArray[np.float64]:
        """Where the rows are after a fit to them, `embedding_`."""
        return self.fit(X).embedding_.copy()

    def transform(self, X: Any) -> NDArray[np.float64]:
        """Where new rows are: the means of q(x), each row placed on its own.

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
        nats = self.posterior_.log_density(valid(table), at.mean, at.variance)
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

    def _units_of(self, raw: Entries, likelihood: Likelihood) -> Standardiser:
        if not has_noise(likelihood):
            return Standardiser.none(raw.Y)
        units = Standardiser.of_entries(raw)
        return units if self.standardise else Standardiser(units.shift, units.scale.new_ones(raw.P))

    def _standardised(self, raw: Entries) -> Entries:
        return Entries(self._units.forward(raw.Y), raw.observed & self._varies)

    def _check(self, likelihood: Likelihood) -> None:
        """Whether what was asked for goes together."""
        whole("n_components", self.n_components)
        whole("n_candidates", self.n_candidates)
        if self.schedule not in ("fast", "paper"):
            raise InputError(f"`schedule` must be 'fast' or 'paper'; got {self.schedule!r}.")
        if self.noise not in ("shared", "column"):
            raise InputError(f"`noise` must be 'shared' or 'column'; got {self.noise!r}.")
        if self.noise == "column" and not isinstance(likelihood, GaussianLikelihood):
            raise InputError(
                "`noise='column'` is for Gaussian noise; say 'shared' for other likelihoods."
            )
        if self.schedule == "paper" and not isinstance(self._goal(), FixedAlpha):
            raise InputError(
                "`schedule='paper'` needs a number for `alpha`, such as 1.0; the paper has no "
                "other way to say how many points."
            )
        if self.schedule == "fast" and self.batch_size is not None:
            raise InputError("`batch_size` is for `schedule='paper'`.")
        if self.schedule == "fast" and not self._closed(likelihood):
            raise InputError(
                "the fast schedule needs Gaussian noise and an RBF or linear kernel; say "
                "`schedule='paper'` and a number for `alpha`, such as 1.0."
            )

    def _plan(self, K: int) -> LatentSchedule:
        """The schedule that does what was asked for."""
        goal = self._goal()
        if self.schedule == "fast":
            iterations = whole("max_iter", self.max_iter)
            return FastLatent(goal, n_candidates=self.n_candidates, iterations=iterations)
        assert isinstance(goal, FixedAlpha)
        batch = None if self.batch_size is None else whole("batch_size", self.batch_size)
        prior = SquaredCardinality(K, goal.alpha)
        return JointLatent(prior, epochs=whole("epochs", self.epochs), batch_size=batch)

    def _goal(self) -> Goal:
        tolerance = positive("tolerance", self.tolerance, hint="It is in nats per observed entry.")
        automatic = isinstance(self.alpha, str) and self.alpha == "auto"
        if not automatic and self.max_points is not None:
            raise InputError("say a number for `alpha` or `max_points`, not both.")
        if not automatic:
            hint = "Larger values keep fewer points; 'auto' derives it from `tolerance`."
            return FixedAlpha(positive("alpha", self.alpha, hint=hint))
        if self.max_points is not None:
            return MaxPoints(whole("max_points", self.max_points))
        return Tolerance(tolerance)

    def _closed(self, likelihood: Likelihood) -> bool:
        """Whether averages over q(X) and the best q(u) are known in closed form."""
        kernel = latent_kernel(self.kernel, self.n_components)
        return isinstance(likelihood, GaussianLikelihood) and has_psi(kernel)

    def _model(
        self, table: Entries, raw: Entries, likelihood: Likelihood, generator: torch.Generator
    ) -> LatentModel:
        Q = self.n_components
        kernel = latent_kernel(self.kernel, Q)
        rows = table if has_noise(likelihood) else scaled(raw)
        X = latent_rows(self.start, rows, Q, generator=generator)
        sleeps = self.schedule == "fast" and isinstance(self.start, str) and self.kernel == "rbf"
        latents = awakened(kernel, X) if sleeps else Latents(X, variance=START_VARIANCE)
        points = self._points(latents.mean.detach(), generator)
        noise = self._starting_noise(table, likelihood)
        if self._closed(likelihood) and self.batch_size is None:
            model = LatentVariableGP(kernel, latents, candidates=points, noise=noise)
            model.likelihood.requires_grad_(_learnt(likelihood))
        else:
            if self.noise == "column":
                learnt, likelihood = _learnt(likelihood), gaussian_noise(noise)
                likelihood.requires_grad_(learnt)
            function = VariationalGP(kernel, points, likelihood=likelihood, targets=table.P)
            model = SampledLatentGP(function, latents)
        model.candidates.requires_grad_(bool(self.move_candidates))
        return model

    def _starting_noise(self, table: Entries, likelihood: Likelihood) -> Tensor:
        """Variances of Gaussian noise in standard units: given ones, or a tenth of the table's."""
        if isinstance(likelihood, GaussianLikelihood) and not isinstance(self.likelihood, str):
            start = likelihood.noise.detach().mean().item()
        else:
            start = max(0.1 * float(table.filled().square().sum()) / table.count, 1e-3)
        return table.Y.new_full((table.P if self.noise == "column" else 1,), start)

    def _points(self, X: Tensor, generator: torch.Generator) -> Tensor:
        """Candidates: given ones; else none for the fast schedule, rows for the paper's."""
        if not isinstance(self.candidates, str):
            return places("candidates", self.candidates, (None, self.n_components))
        if self.candidates != "auto":
            raise InputError(
                f"`candidates` must be 'auto' or places [K Q]; got {self.candidates!r}."
            )
        count = 0 if self.schedule == "fast" else self.n_candidates
        return X[torch.randperm(len(X), generator=generator)[:count]]

    def _keep(self, fitted: LatentFit, table: Entries, generator: torch.Generator) -> None:
        """What was learnt."""
        latents, posterior = fitted.model.latents, fitted.posterior
        chosen = torch.randperm(table.N, generator=generator)[:ANCHORS].sort().values
        self._anchors = latents.mean.detach()[chosen], latents.variance.detach()[chosen]
        self.posterior_ = posterior
        self.kernel_ = posterior.function.kernel
        self.relevance_ = relevance(self.kernel_, latents.Q)
        self.n_inducing_ = posterior.function.M
        self.inducing_points_ = posterior.function.Z.numpy()
        self.candidates_ = fitted.candidates.numpy()
        self.inclusion_ = fitted.selection.inclusion.numpy()
        self.alpha_ = fitted.selection.alpha
        self.frontier_ = fitted.selection.frontier
        self.elbo_ = fitted.bound
        self.given_up_ = fitted.given_up / table.count
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

    def _table(self, X: Any) -> Entries:
        """Checked rows in standard units."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
        Y = tensor(X)
        return self._standardised(Entries(Y, ~torch.isnan(Y)))

    def _placed(self, table: Entries) -> Places:
        return placed(self.posterior_.row_bound(table), anchors=self._anchors)


def _varying(raw: Entries) -> Tensor:
    """Which columns of a table take more than one value.

    Raises:
        InputError: some column has no entry at all, or none varies.
    """
    never = torch.nonzero(~raw.observed.any(0))[:, 0].tolist()
    if never:
        raise InputError(
            f"every column of `X` must have an entry that is observed; columns {never[:10]} have "
            "none. Leave them out."
        )
    low = torch.where(raw.observed, raw.Y, torch.inf).amin(0)
    high = torch.where(raw.observed, raw.Y, -torch.inf).amax(0)
    if not bool((low < high).any()):
        raise InputError("some column of `X` must vary; all of them are constant.")
    return low < high


def _learnt(likelihood: Likelihood) -> bool:
    """Whether a Gaussian likelihood's noise is to be learnt."""
    return not isinstance(likelihood, GaussianLikelihood) or any(
        parameter.requires_grad for parameter in likelihood.parameters()
    )
