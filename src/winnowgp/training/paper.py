"""The schedule of the paper: pre-train, learn the inclusion of candidates, prune, post-train."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.bounds.evidence import Evidence
from winnowgp.data import Dataset, MaskedMatrix, Source
from winnowgp.errors import InputError
from winnowgp.gradients import Gradient, ScoreFunction
from winnowgp.models import DeepGP
from winnowgp.models.deep_gp import estimate_elbo, seeded_elbo
from winnowgp.models.gplvm import LatentModel
from winnowgp.models.heteroscedastic import HeteroscedasticGP
from winnowgp.models.priors import log_prior
from winnowgp.point_processes import Bernoulli, CardinalityPrior, SquaredCardinality, kl_divergence
from winnowgp.selection.frontier import Selection
from winnowgp.training.adam import Adam, Minibatches
from winnowgp.training.callbacks import AnyModel, Progress, candidate_sets
from winnowgp.training.goals import FixedAlpha, per_layer
from winnowgp.training.layer_training import LayerTraining, train_layerwise
from winnowgp.training.schedules import FitResult, Schedule, Trained, TrainingContext, draw_seed
from winnowgp.typing import Scalar, ScoreMasks, ScoreWeights


@final
@dataclass(frozen=True, slots=True)
class PaperSchedule(Schedule):
    """Pre-train, learn inclusion jointly with all parameters, prune, post-train (appendix C).

    The joint phase maximises E_q[L(Z)] − KL[q(Z) ‖ p(Z)] over hyper-parameters, locations and the
    inclusion probabilities λ at once. The candidates of all layers of a deep GP form one set Z, so
    that one forward pass scores a draw for all layers. A GP-LVM has the joint phase only (section
    5.3): as the latent positions move, points are included where they arrive and excluded where
    they were.

    The selected set is a draw from q, as in the paper. A single draw can be tens of nats worse than
    another; `draws` selects the best of several.

    Args:
        prior: the prior p(Z), or the strength α of the paper's prior exp(−α M²); for a deep GP one
            strength for all layers or a tuple with one per layer.
        pre: steps of the first phase; 200 if None, 1000 for a deep GP, 0 for a GP-LVM.
        joint: steps of the joint phase; 600 if None, 500 for a deep GP, 300 passes over the rows
            for a GP-LVM.
        post: steps of the last phase; 200 if None, 1500 for a deep GP, 0 for a GP-LVM.
        learning_rate: Adam's learning rate of all parameters but λ.
        inclusion_learning_rate: Adam's learning rate of the logits of λ.
        gradient: estimator of the gradient in λ.
        initial_inclusion: initial value of λ.
        draws: number of subsets drawn at the end; the best one is selected.
        batch_size: number of rows in each step, for models that can be trained on minibatches; all
            if None. Processes that share the data use a part each.
        layerwise: steps that each layer of a deep GP is trained alone first.
        samples: samples that a deep GP propagates for each row in each step.
    """

    prior: CardinalityPrior | float | tuple[float, ...]
    pre: int | None = None
    joint: int | None = None
    post: int | None = None
    learning_rate: float = 0.01
    inclusion_learning_rate: float = 0.2
    gradient: Gradient[Any] = field(default_factory=ScoreFunction)
    initial_inclusion: float = 0.5
    draws: int = 1
    batch_size: int | None = None
    layerwise: int = 200
    samples: int = 1

    def __post_init__(self) -> None:
        steps = (self.pre, self.joint, self.post, self.layerwise)
        if any(count is not None and count < 0 for count in steps):
            raise InputError(
                "`pre`, `joint`, `post` and `layerwise` must be zero or more steps; "
                f"got {self.pre}, {self.joint}, {self.post} and {self.layerwise}."
            )
        for name in ("draws", "batch_size", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"`{name}` must be at least 1; got {value}.")
        if not 0 < self.initial_inclusion < 1:
            raise InputError(
                f"`initial_inclusion` must lie within (0, 1); got {self.initial_inclusion}."
            )
        if not isinstance(self.prior, CardinalityPrior):
            FixedAlpha(self.prior)

    def check(self, model: AnyModel, data: Source | MaskedMatrix) -> None:
        if isinstance(model, HeteroscedasticGP):
            raise InputError(
                "`PaperSchedule` cannot fit noise that depends on the inputs; use `FastSchedule`, "
                "which selects the inducing points of function and noise in turn."
            )
        self._priors([len(points) for points in candidate_sets(model)])
        if isinstance(model, DeepGP) and self.gradient.scores_weights:
            raise InputError(
                "`gradient` must score subsets, not weights, for a deep GP: relaxed subsets add "
                "noise that grows with every layer. Use `ScoreFunction`."
            )
        if not isinstance(data, MaskedMatrix):
            data.require_dataset("`PaperSchedule`")

    def run(
        self, model: Trained, data: Source | MaskedMatrix, *, context: TrainingContext
    ) -> FitResult[Trained]:
        return self._run(model, data, context)

    def _run(self, model: Any, data: Any, context: TrainingContext) -> FitResult[Any]:
        family = self._family(model, data, context)
        steps = (self.pre, self.joint, self.post)
        pairs = zip(steps, family.default_steps, strict=True)
        pre, joint, post = (default if given is None else given for given, default in pairs)
        priors = self._priors([len(points) for points in candidate_sets(model)])
        family.train(model, "pre-train", pre)
        processes, trace = self._learn_inclusion(family, model, priors, joint)
        masks = self._draw(family, model, processes, priors)
        candidates = candidate_sets(model)
        pruned = model.prune(masks if isinstance(model, DeepGP) else masks[0])
        return FitResult(
            model=pruned,
            selections=tuple(
                Selection(q.inclusion, mask, trace, _alpha(prior), frontier=None)
                for q, mask, prior in zip(processes, masks, priors, strict=True)
            ),
            candidates=candidates,
            **family.finish(model, pruned, post),
        )

    def _priors(self, sizes: Sequence[int]) -> tuple[CardinalityPrior, ...]:
        """Return the prior of each candidate set."""
        if not isinstance(self.prior, CardinalityPrior):
            pairs = zip(sizes, per_layer(self.prior, len(sizes)), strict=True)
            return tuple(SquaredCardinality(K, alpha) for K, alpha in pairs)
        if list(sizes) != [self.prior.K]:
            raise InputError(
                f"`prior` must be over as many candidates as the model has, {list(sizes)}; it is "
                f"over {self.prior.K}. A number stands for a prior of that strength over all."
            )
        return (self.prior,)

    def _family(self, model: Any, data: Any, context: TrainingContext) -> "_Family":
        if isinstance(model, LatentModel):
            return _LatentFamily(self, data, context)
        family = _DeepFamily if isinstance(model, DeepGP) else _SparseFamily
        return family(self, data.require_dataset("`PaperSchedule`"), context)

    def _learn_inclusion(
        self,
        family: "_Family",
        model: AnyModel,
        priors: Sequence[CardinalityPrior],
        steps: int,
    ) -> tuple[list[Bernoulli], Float[Tensor, " T"]]:
        """Run Adam on the paper's objective, jointly in λ and all parameters of the model."""
        sizes, context = [prior.K for prior in priors], family.context
        like = next(model.parameters()).detach()
        logits = nn.Parameter(torch.logit(like.new_full((sum(sizes),), self.initial_inclusion)))
        estimates = Estimates(self.gradient, context.generator)

        def processes(logits: Tensor) -> list[Bernoulli]:
            return [Bernoulli(each) for each in logits.split(sizes)]

        def objective() -> Scalar:
            subsets = family.subset_objective(model)
            score = subsets.relaxed_value if self.gradient.scores_weights else subsets.value
            estimate = estimates.next(Bernoulli(logits), family.of_minibatch(score))
            pairs = zip(processes(logits), priors, strict=True)
            divergence = torch.stack([kl_divergence(q, prior) for q, prior in pairs]).sum()
            return estimate - divergence + log_prior(model)

        def on_step(step: int, value: float) -> None:
            estimates.record(value)
            inclusion = tuple(q.inclusion for q in processes(logits.detach()))
            context.notify(Progress.of(model, "inclusion", step, steps, value, inclusion))

        Adam(steps).maximise(
            objective,
            [
                (_trainable(model), self.learning_rate),
                ([logits], self.inclusion_learning_rate),
            ],
            scale=family.scale,
            on_step=on_step,
            checkpoint_log=context.checkpoint_log,
            memory={"batches": family.batches, "estimates": estimates},
            process_group=context.process_group,
        )
        return processes(logits.detach()), estimates.trace(like)

    @torch.no_grad()
    def _draw(
        self,
        family: "_Family",
        model: AnyModel,
        processes: Sequence[Bernoulli],
        priors: Sequence[CardinalityPrior],
    ) -> list[Tensor]:
        """Return the best of `draws` subsets sampled from q, by L(Z) + log p(Z)."""
        generator = family.context.generator
        drawn = [q.sample(self.draws, generator=generator) for q in processes]
        score = family.draw_scores(model, torch.cat(drawn, dim=1))
        if score is None:
            return [masks[0] for masks in drawn]
        for masks, prior in zip(drawn, priors, strict=True):
            score = score + prior.log_prob(masks, like=score)
        best = int(score.argmax())
        return [masks[best] for masks in drawn]


@final
class Estimates:
    """Successive estimates of E_q[L(Z)], with the estimator's state and the objective's trace."""

    def __init__(self, gradient: Gradient[Any], generator: torch.Generator) -> None:
        self._gradient, self._generator = gradient, generator
        self._state = gradient.init()
        self._trace: list[float] = []

    def next(self, q: Bernoulli, score: ScoreMasks | ScoreWeights) -> Scalar:
        """Return the next estimate, to be differentiated."""
        estimate = self._gradient.step(q, score, state=self._state, generator=self._generator)
        if bool(torch.isfinite(estimate.surrogate)):
            # Otherwise the step is rejected, and must leave no trace.
            self._state = estimate.state
        return estimate.surrogate

    def record(self, value: float) -> None:
        """Append the objective of a step, in nats."""
        self._trace.append(value)

    def trace(self, like: Tensor) -> Float[Tensor, " T"]:
        """Return the objective of every step."""
        return torch.tensor(self._trace, dtype=like.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the estimator's state and the trace."""
        return {"state": self._state, "trace": self._trace}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        saved, device = state["state"], self._generator.device
        self._state = saved.to(device=device) if isinstance(saved, Tensor) else saved
        self._trace = list(state["trace"])


class _Family(ABC):
    """The steps of the paper's schedule that differ between families of models."""

    default_steps: tuple[int, int, int]
    """Steps of pre-training, of the joint phase and of post-training."""
    batches: Any
    """Minibatches, whose state is saved with every phase."""
    scale: float
    """Divisor of the objective before differentiation."""

    def __init__(self, schedule: PaperSchedule, data: Any, context: TrainingContext) -> None:
        self.schedule, self.data, self.context = schedule, data, context

    @abstractmethod
    def train(self, model: Any, phase: str, steps: int) -> None:
        """Maximise the ELBO with all points of the model."""

    @abstractmethod
    def subset_objective(self, model: Any) -> Any:
        """Return the subset objective on the next minibatch."""

    @abstractmethod
    def draw_scores(self, model: Any, masks: Tensor) -> Tensor | None:
        """Return the ELBO of each drawn subset on all rows; None where a single draw needs none."""

    @abstractmethod
    def finish(self, model: Any, pruned: Any, steps: int) -> dict[str, Any]:
        """Post-train the pruned model, and return posterior, ELBO, upper bound and ELBO gap."""

    def _adam(self, model: Any, elbo: Callable[[], Scalar], phase: str, steps: int) -> None:
        """Maximise the ELBO of successive minibatches, and priors, by Adam."""
        context = self.context
        Adam(steps).maximise(
            lambda: elbo() + log_prior(model),
            [(_trainable(model), self.schedule.learning_rate)],
            scale=self.scale,
            on_step=lambda step, value: context.notify(
                Progress.of(model, phase, step, steps, value)
            ),
            checkpoint_log=context.checkpoint_log,
            memory={"batches": self.batches},
            process_group=context.process_group,
        )

    def of_minibatch(self, score: Any) -> Any:
        """Return a score of the whole minibatch from one of this process's rows."""
        return score


class _MinibatchFamily(_Family):
    """Models of rows with observed inputs, whose minibatches processes may share."""

    def __init__(self, schedule: PaperSchedule, data: Dataset, context: TrainingContext) -> None:
        super().__init__(schedule, data, context)
        self.batches = Minibatches(
            data, schedule.batch_size, context.generator, process_group=context.process_group
        )
        self.scale = self.batches.scale

    def of_minibatch(self, score: Any) -> Any:
        mean = self.batches.mean_over_processes
        return lambda masks: mean(lambda: score(masks), masks.shape[:1])


@final
class _SparseFamily(_MinibatchFamily):
    """`SparseGP` and `VariationalGP`."""

    default_steps = (200, 600, 200)

    def train(self, model: Any, phase: str, steps: int) -> None:
        batches = self.batches

        def elbo() -> Scalar:
            return batches.mean_over_processes(
                lambda: model.bound(batches.next(), total=batches.total)
            )

        self._adam(model, elbo, phase, steps)

    def subset_objective(self, model: Any) -> Any:
        return model.subset_objective(self.batches.next(), total=self.batches.total)

    def draw_scores(self, model: Any, masks: Tensor) -> Tensor | None:
        return model.subset_objective(self.data).value(masks) if len(masks) > 1 else None

    def finish(self, model: Any, pruned: Any, steps: int) -> dict[str, Any]:
        with torch.no_grad():
            reference = model.bound(self.data).item()
        self.train(pruned, "post-train", steps)
        with torch.no_grad():
            elbo = pruned.bound(self.data).item()
        posterior, evidence = pruned.posterior(self.data), pruned.evidence(self.data)
        return _outcome(posterior, elbo, reference - elbo, evidence)


@final
class _DeepFamily(_MinibatchFamily):
    """`DeepGP`, whose layers are first trained one by one."""

    default_steps = (1000, 500, 1500)

    def train(self, model: DeepGP, phase: str, steps: int) -> None:
        schedule, batches, context = self.schedule, self.batches, self.context
        # Gradients are not clipped, as in the paper; divergence is rolled back all the same.
        training = LayerTraining(schedule.learning_rate, schedule.samples, max_norm_ratio=inf)
        if phase == "pre-train":
            alone = schedule.layerwise
            train_layerwise(model, batches, training=training, steps=alone, context=context)
        training.run(model, batches, phase, steps=steps, context=context)

    def subset_objective(self, model: DeepGP) -> Any:
        batches = self.batches
        rows = batches.next()
        eps = model.base_samples(batches.rows, self.schedule.samples, self.context.generator)
        return model.subset_objective(rows, total=batches.total, eps=batches.local(eps))

    def draw_scores(self, model: DeepGP, masks: Tensor) -> Tensor | None:
        if len(masks) == 1:
            return None
        samples, generator = self.schedule.samples, self.context.generator
        return model.subset_objective(self.data, samples=samples, generator=generator).value(masks)

    def finish(self, model: DeepGP, pruned: DeepGP, steps: int) -> dict[str, Any]:
        data, generator = self.data, self.context.generator
        seed = draw_seed(generator)
        before = seeded_elbo(model, data, generator, seed=seed)
        gap = before - seeded_elbo(pruned, data, generator, seed=seed)
        self.train(pruned, "post-train", steps)
        elbo = estimate_elbo(pruned, data, generator=generator)
        return _outcome(pruned.posterior(), elbo, gap)


@final
class _LatentFamily(_Family):
    """GP-LVMs, which have the joint phase alone."""

    def __init__(
        self, schedule: PaperSchedule, table: MaskedMatrix, context: TrainingContext
    ) -> None:
        super().__init__(schedule, table, context)
        size = schedule.batch_size or table.N
        self.batches = table.batches(size, generator=context.generator)
        self.scale = float(table.count)
        self.default_steps = (0, 300 * max(1, table.N // size), 0)
        self._whole = size >= table.N

    def train(self, model: LatentModel, phase: str, steps: int) -> None:
        def elbo() -> Scalar:
            return model.bound(self.data, rows=self._rows(), generator=self.context.generator)

        if steps:
            self._adam(model, elbo, phase, steps)

    def subset_objective(self, model: LatentModel) -> Any:
        generator = self.context.generator
        return model.subset_objective(self.data, rows=self._rows(), generator=generator)

    def draw_scores(self, model: LatentModel, masks: Tensor) -> Tensor | None:
        return model.subset_objective(self.data, generator=self.context.generator).value(masks)

    def finish(self, model: LatentModel, pruned: LatentModel, steps: int) -> dict[str, Any]:
        generator = self.context.generator
        # The same draw of the latents before and after.
        state = generator.get_state()
        with torch.no_grad():
            reference = model.bound(self.data, generator=generator).item()
        generator.set_state(state)
        self.train(pruned, "post-train", steps)
        with torch.no_grad():
            elbo = pruned.bound(self.data, generator=generator).item()
            return _outcome(pruned.posterior(self.data), elbo, reference - elbo)

    def _rows(self) -> Tensor | None:
        return None if self._whole else next(self.batches)


def _outcome(
    posterior: Any, elbo: float, gap: float, evidence: Evidence | None = None
) -> dict[str, Any]:
    return {
        "posterior": posterior,
        "elbo": elbo,
        "evidence": evidence,
        "elbo_gap": max(gap, 0.0),
    }


def _trainable(model: AnyModel) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def _alpha(prior: CardinalityPrior) -> float | None:
    return prior.alpha if isinstance(prior, SquaredCardinality) else None
