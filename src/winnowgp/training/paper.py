"""The paper's schedules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.data import Dataset, MaskedMatrix, ProcessGroup, Source
from winnowgp.errors import InputError
from winnowgp.gradients import Gradient, ScoreFunction
from winnowgp.models import DeepGP
from winnowgp.models.base import Model
from winnowgp.models.gplvm import Latent, LatentModel
from winnowgp.point_processes import Bernoulli, CardinalityPrior, SquaredCardinality, kl_divergence
from winnowgp.selection import Selection
from winnowgp.training.adam import Adam, Parts
from winnowgp.training.callbacks import Progress
from winnowgp.training.context import TrainingContext
from winnowgp.training.fast_deep import LayerTraining, train_layerwise
from winnowgp.training.goals import LayerAlphas, layer_alphas
from winnowgp.training.schedules import (
    DeepFit,
    DeepProgress,
    DeepSchedule,
    Fit,
    LatentFit,
    LatentSchedule,
    Schedule,
    drawn_seed,
    estimated_bound,
    seeded_bound,
)
from winnowgp.typing import Mask, Scalar, ScoreMasks, ScoreWeights

# Estimates of E_q[L(Z)], one after another, and what they leave behind.


@final
class Estimates:
    """A gradient with its memory, and the trace of the objective.

    Args:
        generator: where subsets come from.
    """

    def __init__(self, gradient: Gradient[Any], generator: torch.Generator) -> None:
        self._gradient, self._generator = gradient, generator
        self._state = gradient.init()
        self._trace: list[float] = []

    def next(self, q: Bernoulli, score: ScoreMasks | ScoreWeights) -> Scalar:
        """One more estimate, to be differentiated."""
        found = self._gradient.step(q, score, state=self._state, generator=self._generator)
        if bool(torch.isfinite(found.surrogate)):
            # Otherwise the step is taken back, and must not be remembered.
            self._state = found.state
        return found.surrogate

    def record(self, value: float) -> None:
        """The objective of a step, in nats."""
        self._trace.append(value)

    def trace(self, like: Tensor) -> Float[Tensor, " T"]:
        """The objective of every step."""
        return torch.tensor(self._trace, dtype=like.dtype)

    def state_dict(self) -> dict[str, Any]:
        """The gradient's memory and the trace."""
        return {"state": self._state, "trace": self._trace}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where others stood."""
        memory, device = state["state"], self._generator.device
        self._state = memory.to(device=device) if isinstance(memory, Tensor) else memory
        self._trace = list(state["trace"])


# The paper's training (appendix C): fit all candidates, learn which to keep, fit what is left.


@final
@dataclass(frozen=True, slots=True)
class ThreePhases(Schedule):
    """Pre-train, learn inclusion jointly with everything else, prune, post-train.

    The second phase maximises E_q[L(Z)] − KL[q(Z) ‖ p(Z)] over hyper-parameters, locations and λ at
    once. The kept set is then a draw from q, as in the paper; a single draw can be tens of nats
    worse than another, so `draws` may ask for the best of several.
    """

    prior: CardinalityPrior
    pre: int = 200
    process: int = 600
    post: int = 200
    learning_rate: float = 0.01
    """Of everything but λ."""
    process_learning_rate: float = 0.2
    """Of the logits of λ."""
    gradient: Gradient[Any] = field(default_factory=ScoreFunction)
    initial_inclusion: float = 0.5
    draws: int = 1
    batch_size: int | None = None
    """Rows a step looks at, for models that can learn from a part of them; all if None.

    Processes that share the data look at a part of them each.
    """

    def __post_init__(self) -> None:
        if min(self.pre, self.process, self.post) < 0 or self.draws < 1:
            raise InputError(
                "`pre`, `process` and `post` must be zero or more steps and `draws` at least one; "
                f"got {self.pre}, {self.process}, {self.post} and {self.draws}."
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"`batch_size` must be at least 1; got {self.batch_size}.")
        if not 0 < self.initial_inclusion < 1:
            raise InputError(
                f"`initial_inclusion` must lie within (0, 1); got {self.initial_inclusion}."
            )

    def run(self, model: Model, data: Source, *, context: TrainingContext[Progress]) -> Fit[Model]:
        held = data.in_memory("`ThreePhases`")
        return self._run(model, held, process_group=data.process_group, context=context)

    def _run(
        self,
        model: Model,
        data: Dataset,
        *,
        process_group: ProcessGroup,
        context: TrainingContext[Progress],
    ) -> Fit[Model]:
        if self.prior.K != model.K:
            raise InputError(
                f"the prior is over {self.prior.K} candidates and the model has {model.K}; "
                f"build it with K={model.K}."
            )
        parts = Parts(data, self.batch_size, context.generator, process_group=process_group)
        self._train(model, parts, "pre-train", steps=self.pre, context=context)
        q, trace = self._learn_inclusion(model, parts, context)
        mask = self._draw(model, data, q, context.generator)
        alpha = self.prior.alpha if isinstance(self.prior, SquaredCardinality) else None
        selection = Selection(q.inclusion, mask, trace, alpha, frontier=None)
        candidates = model.candidates.detach().clone()
        with torch.no_grad():
            reference = model.bound(data).item()
        pruned = model.prune(mask)
        self._train(pruned, parts, "post-train", steps=self.post, context=context)
        with torch.no_grad():
            bound = pruned.bound(data).item()
        return Fit(
            model=pruned,
            posterior=pruned.posterior(data),
            selection=selection,
            candidates=candidates,
            bound=bound,
            upper_bound=pruned.upper_bound(data),
            elbo_gap=max(reference - bound, 0.0),
        )

    def _train(
        self,
        model: Model,
        parts: Parts,
        phase: str,
        *,
        steps: int,
        context: TrainingContext[Progress],
    ) -> None:
        """Adam on the ordinary bound with every point the model has."""

        def report(step: int, value: float) -> None:
            points = model.candidates.detach().clone()
            context.on_progress(Progress(phase, step, steps, value, None, points))

        groups = [(_trainable(model), self.learning_rate)]
        Adam(steps).maximise(
            lambda: parts.together(lambda: model.bound(parts.next(), total=parts.total)),
            groups,
            scale=parts.scale,
            on_step=report,
            checkpoint_log=context.checkpoint_log,
            memory={"parts": parts},
            process_group=parts.process_group,
        )

    def _learn_inclusion(
        self, model: Model, parts: Parts, context: TrainingContext[Progress]
    ) -> tuple[Bernoulli, Float[Tensor, " T"]]:
        """Adam on the paper's objective, jointly in λ and all that the model learns."""
        start = torch.full_like(model.candidates[:, 0], self.initial_inclusion)
        logits = nn.Parameter(torch.logit(start.detach()))
        estimates = Estimates(self.gradient, context.generator)

        def objective() -> Scalar:
            q, subsets = Bernoulli(logits), model.subset_objective(parts.next(), total=parts.total)
            score = subsets.relaxed_value if self.gradient.scores_weights else subsets.value
            found = estimates.next(
                q, lambda masks: parts.together(lambda: score(masks), masks.shape[:1])
            )
            return found - kl_divergence(q, self.prior)

        def report(step: int, value: float) -> None:
            estimates.record(value)
            inclusion = torch.sigmoid(logits.detach())
            points = model.candidates.detach().clone()
            context.on_progress(Progress("inclusion", step, self.process, value, inclusion, points))

        groups = [
            (_trainable(model), self.learning_rate),
            ([logits], self.process_learning_rate),
        ]
        Adam(self.process).maximise(
            objective,
            groups,
            scale=parts.scale,
            on_step=report,
            checkpoint_log=context.checkpoint_log,
            memory={"parts": parts, "estimates": estimates},
            process_group=parts.process_group,
        )
        return Bernoulli(logits.detach()), estimates.trace(logits)

    @torch.no_grad()
    def _draw(self, model: Model, data: Dataset, q: Bernoulli, generator: torch.Generator) -> Mask:
        """The best of `draws` subsets sampled from q, by L(Z) + log p(Z)."""
        masks = q.sample(self.draws, generator=generator)
        value = model.subset_objective(data).value(masks)
        return masks[torch.argmax(value + self.prior.log_prob(masks, like=value))]


def _trainable(model: Model) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


# The paper's training of deep models: fit all candidates, learn which to keep, fit the rest.


@final
@dataclass(frozen=True, slots=True)
class DeepThreePhases(DeepSchedule):
    """Pre-train, learn inclusion in all layers jointly with everything else, prune, post-train.

    The middle phase maximises E_q[L(Z_1..Z_L)] − Σ_l KL[q(Z_l) ‖ p(Z_l)] by the score function over
    all layers at once: a draw is a subset for every layer, scored by one pass.
    """

    alpha: float | tuple[float, ...]
    """Strength of the prior, one for all layers or one for each."""
    layerwise: int = 200
    """Steps that each layer is trained alone first, as `train_layerwise` does."""
    pre: int = 1000
    process: int = 500
    post: int = 1500
    learning_rate: float = 0.01
    process_learning_rate: float = 0.2
    gradient: Gradient[Any] = field(default_factory=ScoreFunction)
    initial_inclusion: float = 0.5
    samples: int = 1
    """Propagated for each row at each step; every subset meets the same ones."""
    batch_size: int | None = None
    draws: int = 1
    """Subsets drawn at the end, of which the best is kept."""

    def __post_init__(self) -> None:
        if min(self.layerwise, self.pre, self.process, self.post) < 0 or self.draws < 1:
            raise InputError(
                "`layerwise`, `pre`, `process` and `post` must be zero or more steps and `draws` "
                f"at least one; got {self.layerwise}, {self.pre}, {self.process}, {self.post} and "
                f"{self.draws}."
            )
        LayerAlphas(self.alpha)
        if self.samples < 1 or (self.batch_size is not None and self.batch_size < 1):
            raise InputError(
                "`samples` and `batch_size` must be at least 1; "
                f"got {self.samples} and {self.batch_size}."
            )
        if not 0 < self.initial_inclusion < 1:
            raise InputError(
                f"`initial_inclusion` must lie within (0, 1); got {self.initial_inclusion}."
            )
        if self.gradient.scores_weights:
            raise InputError(
                "`gradient` must score subsets, not weights: relaxed subsets add noise that grows "
                "from layer to layer. Use `ScoreFunction`."
            )

    def run(
        self, model: DeepGP, data: Dataset, *, context: TrainingContext[DeepProgress]
    ) -> DeepFit:
        generator = context.generator
        alphas = layer_alphas(self.alpha, len(model.layers))
        parts = Parts(data, self.batch_size, generator, process_group=context.process_group)
        # Gradients as long as they come, as in the paper; falls are undone all the same.
        training = LayerTraining(self.learning_rate, self.samples, longest=inf)
        train_layerwise(model, parts, training=training, steps=self.layerwise, context=context)
        training.run(model, parts, "pre-train", steps=self.pre, context=context)
        processes, trace = self._learn_inclusion(model, parts, alphas, context)
        masks = self._draw(model, data, processes, alphas, generator)
        pruned = model.prune(masks)
        seed = drawn_seed(generator)
        lost = seeded_bound(model, data, generator, seed=seed)
        lost -= seeded_bound(pruned, data, generator, seed=seed)
        training.run(pruned, parts, "post-train", steps=self.post, context=context)
        bound = estimated_bound(pruned, data, generator=generator)
        triples = zip(processes, masks, alphas, strict=True)
        return DeepFit(
            model=pruned,
            posterior=pruned.posterior(),
            selections=tuple(
                Selection(q.inclusion, mask, trace, alpha, None) for q, mask, alpha in triples
            ),
            candidates=tuple(layer.candidates.detach().clone() for layer in model.layers),
            bound=bound,
            elbo_gap=max(lost, 0.0),
        )

    def _learn_inclusion(
        self,
        model: DeepGP,
        parts: Parts,
        alphas: Sequence[float],
        context: TrainingContext[DeepProgress],
    ) -> tuple[list[Bernoulli], Tensor]:
        """Adam on the objective, jointly in λ of all layers and all that the model learns."""
        like = model.layers[0].candidates.detach()
        start = like.new_full((sum(model.sizes),), self.initial_inclusion)
        logits = nn.Parameter(torch.logit(start))
        estimates = Estimates(self.gradient, context.generator)

        def objective() -> Scalar:
            rows = parts.next()
            noise = parts.own(model.noise(parts.rows, self.samples, context.generator))
            subsets = model.subset_objective(rows, total=parts.total, noise=noise)
            surrogate = estimates.next(
                Bernoulli(logits),
                lambda masks: parts.together(lambda: subsets.value(masks), masks.shape[:1]),
            )
            pairs = zip(_split(logits, model), alphas, strict=True)
            kl = [kl_divergence(q, SquaredCardinality(q.K, alpha)) for q, alpha in pairs]
            return surrogate - torch.stack(kl).sum()

        def report(step: int, value: float) -> None:
            estimates.record(value)
            inclusion = tuple(q.inclusion for q in _split(logits.detach(), model))
            context.on_progress(
                DeepProgress("inclusion", step, self.process, value, model, inclusion)
            )

        learnt = [p for p in model.parameters() if p.requires_grad]
        groups = [(learnt, self.learning_rate), ([logits], self.process_learning_rate)]
        Adam(self.process).maximise(
            objective,
            groups,
            scale=parts.scale,
            on_step=report,
            checkpoint_log=context.checkpoint_log,
            memory={"parts": parts, "estimates": estimates},
            process_group=parts.process_group,
        )
        return _split(logits.detach(), model), estimates.trace(like)

    @torch.no_grad()
    def _draw(
        self,
        model: DeepGP,
        data: Dataset,
        processes: Sequence[Bernoulli],
        alphas: Sequence[float],
        generator: torch.Generator,
    ) -> list[Tensor]:
        """The best of `draws` subsets sampled from q, by L(Z) + log p(Z); a mask `[K]` a layer."""
        drawn = [q.sample(self.draws, generator=generator) for q in processes]
        if self.draws == 1:
            return [masks[0] for masks in drawn]
        subsets = model.subset_objective(data, samples=self.samples, generator=generator)
        score = subsets.value(torch.cat(drawn, dim=1))
        for masks, alpha in zip(drawn, alphas, strict=True):
            score = score + SquaredCardinality(masks.shape[1], alpha).log_prob(masks, like=score)
        best = int(score.argmax())
        return [masks[best] for masks in drawn]


def _split(logits: Tensor, model: DeepGP) -> list[Bernoulli]:
    return [Bernoulli(part) for part in logits.split(model.sizes)]


# The paper's training of a GP-LVM: the point process is on from the first step to the last.


@final
@dataclass(frozen=True, slots=True)
class JointLatent(LatentSchedule):
    """Adam on E_q[L(Z)] − KL[q(Z) ‖ p(Z)] over latents, kernel, noise, locations and λ at once.

    Section 5.3 and appendix C of the paper: 300 epochs, four sampled subsets a step, the score
    function with a decaying average as baseline. As the latent cloud moves, points switch on where
    it arrives and off where it was. The kept set is a draw from q, the best of `draws`.
    """

    prior: CardinalityPrior
    epochs: int = 300
    """Passes over the rows; one step each unless there are minibatches."""
    learning_rate: float = 0.01
    """Of everything but λ."""
    process_learning_rate: float = 0.2
    """Of the logits of λ."""
    gradient: Gradient[Any] = field(default_factory=ScoreFunction)
    initial_inclusion: float = 0.5
    draws: int = 1
    batch_size: int | None = None
    """Rows a step looks at, for models that can learn from a part of them; all if None."""

    def __post_init__(self) -> None:
        if self.epochs < 0 or self.draws < 1 or (self.batch_size or 1) < 1:
            raise InputError(
                "`epochs` must be zero or more, `draws` and `batch_size` at least one; "
                f"got {self.epochs}, {self.draws} and {self.batch_size}."
            )
        if not 0 < self.initial_inclusion < 1:
            raise InputError(
                f"`initial_inclusion` must lie within (0, 1); got {self.initial_inclusion}."
            )

    def run(
        self, model: Latent, table: MaskedMatrix, *, context: TrainingContext[Progress]
    ) -> LatentFit[Latent]:
        if self.prior.K != model.K:
            raise InputError(
                f"the prior is over {self.prior.K} candidates and the model has {model.K}; "
                f"build it with K={model.K}."
            )
        start = torch.full_like(model.candidates[:, 0], self.initial_inclusion)
        logits = nn.Parameter(torch.logit(start.detach()))
        trace = self._learn(model, table, logits, context)
        generator = context.generator
        q = Bernoulli(logits.detach())
        with torch.no_grad():
            mask = self._draw(model, table, q, generator)
            # The same draw of the latents for both.
            state = generator.get_state()
            reference = model.bound(table, generator=generator).item()
            generator.set_state(state)
            kept = model.prune(mask)
            bound = kept.bound(table, generator=generator).item()
        alpha = self.prior.alpha if isinstance(self.prior, SquaredCardinality) else None
        return LatentFit(
            model=kept,
            posterior=kept.posterior(table),
            selection=Selection(q.inclusion, mask, trace, alpha, frontier=None),
            candidates=model.candidates.detach().clone(),
            bound=bound,
            elbo_gap=max(reference - bound, 0.0),
        )

    def _learn(
        self,
        model: LatentModel,
        table: MaskedMatrix,
        logits: nn.Parameter,
        context: TrainingContext[Progress],
    ) -> Tensor:
        generator = context.generator
        estimates = Estimates(self.gradient, generator)
        whole = self.batch_size is None or self.batch_size >= table.N
        batches = table.batches(self.batch_size or table.N, generator=generator)
        steps = self.epochs * max(1, table.N // (self.batch_size or table.N))

        def objective() -> Scalar:
            q, rows = Bernoulli(logits), None if whole else next(batches)
            subsets = model.subset_objective(table, rows=rows, generator=generator)
            score = subsets.relaxed_value if self.gradient.scores_weights else subsets.value
            return estimates.next(q, score) - kl_divergence(q, self.prior)

        def report(step: int, value: float) -> None:
            estimates.record(value)
            context.on_progress(
                Progress(
                    "joint",
                    step,
                    steps,
                    value,
                    torch.sigmoid(logits.detach()),
                    model.candidates.detach().clone(),
                    model.latents.mean.detach().clone(),
                )
            )

        learnt = [p for p in model.parameters() if p.requires_grad]
        groups = [(learnt, self.learning_rate), ([logits], self.process_learning_rate)]
        Adam(steps).maximise(
            objective,
            groups,
            scale=float(table.count),
            on_step=report,
            checkpoint_log=context.checkpoint_log,
            memory={"batches": batches, "estimates": estimates},
        )
        return estimates.trace(logits)

    def _draw(
        self, model: LatentModel, table: MaskedMatrix, q: Bernoulli, generator: torch.Generator
    ) -> Mask:
        """The best of `draws` subsets sampled from q, by L(Z) + log p(Z)."""
        masks = q.sample(self.draws, generator=generator)
        value = model.subset_objective(table, generator=generator).value(masks)
        return masks[torch.argmax(value + self.prior.log_prob(masks, like=value))]
