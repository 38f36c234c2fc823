"""Deep classification for people who know scikit-learn."""

from typing import Any, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin

from winnowgp.estimators.deep_estimator import DeepEstimator
from winnowgp.estimators.labelled_rows import labelled_rows
from winnowgp.estimators.resumable import Folder
from winnowgp.estimators.tensors import tensor
from winnowgp.training import OnDeepProgress, deep_silent


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
        connected: whether every layer after the first also sees the inputs.
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
        on_progress: told of every step of the fit; see `winnowgp.training.DeepProgress`.
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
        given_up_: nats per observation that dropping points cost when it happened, before the kept
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
        connected: bool = False,
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
        on_progress: OnDeepProgress = deep_silent,
        checkpoint: Folder | None = None,
    ) -> None:
        self.layers = layers
        self.width = width
        self.kernel = kernel
        self.hidden_mean = hidden_mean
        self.connected = connected
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
        self.on_progress = on_progress
        self.checkpoint = checkpoint

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> "DeepGPClassifier":
        """Learn all layers, and which of its candidates each keeps.

        Args:
            X: inputs `[N D]`; or inputs and whole numbers for classes together as a
                `winnowgp.data.Source` in memory, such as `shared(Dataset.of(X, y))`: processes
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
