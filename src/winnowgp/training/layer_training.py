"""Training all layers of a deep model at once: Adam, and natural gradients in the last layer."""

from dataclasses import dataclass
from typing import final

import torch
from gpytorch.likelihoods import GaussianLikelihood
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.models import DeepGP, DeepLayer, layer_sites
from winnowgp.models.deep_gp import DeepEvaluation
from winnowgp.training.adam import Adam
from winnowgp.training.course import Course
from winnowgp.training.deep_fit import DeepProgress
from winnowgp.training.parts import Parts
from winnowgp.typing import Scalar

# Times that a natural step is shortened before it is not taken.
_SHORTENED = 5
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
    longest: float = 2.0
    """Times the running average of its length that a gradient may be; see `Adam`."""

    def run(
        self,
        model: DeepGP,
        parts: Parts,
        phase: str,
        *,
        steps: int,
        course: Course[DeepProgress],
    ) -> None:
        """Take `steps` steps."""
        last = model.layers[-1]
        chosen = [p for p in model.parameters() if p.requires_grad]
        others = [p for p in chosen if p is not last.q_mean and p is not last.q_factor]
        # Steps are Adam's: where it has nothing else to learn, q(u) is left to it.
        natural = self.natural_rate if 0 < len(others) == len(chosen) - 2 else None
        if natural is not None:
            chosen = others
        latest: list[tuple[Dataset, DeepEvaluation]] = []

        def objective() -> Scalar:
            rows = parts.next()
            noise = parts.own(model.noise(parts.rows, self.samples, course.generator))

            def bound() -> Scalar:
                found = model.evaluated(rows, total=parts.total, noise=noise)
                if natural is not None:
                    found.passed.last.mean.retain_grad()
                    found.passed.last.variance.retain_grad()
                    latest[:] = [(rows, found)]
                return found.bound

            return parts.together(bound)

        def on_step(step: int, value: float) -> None:
            if natural is not None:
                _improve(model, parts, *latest[0], rate=max(natural, 1 / step))
            course.on_progress(DeepProgress(phase, step, steps, value, model, None))

        Adam(steps, cooling=self.cooling, longest=self.longest, deepest=_DEEPEST).maximise(
            objective,
            [(chosen, self.learning_rate)],
            scale=parts.scale,
            on_step=on_step,
            journal=course.journal,
            memory={"parts": parts, "last layer": last},
            ranks=parts.ranks,
        )


@torch.no_grad()
def _improve(
    model: DeepGP, parts: Parts, rows: Dataset, found: DeepEvaluation, *, rate: float
) -> None:
    """A natural-gradient step on the last layer's q(u), from gradients of −bound / scale.

    Where noise is not Gaussian a whole step can lead far away: it is shortened until it gains.
    """
    last, top, ranks = model.layers[-1], found.passed.last, parts.ranks
    # Processes add up their sites, of which each has taken its rows for the whole minibatch.
    scale = parts.scale / ranks.of
    slope, curvature = top.mean.grad, top.variance.grad
    assert slope is not None
    assert curvature is not None
    precision = (2 * scale * curvature).clamp_min(0)
    inputs = found.passed.inputs[-1]
    sites = layer_sites(last, inputs, top.mean, -scale * slope, precision)
    old = last.q_mean.clone(), last.q_factor.clone()
    certain = isinstance(model.likelihood, GaussianLikelihood)
    before = 0.0 if certain else parts.together(lambda: found.fit - last.points().kl())

    def worth() -> Scalar:
        return parts.together(lambda: model.last_bound(rows, inputs, total=parts.total))

    for _ in range(_SHORTENED):
        try:
            _set(last, *ranks.led(*sites.natural_step(last, rate=rate, ranks=ranks)))
            if certain or worth() >= before:
                return
        except NotPositiveDefiniteError:
            # Like any step that cannot be computed: not taken.
            pass
        _set(last, *old)
        rate *= 0.25


def _set(layer: DeepLayer, q_mean: Tensor, q_factor: Tensor) -> None:
    layer.q_mean.copy_(q_mean)
    layer.q_factor.copy_(q_factor)
