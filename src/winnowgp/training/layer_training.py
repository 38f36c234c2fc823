"""Training all layers of a deep model at once: Adam, and natural gradients in the last layer."""

from dataclasses import dataclass
from typing import final

import torch

from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.models import DeepGP, layer_sites
from winnowgp.models.deep_gp import DeepEvaluation
from winnowgp.training.adam import Adam
from winnowgp.training.deep_fit import DeepProgress, OnDeepProgress
from winnowgp.training.journal import UNKEPT, Journal
from winnowgp.training.parts import Parts
from winnowgp.typing import Scalar

# Of the running average of gradients' lengths.
_LONGEST = 2.0
# Nats a row below the running average.
_DEEPEST = 1.0


@final
@dataclass(frozen=True, slots=True)
class LayerTraining:
    """Steps on the ordinary bound with every point the model has.

    The last layer's q(u) can follow the natural gradient instead of Adam's, whole steps of which
    are exact for Gaussian noise given the layers below (Salimbeni et al. 2018). It reuses the
    gradients of the pass that the others need; the last layer's kernel is evaluated once more.
    """

    learning_rate: float
    samples: int = 1
    """Propagated for each row at each step."""
    natural_rate: float | None = None
    """Of the last layer's q(u); None leaves it to Adam."""
    cooling: float = 1.0
    """What share the learning rate falls to over the last third of the steps."""

    def run(
        self,
        model: DeepGP,
        parts: Parts,
        phase: str,
        *,
        steps: int,
        generator: torch.Generator,
        on_progress: OnDeepProgress,
        journal: Journal = UNKEPT,
    ) -> None:
        """Take `steps` steps."""
        last = model.layers[-1]
        natural = self.natural_rate if last.q_mean.requires_grad else None
        chosen = [p for p in model.parameters() if p.requires_grad]
        if natural is not None:
            chosen = [p for p in chosen if p is not last.q_mean and p is not last.q_factor]
        latest: list[DeepEvaluation] = []

        def objective() -> Scalar:
            rows = parts.next()
            noise = model.noise(rows.N, self.samples, generator)
            found = model.evaluated(rows, total=parts.total, noise=noise)
            if natural is not None:
                found.passed.last.mean.retain_grad()
                found.passed.last.variance.retain_grad()
                latest[:] = [found]
            return found.bound

        def on_step(step: int, value: float) -> None:
            if natural is not None:
                _improve(model, latest[0], scale=parts.scale, rate=max(natural, 1 / step))
            on_progress(DeepProgress(phase, step, steps, value, model, None))

        Adam(steps, cooling=self.cooling, longest=_LONGEST, deepest=_DEEPEST).maximise(
            objective,
            [(chosen, self.learning_rate)],
            scale=parts.scale,
            on_step=on_step,
            journal=journal,
            memory={"parts": parts, "last layer": last},
        )


@torch.no_grad()
def _improve(model: DeepGP, found: DeepEvaluation, *, scale: float, rate: float) -> None:
    """A natural-gradient step on the last layer's q(u), from gradients of −bound / scale."""
    last, top = model.layers[-1], found.passed.last
    slope, curvature = top.mean.grad, top.variance.grad
    assert slope is not None
    assert curvature is not None
    precision = (2 * scale * curvature).clamp_min(0)
    sites = layer_sites(last, found.passed.inputs[-1], top.mean, -scale * slope, precision)
    try:
        q_mean, q_factor = sites.natural_step(last, rate=rate)
    except NotPositiveDefiniteError:
        # Like any step that cannot be computed: not taken.
        return
    last.q_mean.copy_(q_mean)
    last.q_factor.copy_(q_factor)
