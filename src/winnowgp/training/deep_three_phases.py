"""The paper's training of deep models: fit all candidates, learn which to keep, fit the rest."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, final

import torch
from torch import Tensor, nn

from winnowgp.data import Dataset
from winnowgp.errors import InputError
from winnowgp.gradients import Gradient, ScoreFunction
from winnowgp.models import DeepGP
from winnowgp.point_processes import Bernoulli, SquaredCardinality, kl_divergence
from winnowgp.selection import Selection
from winnowgp.training.adam import Adam
from winnowgp.training.course import Course
from winnowgp.training.deep_fit import (
    DeepFit,
    DeepProgress,
    DeepSchedule,
    drawn_seed,
    estimated_bound,
    seeded_bound,
)
from winnowgp.training.estimates import Estimates
from winnowgp.training.layer_goal import LayerAlphas, layer_alphas
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.layerwise import train_layerwise
from winnowgp.training.parts import Parts
from winnowgp.typing import Scalar


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

    def run(self, model: DeepGP, data: Dataset, *, course: Course[DeepProgress]) -> DeepFit:
        generator = course.generator
        alphas = layer_alphas(self.alpha, len(model.layers))
        parts = Parts(data, self.batch_size, generator, ranks=course.ranks)
        # Gradients as long as they come, as in the paper; falls are undone all the same.
        training = LayerTraining(self.learning_rate, self.samples, longest=inf)
        train_layerwise(model, parts, training=training, steps=self.layerwise, course=course)
        training.run(model, parts, "pre-train", steps=self.pre, course=course)
        processes, trace = self._learn_inclusion(model, parts, alphas, course)
        masks = self._draw(model, data, processes, alphas, generator)
        pruned = model.prune(masks)
        seed = drawn_seed(generator)
        lost = seeded_bound(model, data, generator, seed=seed)
        lost -= seeded_bound(pruned, data, generator, seed=seed)
        training.run(pruned, parts, "post-train", steps=self.post, course=course)
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
            given_up=max(lost, 0.0),
        )

    def _learn_inclusion(
        self,
        model: DeepGP,
        parts: Parts,
        alphas: Sequence[float],
        course: Course[DeepProgress],
    ) -> tuple[list[Bernoulli], Tensor]:
        """Adam on the objective, jointly in λ of all layers and all that the model learns."""
        like = model.layers[0].candidates.detach()
        start = like.new_full((sum(model.sizes),), self.initial_inclusion)
        logits = nn.Parameter(torch.logit(start))
        estimates = Estimates(self.gradient, course.generator)

        def objective() -> Scalar:
            rows = parts.next()
            noise = parts.own(model.noise(parts.rows, self.samples, course.generator))
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
            course.on_progress(
                DeepProgress("inclusion", step, self.process, value, model, inclusion)
            )

        learnt = [p for p in model.parameters() if p.requires_grad]
        groups = [(learnt, self.learning_rate), ([logits], self.process_learning_rate)]
        Adam(self.process).maximise(
            objective,
            groups,
            scale=parts.scale,
            on_step=report,
            journal=course.journal,
            memory={"parts": parts, "estimates": estimates},
            ranks=parts.ranks,
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
