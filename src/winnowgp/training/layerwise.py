"""Layers trained one after another, each as a shallow model, before all are trained together."""

from collections.abc import Callable

import torch
from gpytorch.likelihoods import GaussianLikelihood, SoftmaxLikelihood
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot

from winnowgp.data import Dataset
from winnowgp.models import DeepGP, DeepLayer
from winnowgp.models.deep_start import linear_map
from winnowgp.models.propagation import layer_inputs
from winnowgp.training.course import Course
from winnowgp.training.deep_fit import DeepProgress
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.parts import Parts

Place = Callable[[Float[Tensor, "N D"], int, torch.Generator], Float[Tensor, "J D"]]
"""Where so many points of a layer begin, given what the layer sees; J is that number or less."""


@torch.no_grad()
def random_rows(
    inputs: Float[Tensor, "N D"], count: int, generator: torch.Generator
) -> Float[Tensor, "J D"]:
    """Different rows, as far as there are so many."""
    order = torch.randperm(len(inputs), generator=generator, device=inputs.device)
    return inputs[order[:count]]


def train_layerwise(
    model: DeepGP,
    parts: Parts,
    *,
    training: LayerTraining,
    steps: int,
    course: Course[DeepProgress],
    place: Place = random_rows,
) -> None:
    """Train the layers in order, each for `steps` steps on the mean outputs of those before it.

    The last layer learns the targets. So does a hidden one without a linear map of its own, by
    regression (one column for each class), and with outputs to spare the principal components of
    its inputs: the next layer then begins with something that the targets depend on. A hidden layer
    around the identity begins with that already, and is left as it is. No steps change nothing.

    Args:
        parts: of the rows that all layers are to learn.
        place: where candidates of each layer after the first begin, unless frozen.
    """
    if steps == 0:
        return
    data, layers = parts.data, model.layers
    inputs = data.X
    for number, layer in enumerate(layers, start=1):
        last = number == len(layers)
        if last or not bool(layer.slope.any()):
            likelihood = model.likelihood if last else GaussianLikelihood()
            Y = data.Y if last else _hidden_targets(data, inputs, layer.P, model)
            alone = DeepGP([layer], likelihood=likelihood, targets=Y.shape[1])
            seen = parts.alike(Dataset(inputs, Y, data.weights))
            training.run(alone, seen, f"layer {number}", steps=steps, course=course)
            layer.load_state_dict(alone.layers[0].state_dict())
            if last:
                model.likelihood.load_state_dict(alone.likelihood.state_dict())
        if not last:
            inputs = layer_inputs(_mean(layer, inputs), data.X, connected=model.connected)
            if layers[number].candidates.requires_grad:
                _put(layers[number], place(inputs, layers[number].K, course.generator))


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


@torch.no_grad()
def _put(layer: DeepLayer, places: Float[Tensor, "J D"]) -> None:
    layer.candidates[: len(places)].copy_(places)
