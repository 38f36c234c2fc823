"""Deep GP regression and classification for scikit-learn."""

from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin

from winnowgp.data import Source
from winnowgp.estimators.deep_base import DeepEstimator
from winnowgp.estimators.validation import (
    Folder,
    TargetScaler,
    has_noise,
    held_rows,
    labelled_rows,
    likelihood_from,
    note_source,
    numeric_rows,
    tensor,
)
from winnowgp.models.likelihoods import observation_model
from winnowgp.training import Callbacks

# Deep regression for people who know scikit-learn.


# Of the targets' variance: more, and the first steps take the function for noise.
START_NOISE = 0.1


@final
class DeepGPRegressor(MultiOutputMixin, RegressorMixin, DeepEstimator):
    """Regression by a deep Gaussian process that allocates inducing points to its layers.

    For functions that jump, or change their smoothness from place to place, where a shallow process
    must compromise. Inputs and targets are standardised inside.

    How many points to keep can be said in one of three ways: `tolerance` (the default), `max_cost`,
    or a number for `alpha`.

    Args:
        layers: number of layers, one of them the last.
        width: number of outputs of each hidden layer; that of the inputs if not given.
        kernel: in words, such as "rbf", "matern52" or "rbf + linear" (one lengthscale a column; see
            `winnowgp.estimators.kernel_words`), or a GPyTorch kernel that suits every layer; a
            tuple for one each.
        likelihood: "gaussian", "student-t", "laplace", "poisson", or a GPyTorch likelihood of one
            latent function a target.
        hidden_mean: where hidden functions start: "identity" (the inputs, padded or their principal
            components), "zero" (trained on the targets first), or "auto" for the better of the two
            after a short run.
        skip_connections: whether every layer after the first also receives the inputs.
        alpha: "auto", or the strength of the paper's prior exp(−alpha · M²) on each layer's M
            points; a tuple for one strength a layer.
        tolerance: nats per observation that all layers together may give up relative to all
            candidates.
        max_cost: most Σ M² over the layers, shared out where it buys most.
        n_candidates: how many points each layer chooses from.
        schedule: "fast", or "paper" for the phases of the paper (needs a number for `alpha`).
        epochs: steps of the phases: each layer alone, all points, (paper: learning inclusion,)
            kept points.
        batch_size: rows a step looks at; all of them if None.
        samples: propagated for each row at each step.
        predict_samples: propagated for each row when predicting.
        random_state: a seed or RandomState; the same seed gives the same fit.
        callbacks: None, a function called with the `winnowgp.training.Progress` of every step, or a
            sequence of such functions.
        checkpoint: a folder, or a `Checkpoint`, in which the fit writes down how far it has come.
            Run again with the same one after it was killed, it goes on to the same answer.

    Attributes:
        n_inducing_: number of points kept in each layer.
        inducing_points_: where they are, one array `[M D]` a layer; those of the first layer in the
            units of X, those of the others in the units of what the layer before puts out.
        inclusion_: probability of each candidate of the last choice, one array `[K]` a layer; the
            fast schedule has dropped others in the rounds before.
        candidates_: where those candidates were, one array `[K D]` a layer, in the same units.
        alpha_: strength of the prior in each layer.
        frontiers_: best bound for each number of points in each layer, the others held; None with
            the paper's schedule.
        elbo_: lower bound on the log evidence of the (standardised) targets, in nats.
        elbo_gap_: nats per observation that dropping points cost when it happened, before the kept
            ones were trained on.
        noise_: noise variance (scale² of Student's t and Laplace) of each target, `[P]`; NaN where
            the likelihood has none.
        likelihood_: the fitted likelihood, for standardised targets.
        posterior_: the predictor, for standardised inputs and targets.
    """

    def __init__(
        self,
        layers: int = 2,
        *,
        width: int | tuple[int, ...] | None = None,
        kernel: str | Kernel | tuple[str | Kernel, ...] = "rbf",
        likelihood: str | Likelihood = "gaussian",
        hidden_mean: str = "auto",
        skip_connections: bool = False,
        alpha: str | float | tuple[float, ...] = "auto",
        tolerance: float = 0.01,
        max_cost: float | None = None,
        n_candidates: int = 100,
        schedule: str = "fast",
        epochs: tuple[int, ...] | None = None,
        batch_size: int | None = 1024,
        samples: int = 1,
        predict_samples: int = 64,
        random_state: int | np.random.RandomState | None = None,
        callbacks: Callbacks = None,
        checkpoint: Folder | None = None,
    ) -> None:
        self.layers = layers
        self.width = width
        self.kernel = kernel
        self.likelihood = likelihood
        self.hidden_mean = hidden_mean
        self.skip_connections = skip_connections
        self.alpha = alpha
        self.tolerance = tolerance
        self.max_cost = max_cost
        self.n_candidates = n_candidates
        self.schedule = schedule
        self.epochs = epochs
        self.batch_size = batch_size
        self.samples = samples
        self.predict_samples = predict_samples
        self.random_state = random_state
        self.callbacks = callbacks
        self.checkpoint = checkpoint

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> "DeepGPRegressor":
        """Learn all layers, and which of its candidates each keeps.

        Args:
            X: inputs `[N D]`; or inputs and targets together as a `winnowgp.data.Source` in memory,
                such as `shard(Dataset.of(X, y))`: processes that `torchrun` started then share the
                minibatches.
            y: targets `[N]` or `[N P]`; left out with a source.
            sample_weight: how often each row counts, `[N]`: the log-likelihood of a row of weight w
                is multiplied by w, so that 2 is the row twice and 0 leaves it out. Once if not
                given.
        """
        likelihood = likelihood_from(self.likelihood)
        if has_noise(likelihood) and isinstance(self.likelihood, str):
            likelihood.noise = torch.tensor(START_NOISE)
        if isinstance(X, Source):
            note_source(self, X, y, sample_weight)
            rows, single = held_rows(X, "a deep model").merged(), X.P == 1
        else:
            rows, single = numeric_rows(self, X, y, sample_weight)
        units = TargetScaler.of(rows, likelihood, single=single)
        data = replace(rows, Y=units.columns.forward(rows.Y))
        observation_model(likelihood).check_targets(data.Y)
        self._fit(X.with_rows(data) if isinstance(X, Source) else data, likelihood)
        self._y_scaler = units
        self.likelihood_ = self.posterior_.likelihood
        self.noise_ = self._y_scaler.noise(self.likelihood_)
        return self

    def predict(
        self, X: Any, return_std: bool = False, *, observed: bool = True, method: str = "mixture"
    ) -> Any:
        """Predictive mean, and on request the standard deviation, of each row.

        Args:
            return_std: also return the standard deviation.
            observed: whether these are for a new observation (with its noise) or for the latent
                function.
            method: "mixture" of propagated samples, or "matched": one Gaussian after another, which
                is quicker and nearly as good where hidden layers are sure of themselves.

        Returns: the mean `[N]` or `[N P]`; with a request, a pair.
        """
        found = self._predicted(self._inputs(X), observed=observed, method=method)
        mean = self._y_scaler.values(found.mean)
        return (mean, self._y_scaler.deviations(found.variance.sqrt())) if return_std else mean

    @torch.no_grad()
    def predict_quantiles(
        self, X: Any, probabilities: ArrayLike, *, observed: bool = True
    ) -> NDArray[np.float64]:
        """Quantiles of the mixture, `[Q N]` or `[Q N P]`.

        Args:
            probabilities: Q of them, strictly between 0 and 1.
            observed: whether of a new observation (Gaussian noise only) or of the function.
        """
        wanted = tensor(np.atleast_1d(np.asarray(probabilities, dtype=np.float64)))
        inputs = self._inputs(X)
        parts = [
            self.posterior_.quantiles(rows, wanted, observed=observed)
            for rows in inputs.split(self._rows)
        ]
        return self._y_scaler.values(torch.cat(parts, dim=1))

    def log_density(self, X: Any, y: Any) -> NDArray[np.float64]:
        """Log predictive density of each observation, in nats and in the units of `y`."""
        inputs = self._inputs(X)
        targets = self._y_scaler.seen(y, self.likelihood_, inputs=inputs)
        return self._y_scaler.log_densities(self._log_density(inputs, targets))


# Deep classification for people who know scikit-learn.


@final
class DeepGPClassifier(ClassifierMixin, DeepEstimator):
    """Classification by a deep Gaussian process that allocates inducing points to its layers.

    Two classes have one latent function behind a probit, more have one each behind a softmax.
    Inputs are standardised inside. How many points to keep can be said in one of three ways:
    `tolerance` (the default), `max_cost`, or a number for `alpha`.

    Args:
        layers: number of layers, one of them the last.
        width: number of outputs of each hidden layer; that of the inputs if not given.
        kernel: in words, such as "rbf", "matern52" or "rbf + linear" (one lengthscale a column; see
            `winnowgp.estimators.kernel_words`), or a GPyTorch kernel that suits every layer; a
            tuple for one each.
        hidden_mean: where hidden functions start: "identity" (the inputs, padded or their principal
            components), "zero" (trained on the classes first), or "auto" for the better of the two
            after a short run.
        skip_connections: whether every layer after the first also receives the inputs.
        alpha: "auto", or the strength of the paper's prior exp(−alpha · M²) on each layer's M
            points; a tuple for one strength a layer.
        tolerance: nats per observation that all layers together may give up relative to all
            candidates.
        max_cost: most Σ M² over the layers, shared out where it buys most.
        n_candidates: how many points each layer chooses from.
        schedule: "fast", or "paper" for the phases of the paper (needs a number for `alpha`).
        epochs: steps of the phases: each layer alone, all points, (paper: learning inclusion,)
            kept points.
        batch_size: rows a step looks at; all of them if None.
        samples: propagated for each row at each step.
        predict_samples: propagated for each row when predicting.
        random_state: a seed or RandomState; the same seed gives the same fit.
        callbacks: None, a function called with the `winnowgp.training.Progress` of every step, or a
            sequence of such functions.
        checkpoint: a folder, or a `Checkpoint`, in which the fit writes down how far it has come.
            Run again with the same one after it was killed, it goes on to the same answer.

    Attributes:
        classes_: the labels, in the order of the columns of `predict_proba`.
        n_inducing_: number of points kept in each layer.
        inducing_points_: where they are, one array `[M D]` a layer; those of the first layer in the
            units of X, those of the others in the units of what the layer before puts out.
        inclusion_: probability of each candidate of the last choice, one array `[K]` a layer; the
            fast schedule has dropped others in the rounds before.
        candidates_: where those candidates were, one array `[K D]` a layer, in the same units.
        alpha_: strength of the prior in each layer.
        frontiers_: best bound for each number of points in each layer, the others held; None with
            the paper's schedule.
        elbo_: lower bound on the log evidence, in nats.
        elbo_gap_: nats per observation that dropping points cost when it happened, before the kept
            ones were trained on.
        posterior_: the predictor, for standardised inputs.
    """

    def __init__(
        self,
        layers: int = 2,
        *,
        width: int | tuple[int, ...] | None = None,
        kernel: str | Kernel | tuple[str | Kernel, ...] = "rbf",
        hidden_mean: str = "auto",
        skip_connections: bool = False,
        alpha: str | float | tuple[float, ...] = "auto",
        tolerance: float = 0.01,
        max_cost: float | None = None,
        n_candidates: int = 100,
        schedule: str = "fast",
        epochs: tuple[int, ...] | None = None,
        batch_size: int | None = 1024,
        samples: int = 1,
        predict_samples: int = 64,
        random_state: int | np.random.RandomState | None = None,
        callbacks: Callbacks = None,
        checkpoint: Folder | None = None,
    ) -> None:
        self.layers = layers
        self.width = width
        self.kernel = kernel
        self.hidden_mean = hidden_mean
        self.skip_connections = skip_connections
        self.alpha = alpha
        self.tolerance = tolerance
        self.max_cost = max_cost
        self.n_candidates = n_candidates
        self.schedule = schedule
        self.epochs = epochs
        self.batch_size = batch_size
        self.samples = samples
        self.predict_samples = predict_samples
        self.random_state = random_state
        self.callbacks = callbacks
        self.checkpoint = checkpoint

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> "DeepGPClassifier":
        """Learn all layers, and which of its candidates each keeps.

        Args:
            X: inputs `[N D]`; or inputs and whole numbers for classes together as a
                `winnowgp.data.Source` in memory, such as `shard(Dataset.of(X, y))`: processes
                that `torchrun` started then share the minibatches.
            y: labels `[N]`: strings, whole numbers or booleans; left out with a source.
            sample_weight: how often each row counts, `[N]`: the log-likelihood of a row of weight w
                is multiplied by w, so that 2 is the row twice and 0 leaves it out. Once if not
                given.
        """
        labels, rows = labelled_rows(self, X, y, sample_weight)
        self._fit(rows, labels.likelihood())
        self._labels, self.classes_ = labels, labels.classes
        return self

    def predict_proba(self, X: Any, *, method: str = "mixture") -> NDArray[np.float64]:
        """Probability of each class, `[N C]`, averaged over what is not known of the functions.

        Args:
            method: "mixture" of propagated samples, or the quicker "matched".
        """
        mean = self._predicted(self._inputs(X), observed=True, method=method).mean
        return self._labels.probabilities(mean.numpy())

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class of each row."""
        probability = self.predict_proba(X)
        return self.classes_[probability.argmax(1)]

    def log_density(self, X: Any, y: Any) -> NDArray[np.float64]:
        """Log probability of each label, in nats; −∞ for a label never seen."""
        inputs = self._inputs(X)
        index, known = self._labels.numbers(y, len(inputs))
        nats = self._log_density(inputs, tensor(index)[:, None])[:, 0]
        return torch.where(torch.from_numpy(known), nats, -torch.inf).numpy()
