"""Classification for people who know scikit-learn."""

from typing import Any, final

import numpy as np
import torch
from gpytorch.kernels import Kernel
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from torch import Tensor

from winnowgp.estimators.base import InducingEstimator
from winnowgp.estimators.validation import Folder, labelled_rows, tensor
from winnowgp.models import VariationalGP
from winnowgp.training import Callbacks

N_CANDIDATES = 256


@final
class SparseGPClassifier(ClassifierMixin, InducingEstimator):
    """Gaussian-process classification that decides how many inducing points it needs.

    Two classes have one latent function behind a probit, more have one each behind a softmax; all
    share kernel and points. Inputs are standardised inside. How many points to keep can be said in
    one of four ways: `tolerance` (the default), `max_points`, `max_predict_us`, or a number for
    `alpha`.

    Args:
        kernel: in words, such as "rbf", "matern52", "rbf + periodic" or "rbf[0, 1] * linear" (one
            lengthscale a column; see `winnowgp.estimators.kernel_words`), or a GPyTorch kernel for
            standardised inputs.
        alpha: "auto", or the strength of the paper's prior exp(−alpha · M²) on M points; larger
            values keep fewer.
        tolerance: nats per observation that may be given up relative to all candidates.
        max_points: most points; fewer only where the candidates hold no more information.
        max_predict_us: most microseconds for the latent mean and variance of a row, measured on
            this machine in batches of 1,000 rows.
        candidates: "greedy" (rows of greatest conditional variance), "kmeans" (cluster centres),
            "random" (rows), or the locations themselves, `[K D]`. "auto" is greedy, or random with
            the paper's schedule.
        n_candidates: how many points to choose from; 256, or 100 with the paper's schedule.
        schedule: "fast", or "paper" for the three phases of the paper (needs a number for `alpha`).
        epochs: steps of the paper's three phases: all candidates, learning inclusion, kept points.
        batch_size: rows a step of the paper's schedule looks at; all of them if not given.
        random_state: a seed or RandomState; the same seed gives the same fit.
        device: where the fit is computed: "cpu", "cuda", or "auto" for a GPU if there is one;
            predictions are always on the CPU.
        callbacks: None, a function called with the `winnowgp.training.Progress` of every step, or a
            sequence of such functions.
        checkpoint: a folder, or a `Checkpoint`, in which the fit writes down how far it has come.
            Run again with the same one after it was killed, it goes on to the same answer.

    Attributes:
        classes_: the labels, in the order of the columns of `predict_proba`.
        n_inducing_: number of points kept.
        inducing_points_: where they are, `[M D]`.
        inclusion_: probability of each candidate of the last choice, `[K]`.
        candidates_: where those candidates are, `[K D]`; with the fast schedule the kept points
            come first, then fresh ones that were not needed.
        alpha_: strength of the prior that keeps this many points.
        elbo_: lower bound on the log evidence, in nats.
        elbo_gap_: nats per observation below the best bound seen with more points.
        frontier_: best bound for each number of points among the candidates; None with the paper's
            schedule.
        kernel_: the fitted kernel, for standardised inputs.
        posterior_: the predictor, for standardised inputs.

    >>> X = np.linspace(0, 6, 60)[:, None]
    >>> y = np.where(np.sin(X[:, 0]) > 0, "up", "low")
    >>> model = SparseGPClassifier(random_state=0).fit(X, y)
    >>> model.predict([[1.5], [4.5]])
    array(['up', 'low'], dtype='<U3')
    """

    def __init__(
        self,
        kernel: str | Kernel = "rbf",
        *,
        alpha: str | float = "auto",
        tolerance: float = 0.01,
        max_points: int | None = None,
        max_predict_us: float | None = None,
        candidates: str | ArrayLike = "auto",
        n_candidates: int | None = None,
        schedule: str = "fast",
        epochs: tuple[int, int, int] = (200, 600, 200),
        batch_size: int | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
        callbacks: Callbacks = None,
        checkpoint: Folder | None = None,
    ) -> None:
        self.kernel = kernel
        self.alpha = alpha
        self.tolerance = tolerance
        self.max_points = max_points
        self.max_predict_us = max_predict_us
        self.candidates = candidates
        self.n_candidates = n_candidates
        self.schedule = schedule
        self.epochs = epochs
        self.batch_size = batch_size
        self.random_state = random_state
        self.device = device
        self.callbacks = callbacks
        self.checkpoint = checkpoint

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> "SparseGPClassifier":
        """Learn kernel, locations, and which candidates to keep.

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
        likelihood = labels.likelihood()

        def model(kernel: Kernel, points: Tensor) -> VariationalGP:
            return VariationalGP(kernel, points, likelihood=likelihood)

        self._fit(rows, model=model, n_candidates=N_CANDIDATES)
        self._labels, self.classes_ = labels, labels.classes
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probability of each class, `[N C]`, averaged over what is not known of the functions."""
        mean = self._predicted(self._inputs(X), observed=True).mean
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
