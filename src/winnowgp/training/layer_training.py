"""Training of deep GPs by Adam with natural gradients, layer by layer and all layers together."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf, isfinite
from typing import final

import torch
from gpytorch.likelihoods import GaussianLikelihood, SoftmaxLikelihood
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import one_hot

from winnowgp.data import Dataset, Source
from winnowgp.errors import NotPositiveDefiniteError, TrainingError
from winnowgp.models import DeepGP, DeepLayer, SparseGP
from winnowgp.models.deep_gp import DeepEvaluation, estimate_elbo
from winnowgp.models.deep_layer import layer_inputs, linear_map
from winnowgp.models.deep_sites import hidden_precisions, layer_sites
from winnowgp.models.priors import log_prior
from winnowgp.training.adam import Adam, Gradient, Minibatches
from winnowgp.training.callbacks import Callbacks, Progress
from winnowgp.training.checkpoint import NO_CHECKPOINT_LOG, CheckpointLog
from winnowgp.training.cuda_graphs import CapturedPass, captured_pass
from winnowgp.training.initialization import noise_of, set_noise, trainable_lengthscales
from winnowgp.training.lbfgs import Stop
from winnowgp.training.schedules import TrainingContext, training_context
from winnowgp.training.scoring import optimise_evidence
from winnowgp.typing import Scalar

# Number of times that a natural-gradient step is shortened before it is skipped.
_SHORTENED = 5
# Largest number of rows of the exact evidence that a deep GP starts from.
_EVIDENCE_ROWS = 1000
# Rollback threshold of Adam, in nats per observation below the running average.
_ROLLBACK = 1.0
# Largest number of steps, and largest share of a phase, over which the learning rates increase.
_WARM_UP, _WARM_UP_SHARE = 30, 0.1
# Fewest steps of a phase that is recorded as a CUDA graph.
_FEWEST_RECORDED = 30


@final
@dataclass(frozen=True, slots=True)
class LayerTraining:
    """Adam on the ELBO of a deep GP with all of its points, with optional natural gradients.

    The last layer's q(u) can follow the natural gradient, whose unit steps are exact for Gaussian
    noise given the layers below (Salimbeni et al. 2018). The covariances of hidden layers can
    follow it with Gauss-Newton precisions (`models.deep_sites`), which cost one more backward pass
    through the layers above for each latent function; Adam, whose steps are equally long in all
    entries of a factor, adds noise to every function value. Both reuse the gradients of Adam's
    pass; the kernels of these layers are evaluated once more.
    """

    learning_rate: float
    samples: int = 1
    """Number of samples propagated for each row in each step."""
    natural_rate: float | None = None
    """Rate of the natural-gradient steps on the last layer's q(u); None leaves q(u) to Adam."""
    hidden_rate: float | None = None
    """Rate of the natural-gradient steps on the covariances of the hidden layers; None leaves them
    to Adam."""
    cooling: float = 1.0
    """Factor that the learning rate decreases to over the last third of the steps."""
    max_norm_ratio: float = 2.0
    """Largest norm of a gradient relative to its running average; see `Adam`."""

    def run(
        self,
        model: DeepGP,
        batches: Minibatches,
        phase: str,
        *,
        steps: int,
        context: TrainingContext,
    ) -> None:
        """Take `steps` steps."""
        rates = self._natural_rates(model)
        natural = [q for number in rates for q in _natural_parameters(model, number)]
        excluded = {id(q) for q in natural}
        parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in excluded]
        adam = Adam(
            steps,
            warm_up=min(_WARM_UP, int(_WARM_UP_SHARE * steps)),
            cooling=self.cooling,
            max_norm_ratio=self.max_norm_ratio,
            rollback_threshold=_ROLLBACK,
        )
        latest: list[_NaturalPass] = []
        recorded = self._recorded(model, batches, parameters, rates, steps)
        untrained = not _is_trained(model)

        def objective() -> Scalar | Gradient:
            rows = batches.next()
            eps = batches.local(model.base_samples(batches.rows, self.samples, context.generator))
            latest.clear()
            gradient = None if recorded is None else recorded.gradient(rows, eps)
            if gradient is not None:
                return gradient

            def elbo() -> Scalar:
                evaluation = model.evaluated(rows, total=batches.total, eps=eps)
                if rates:
                    latest[:] = [_NaturalPass.of(model, batches, rows, evaluation, list(rates))]
                return evaluation.bound

            return batches.mean_over_processes(elbo) + log_prior(model)

        def on_step(step: int, value: float) -> None:
            for number, rate in rates.items():
                # Noise of minibatches and samples is averaged over 1 / rate steps. Longer first
                # steps are for a q(u) that has not been learnt: they would replace another one by
                # the optimum for a single sample.
                cooled = rate * adam.rate_factor(step - 1)
                last = number == len(model.layers) - 1
                natural_rate = max(cooled, 1 / step) if last and untrained else cooled
                if recorded is not None and not latest:
                    recorded.step(natural_rate)
                else:
                    latest[0].step(number, rate=natural_rate)
            context.notify(Progress.of(model, phase, step, steps, value))

        adam.maximise(
            objective,
            [(parameters, self.learning_rate)],
            scale=batches.scale,
            on_step=on_step,
            checkpoint_log=context.checkpoint_log,
            memory={"batches": batches, "natural": nn.ParameterList(natural)},
            process_group=batches.process_group,
        )

    def _recorded(
        self,
        model: DeepGP,
        batches: Minibatches,
        parameters: Sequence[Tensor],
        rates: dict[int, float],
        steps: int,
    ) -> CapturedPass | None:
        """Return the pass as a CUDA graph; None where it does not pay or cannot be recorded."""
        gaussian = isinstance(model.likelihood, GaussianLikelihood)
        last_alone = list(rates) == [len(model.layers) - 1]
        single = batches.process_group.world_size == 1
        if not (gaussian and last_alone and single and steps >= _FEWEST_RECORDED):
            return None
        return captured_pass(model, batches, parameters, samples=self.samples)

    def _natural_rates(self, model: DeepGP) -> dict[int, float]:
        """Return the rate of every layer whose q(u) follows the natural gradient, by number."""
        *hidden, last = range(len(model.layers))
        given = {**dict.fromkeys(hidden, self.hidden_rate), last: self.natural_rate}
        rates = {
            number: rate
            for number, rate in given.items()
            if rate is not None and all(q.requires_grad for q in _natural_parameters(model, number))
        }
        learnt = sum(p.requires_grad for p in model.parameters())
        # Adam drives the loop: where it has nothing else to learn, q(u) is left to it.
        natural = sum(len(_natural_parameters(model, number)) for number in rates)
        return rates if learnt > natural else {}


def _natural_parameters(model: DeepGP, number: int) -> list[nn.Parameter]:
    """Return those parameters of a layer's q(u) that follow the natural gradient.

    The outputs of a hidden layer act on the targets together. Natural steps of their means, which
    treat each output as if it acted alone, overshoot; their covariances do not.
    """
    layer = model.layers[number]
    last = number == len(model.layers) - 1
    return [layer.q_mean, layer.q_factor] if last else [layer.q_factor]


@final
@dataclass(frozen=True, slots=True)
class _NaturalPass:
    """A forward pass, from whose gradients in q(f) natural-gradient steps on q(u) are taken."""

    model: DeepGP
    batches: Minibatches
    rows: Dataset
    evaluation: DeepEvaluation
    precisions: list[Tensor]
    """Site precisions of the outputs of every layer; those of hidden layers if they are needed."""

    @classmethod
    def of(
        cls,
        model: DeepGP,
        batches: Minibatches,
        rows: Dataset,
        evaluation: DeepEvaluation,
        numbers: Sequence[int],
    ) -> "_NaturalPass":
        """Prepare steps of the layers with these numbers, before the gradient of −ELBO / scale."""
        passed, last = evaluation.passed, len(model.layers) - 1
        (curvature,) = torch.autograd.grad(
            evaluation.fit, [passed.last.variance], retain_graph=True
        )
        # Sites are summed over processes; each process scales its own rows to the whole minibatch.
        top = (-2 * curvature / batches.process_group.world_size).clamp_min(0)
        hidden = [top] * last
        if any(number < last for number in numbers):
            hidden = hidden_precisions(model, passed.last.mean, passed.inputs[1:], top)
        # After the gradients above, which would be retained as well.
        for number in numbers:
            passed.outputs[number].mean.retain_grad()
        return cls(model, batches, rows, evaluation, [*hidden, top])

    @torch.no_grad()
    def step(self, number: int, *, rate: float) -> None:
        """Take a natural-gradient step on a layer's q(u).

        Where the noise is not Gaussian a full step of the last layer can overshoot: it is shortened
        until it gains.
        """
        model, process_group = self.model, self.batches.process_group
        layer, mean = model.layers[number], self.evaluation.passed.outputs[number].mean
        assert mean.grad is not None
        slope = -self.batches.scale / process_group.world_size * mean.grad
        inputs = self.evaluation.passed.inputs[number]
        whitened = self.evaluation.passed.whitened[number]
        sites = layer_sites(layer, inputs, mean, slope, self.precisions[number])
        old = layer.q_mean.clone(), layer.q_factor.clone()
        last = number == len(model.layers) - 1
        unchecked = not last or isinstance(model.likelihood, GaussianLikelihood)
        before = 0.0 if unchecked else self._mean(lambda: self.evaluation.fit - layer.points().kl())
        for _ in range(_SHORTENED):
            try:
                step = sites.natural_step(
                    layer, rate=rate, whitened=whitened, process_group=process_group
                )
                q_mean, q_factor = process_group.broadcast(*step)
                _set(layer, q_mean if last else old[0], q_factor)
                if unchecked or self._mean(lambda: self._last_bound(inputs)) >= before:
                    return
            except NotPositiveDefiniteError:
                # A step that cannot be computed is not taken.
                pass
            _set(layer, *old)
            rate *= 0.25

    def _last_bound(self, inputs: Tensor) -> Scalar:
        return self.model.last_bound(self.rows, inputs, total=self.batches.total)

    def _mean(self, nats: Callable[[], Scalar]) -> Scalar:
        return self.batches.mean_over_processes(nats)


def _set(layer: DeepLayer, q_mean: Tensor, q_factor: Tensor) -> None:
    layer.q_mean.copy_(q_mean)
    layer.q_factor.copy_(q_factor)


Initializer = Callable[[Float[Tensor, "N D"], int, torch.Generator], Float[Tensor, "J D"]]

"""A function of a layer's inputs, a number of points and a generator that returns the initial
locations; J is that number or less."""


@torch.no_grad()
def random_rows(
    inputs: Float[Tensor, "N D"], count: int, generator: torch.Generator
) -> Float[Tensor, "J D"]:
    """Return `count` different rows; all of them if there are fewer."""
    order = torch.randperm(len(inputs), generator=generator, device=inputs.device)
    return inputs[order[:count]]


def train_layerwise(
    model: DeepGP,
    batches: Minibatches,
    *,
    training: LayerTraining,
    steps: int,
    context: TrainingContext,
    initializer: Initializer = random_rows,
) -> None:
    """Train the layers in order, each for `steps` steps on the mean outputs of those before it.

    The last layer is trained on the targets. A hidden layer without a linear mean function is
    trained by regression on the targets (one column per class) and, if it has more outputs, on
    principal components of its inputs: the next layer then starts from inputs that the targets
    depend on. A hidden layer with a linear mean function provides such inputs already, and is not
    trained. Zero steps change nothing, nor does a model whose last layer has been trained.

    Args:
        batches: minibatches of the rows.
        initializer: initial locations of each layer's candidates after the first layer, unless
            they are frozen.
    """
    if steps == 0 or _is_trained(model):
        return
    data, layers = batches.data, model.layers
    inputs = data.X
    for number, layer in enumerate(layers, start=1):
        last = number == len(layers)
        if last or not bool(layer.slope.any()):
            likelihood = model.likelihood if last else GaussianLikelihood()
            Y = data.Y if last else _hidden_targets(data, inputs, layer.P, model)
            alone = DeepGP([layer], likelihood=likelihood, targets=Y.shape[1])
            layer_batches = batches.with_data(Dataset(inputs, Y, data.weights))
            training.run(alone, layer_batches, f"layer {number}", steps=steps, context=context)
            layer.load_state_dict(alone.layers[0].state_dict())
            if last:
                model.likelihood.load_state_dict(alone.likelihood.state_dict())
        if not last:
            inputs = layer_inputs(
                _mean(layer, inputs), data.X, skip_connections=model.skip_connections
            )
            following = layers[number]
            if following.candidates.requires_grad:
                locations = initializer(inputs, following.K, context.generator)
                with torch.no_grad():
                    following.candidates[: len(locations)].copy_(locations)


def _is_trained(model: DeepGP) -> bool:
    """Return whether the q(u) of the last layer has been learnt."""
    return bool(model.layers[-1].q_mean.any())


def _hidden_targets(
    data: Dataset, inputs: Float[Tensor, "N D"], width: int, model: DeepGP
) -> Float[Tensor, "N P"]:
    Y = data.Y
    if isinstance(model.likelihood, SoftmaxLikelihood):
        Y = one_hot(Y[:, 0].long(), model.likelihood.num_classes).to(Y)
    Y = (Y - Y.mean(0)) / Y.std(0, correction=0).clamp_min(1e-12)
    spare = max(width - Y.shape[1], 0)
    return torch.cat([Y[:, :width], inputs @ linear_map(inputs, spare)], dim=1)


@torch.no_grad()
def _mean(layer: DeepLayer, inputs: Float[Tensor, "N D"]) -> Float[Tensor, "N P"]:
    points = layer.points()
    return torch.cat([layer.marginals(rows, points).mean for rows in inputs.split(4096)])


def start_from_shallow(model: DeepGP, data: Dataset, *, seed: int) -> None:
    """Set kernel and noise of the last layer to those of a shallow GP on the layer's first inputs.

    Hyper-parameters maximise the exact evidence of up to `_EVIDENCE_ROWS` rows. Where hidden layers
    start as linear functions, the deep GP then starts close to the shallow one. Hidden layers
    receive its lengthscales if they have as many inputs.

    Args:
        model: an initial model with Gaussian noise; it is changed.
        data: training rows.
        seed: of the rows that are used.
    """
    *hidden, last = model.layers
    order = torch.randperm(data.N, generator=torch.Generator().manual_seed(seed))
    rows = data.part(order[:_EVIDENCE_ROWS].to(data.device)).to(last.candidates.device)
    inputs = rows.X
    for layer in hidden:
        inputs = layer_inputs(_mean(layer, inputs), rows.X, skip_connections=model.skip_connections)
    noise = noise_of(model.likelihood)
    assert noise is not None
    shallow = SparseGP(last.kernel, inputs[:0], noise=noise.value.mean().item())
    stop = Stop(gain=1e-3 * rows.observations, window=10, iterations=60)
    maximum = optimise_evidence(
        shallow, Dataset(inputs, rows.Y, rows.weights), stop, NO_CHECKPOINT_LOG
    )
    if not isfinite(maximum.value):
        return
    last.kernel.load_state_dict(shallow.kernel.state_dict())
    set_noise(model.likelihood, shallow.noise.detach().expand_as(noise.value))
    for layer in hidden:
        pairs = zip(
            trainable_lengthscales(layer.kernel), trainable_lengthscales(last.kernel), strict=False
        )
        for own, other in pairs:
            if own.lengthscale.shape == other.lengthscale.shape:
                own.lengthscale = other.lengthscale.detach()


def select_start(
    starts: Sequence[DeepGP],
    data: Source,
    *,
    layerwise: int,
    steps: int,
    samples: int = 1,
    batch_size: int | None,
    generator: torch.Generator,
    callbacks: Callbacks = (),
    checkpoint: CheckpointLog | None = None,
) -> DeepGP:
    """Return the start, unchanged, whose copy has the highest ELBO after a short training.

    The ELBO of a deep GP has many optima, and the initial hidden functions decide which one is
    reached: the identity is the better start on tables of many columns, layers trained on the
    targets where a function of few inputs jumps (on a square wave by 150 nats). Layers trained on
    the targets often lead at first only: the two best starts are therefore trained as long again.

    Args:
        data: rows in memory; processes that share them use a part of each minibatch each.
        layerwise: number of steps that each layer is trained alone.
        steps: number of steps that all layers are then trained together, at a time.
        checkpoint: open log of the fit that this is a part of.
    """
    process_group, rows = data.process_group, data.require_dataset("a deep model")
    training = LayerTraining(0.03, samples, natural_rate=0.3)

    batches = Minibatches(rows, batch_size, generator, process_group=process_group)

    def trained_elbo(model: DeepGP, context: TrainingContext, *, alone: int) -> float:
        try:
            train_layerwise(model, batches, training=training, steps=alone, context=context)
            training.run(model, batches, "start", steps=steps, context=context)
            elbo = estimate_elbo(model, rows, generator=generator)
        except (TrainingError, NotPositiveDefiniteError):
            # The parameters after the last step of a phase have not been evaluated before.
            elbo = -inf
        elbo = process_group.broadcast_object(elbo)
        return elbo if isfinite(elbo) else -inf

    models = [deepcopy(start) for start in starts]
    with training_context(
        checkpoint, generator=generator, callbacks=callbacks, process_group=process_group
    ) as context:
        elbos = [trained_elbo(model, context, alone=layerwise) for model in models]
        best = sorted(range(len(starts)), key=lambda number: -elbos[number])[:2]
        for number in best:
            if elbos[number] > -inf:
                elbos[number] = trained_elbo(models[number], context, alone=0)
        return starts[max(best, key=lambda number: elbos[number])]
