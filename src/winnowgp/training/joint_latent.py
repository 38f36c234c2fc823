"""The paper's training of a GP-LVM: the point process is on from the first step to the last."""

from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from winnowgp.data import Entries
from winnowgp.errors import InputError
from winnowgp.gradients import Gradient, ScoreFunction
from winnowgp.models import Latent, LatentModel
from winnowgp.point_processes import Bernoulli, CardinalityPrior, SquaredCardinality, kl_divergence
from winnowgp.selection import Selection
from winnowgp.training.adam import Adam
from winnowgp.training.course import Course
from winnowgp.training.estimates import Estimates
from winnowgp.training.latent_schedule import LatentFit, LatentSchedule
from winnowgp.training.progress import Progress
from winnowgp.typing import Mask, Scalar


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

    def run(self, model: Latent, table: Entries, *, course: Course[Progress]) -> LatentFit[Latent]:
        if self.prior.K != model.K:
            raise InputError(
                f"the prior is over {self.prior.K} candidates and the model has {model.K}; "
                f"build it with K={model.K}."
            )
        start = torch.full_like(model.candidates[:, 0], self.initial_inclusion)
        logits = nn.Parameter(torch.logit(start.detach()))
        trace = self._learn(model, table, logits, course)
        generator = course.generator
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
            given_up=max(reference - bound, 0.0),
        )

    def _learn(
        self,
        model: LatentModel,
        table: Entries,
        logits: nn.Parameter,
        course: Course[Progress],
    ) -> Tensor:
        generator = course.generator
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
            course.on_progress(
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
            journal=course.journal,
            memory={"batches": batches, "estimates": estimates},
        )
        return estimates.trace(logits)

    def _draw(
        self, model: LatentModel, table: Entries, q: Bernoulli, generator: torch.Generator
    ) -> Mask:
        """The best of `draws` subsets sampled from q, by L(Z) + log p(Z)."""
        masks = q.sample(self.draws, generator=generator)
        value = model.subset_objective(table, generator=generator).value(masks)
        return masks[torch.argmax(value + self.prior.log_prob(masks, like=value))]
