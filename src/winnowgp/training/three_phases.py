"""The paper's training (appendix C): fit all candidates, learn which to keep, fit what is left."""

from dataclasses import dataclass, field
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from winnowgp.data import Dataset, Ranks, Source
from winnowgp.errors import InputError
from winnowgp.gradients import Gradient, ScoreFunction
from winnowgp.models import Model
from winnowgp.point_processes import Bernoulli, CardinalityPrior, SquaredCardinality, kl_divergence
from winnowgp.selection import Selection
from winnowgp.training.adam import Adam
from winnowgp.training.course import Course
from winnowgp.training.estimates import Estimates
from winnowgp.training.parts import Parts
from winnowgp.training.progress import Progress
from winnowgp.training.schedule import Fit, Schedule
from winnowgp.typing import Mask, Scalar


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

    def run(self, model: Model, data: Source, *, course: Course[Progress]) -> Fit[Model]:
        held = data.in_memory("`ThreePhases`")
        return self._run(model, held, ranks=data.ranks, course=course)

    def _run(
        self, model: Model, data: Dataset, *, ranks: Ranks, course: Course[Progress]
    ) -> Fit[Model]:
        if self.prior.K != model.K:
            raise InputError(
                f"the prior is over {self.prior.K} candidates and the model has {model.K}; "
                f"build it with K={model.K}."
            )
        parts = Parts(data, self.batch_size, course.generator, ranks=ranks)
        self._train(model, parts, "pre-train", steps=self.pre, course=course)
        q, trace = self._learn_inclusion(model, parts, course)
        mask = self._draw(model, data, q, course.generator)
        alpha = self.prior.alpha if isinstance(self.prior, SquaredCardinality) else None
        selection = Selection(q.inclusion, mask, trace, alpha, frontier=None)
        candidates = model.candidates.detach().clone()
        with torch.no_grad():
            reference = model.bound(data).item()
        pruned = model.prune(mask)
        self._train(pruned, parts, "post-train", steps=self.post, course=course)
        with torch.no_grad():
            bound = pruned.bound(data).item()
        return Fit(
            model=pruned,
            posterior=pruned.posterior(data),
            selection=selection,
            candidates=candidates,
            bound=bound,
            upper_bound=pruned.upper_bound(data),
            given_up=max(reference - bound, 0.0),
        )

    def _train(
        self,
        model: Model,
        parts: Parts,
        phase: str,
        *,
        steps: int,
        course: Course[Progress],
    ) -> None:
        """Adam on the ordinary bound with every point the model has."""

        def report(step: int, value: float) -> None:
            points = model.candidates.detach().clone()
            course.on_progress(Progress(phase, step, steps, value, None, points))

        groups = [(_trainable(model), self.learning_rate)]
        Adam(steps).maximise(
            lambda: parts.together(lambda: model.bound(parts.next(), total=parts.total)),
            groups,
            scale=parts.scale,
            on_step=report,
            journal=course.journal,
            memory={"parts": parts},
            ranks=parts.ranks,
        )

    def _learn_inclusion(
        self, model: Model, parts: Parts, course: Course[Progress]
    ) -> tuple[Bernoulli, Float[Tensor, " T"]]:
        """Adam on the paper's objective, jointly in λ and all that the model learns."""
        start = torch.full_like(model.candidates[:, 0], self.initial_inclusion)
        logits = nn.Parameter(torch.logit(start.detach()))
        estimates = Estimates(self.gradient, course.generator)

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
            course.on_progress(Progress("inclusion", step, self.process, value, inclusion, points))

        groups = [
            (_trainable(model), self.learning_rate),
            ([logits], self.process_learning_rate),
        ]
        Adam(self.process).maximise(
            objective,
            groups,
            scale=parts.scale,
            on_step=report,
            journal=course.journal,
            memory={"parts": parts, "estimates": estimates},
            ranks=parts.ranks,
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
