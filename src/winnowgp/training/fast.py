"""The fast schedule: selection by exact marginal gains, optimisation by L-BFGS or Adam."""

from dataclasses import dataclass, field
from typing import Any, final

from gpytorch.kernels import Kernel

from winnowgp.data import MaskedMatrix, Source
from winnowgp.errors import InputError
from winnowgp.models import DeepGP, LatentVariableGP, MultiOutputGP
from winnowgp.models.base import InducingModel
from winnowgp.models.gplvm import LatentModel
from winnowgp.models.heteroscedastic import HeteroscedasticGP
from winnowgp.training.callbacks import AnyModel
from winnowgp.training.fast_deep import DeepTraining, fit_deep
from winnowgp.training.fast_gplvm import GAIN, ITERATIONS, fit_gplvm
from winnowgp.training.fast_heteroscedastic import fit_heteroscedastic
from winnowgp.training.fast_multi_output import fit_multi_output
from winnowgp.training.fast_sparse import SparseTraining, fit_sparse
from winnowgp.training.goals import AllCandidates, Goal, MaxPoints, Tolerance
from winnowgp.training.schedules import FitResult, Schedule, Trained, TrainingContext

_DEEP_TRAINING = DeepTraining()


@final
@dataclass(frozen=True, slots=True)
class FastSchedule(Schedule):
    """Select inducing points by exact marginal gains and optimise them, in a few rounds.

    For `SparseGP` and `VariationalGP`:

    1. Hyper-parameters and kernel from the exact evidence: of all rows where that is affordable,
       else of as many as the budget allows.
    2. Candidates: rows of greatest conditional variance, among the model's own candidates if it has
       any. Their number doubles until that gains less than the tolerance, or a limit ends it.
    3. Backward elimination on the subset statistics, down to the goal.
    4. L-BFGS on hyper-parameters, noise and locations of the selected points.
    5. Steps 3 and 4 again on these points and fresh candidates, until the number settles.

    With `MaxPoints`, and with a `Tolerance` that needs more points than its limit allows, several
    starts are compared first, and points that became idle are exchanged afterwards. With
    `FixedAlpha`, steps 3 and 4 begin from several starts, and numbers of points above and below are
    tried, each with its own optimised parameters, while L − α M² increases.
    Last, the inclusion probabilities of the final points and of fresh candidates are learnt by
    natural updates, at the α that the frontier implies.

    For `HeteroscedasticGP`, the function and its log noise are fitted in this way in turn; each has
    inducing points of its own.

    For `MultiOutputGP`, the candidates of all processes compete in one elimination, and tolerances
    are nats per observed target.

    For `DeepGP`, layers are trained by Adam with natural gradients, and the points of all layers
    are selected from one pass of sites. For `LatentVariableGP`, the latent positions are optimised
    as well, and inferred anew between selections; tolerances are nats per observed entry.
    """

    goal: Goal = field(default_factory=Tolerance)
    n_candidates: int | None = None
    """Largest number of candidates, hence of inducing points; it grows as needed if None. For a
    GP-LVM, the number of fresh candidates in each round, 100 if None, and the largest number of
    inducing points if given. The layers of a deep GP have candidates of their own."""
    rounds: int = 3
    """Number of rounds of selection."""
    iterations: int | None = None
    """Largest number of iterations of one L-BFGS run; 1000 if None, 300 for a GP-LVM."""
    gain: float | None = None
    """The last L-BFGS run ends once twenty iterations together gain fewer nats per observation;
    5e-6 if None, 3e-6 per entry for a GP-LVM."""
    selection_rows: int = 4000
    """Number of rows that candidates are drawn from, and that starts are compared on."""
    inclusion_steps: int = 60
    """Largest number of subsets drawn to learn the inclusion probabilities."""
    kernels: tuple[Kernel, ...] = ()
    """Other kernels, which are compared with the model's own by the exact evidence."""
    linear_term: bool = False
    """Whether to add a linear term to the kernel where the evidence favours it."""
    criterion: str = "elbo"
    """"elbo": `Tolerance` limits the ELBO gap to the largest model; "predictive": it limits the gap
    in held-out log density, by cross-validation of the selection."""
    warm_start: bool = False
    """Whether parameters and candidates of a `SparseGP` or `VariationalGP` are those of an earlier
    fit, to begin from: the search for starts and the comparison of kernels are left out."""
    max_seconds: float | None = None
    """Wall-clock limit in seconds, in place of the default budget of operations."""
    reported: bool = True
    """Whether models with fewer points and held-out densities are computed for the report, of a
    `SparseGP` or `VariationalGP`."""
    max_starts: int | None = None
    """Largest number of starts, of at least two, for hyper-parameters of up to 250 rows, of a
    `SparseGP` or `VariationalGP`; None for the whole search. The first two are the longest
    lengthscales with most noise and the shortest with least, the third is the model as given."""
    averaged: bool = False
    """Whether predictions will be averages over hyper-parameters and a constant of the weight in
    the result (`hyperparameter_mixture`). With few rows, inducing points then pay if this average
    predicts held-out rows clearly better than the constant."""
    deep: DeepTraining = _DEEP_TRAINING
    """Training settings of a deep GP."""

    def __post_init__(self) -> None:
        counts = (self.n_candidates, self.rounds, self.iterations)
        if any(count is not None and count < 1 for count in counts):
            raise InputError(
                "`n_candidates`, `rounds` and `iterations` must be at least 1; "
                f"got {self.n_candidates}, {self.rounds} and {self.iterations}."
            )
        if self.max_starts is not None and self.max_starts < 2:
            raise InputError(
                f"`max_starts` must be at least 2, or None for all; got {self.max_starts}."
            )

    def check(self, model: AnyModel, data: Source | MaskedMatrix) -> None:
        if isinstance(model, LatentModel) and not isinstance(model, LatentVariableGP):
            raise InputError(
                f"`FastSchedule` requires a LatentVariableGP among GP-LVMs; got "
                f"{type(model).__name__}. Use `PaperSchedule` for other kernels and likelihoods."
            )
        limit = self.goal.limit if isinstance(self.goal, Tolerance) else self.goal
        if isinstance(model, DeepGP) and isinstance(limit, MaxPoints | AllCandidates):
            limit.alphas([])
        if isinstance(self.goal, AllCandidates):
            if isinstance(model, LatentVariableGP):
                raise InputError("`goal` cannot be AllCandidates for a GP-LVM, whose rows move.")
            if isinstance(model, InducingModel) and model.K == 0:
                raise InputError(
                    "`goal` keeps all candidates, and the model has none; give it some, or choose "
                    "another goal, such as `Tolerance()`."
                )

    def run(
        self, model: Trained, data: Source | MaskedMatrix, *, context: TrainingContext
    ) -> FitResult[Trained]:
        # Untyped: the branches narrow the model, and so its result.
        return self._run(model, data, context)

    def _run(self, model: Any, data: Any, context: TrainingContext) -> FitResult[Any]:
        if isinstance(model, DeepGP):
            return fit_deep(
                model,
                data,
                goal=self.goal,
                rounds=self.rounds,
                training=self.deep,
                inclusion_steps=self.inclusion_steps,
                context=context,
            )
        if isinstance(model, LatentVariableGP):
            return fit_gplvm(
                model,
                data,
                goal=self.goal,
                n_candidates=self.n_candidates,
                rounds=self.rounds,
                iterations=self.iterations or ITERATIONS,
                gain=GAIN if self.gain is None else self.gain,
                inclusion_steps=self.inclusion_steps,
                context=context,
            )
        if isinstance(model, MultiOutputGP):
            return fit_multi_output(
                model,
                data,
                goal=self.goal,
                n_candidates=self.n_candidates,
                rounds=self.rounds,
                iterations=self.iterations or 500,
                gain=5e-6 if self.gain is None else self.gain,
                inclusion_steps=self.inclusion_steps,
                context=context,
            )
        training = SparseTraining(
            goal=self.goal,
            n_candidates=self.n_candidates,
            rounds=self.rounds,
            iterations=self.iterations or 1000,
            gain=5e-6 if self.gain is None else self.gain,
            selection_rows=self.selection_rows,
            inclusion_steps=self.inclusion_steps,
            kernels=self.kernels,
            linear_term=self.linear_term,
            criterion=self.criterion,
            max_seconds=self.max_seconds,
            warm_start=self.warm_start,
            kept_sizes=3 if self.reported else 0,
            reported=self.reported,
            max_starts=self.max_starts,
            averaged=self.averaged,
        )
        if isinstance(model, HeteroscedasticGP):
            return fit_heteroscedastic(model, data, training=training, context=context)
        return fit_sparse(model, data, training=training, context=context)
