"""Layers trained one after another, each as a shallow model, before all are trained together."""

import torch
from gpytorch.likelihoods import GaussianLikelihood, SoftmaxLikelihood
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot

from winnowgp.data import Dataset
from winnowgp.models import DeepGP, DeepLayer
from winnowgp.models.deep_start import linear_map
from winnowgp.models.propagation import layer_inputs
from winnowgp.training.deep_fit import OnDeepProgress
from winnowgp.training.journal import UNKEPT, Journal
from winnowgp.training.layer_training import LayerTraining
from winnowgp.training.parts import Parts


def train_layerwise(
    model: DeepGP,
    data: Dataset,
    *,
    training: LayerTraining,
    steps: int,
    batch_size: int | None,
    generator: torch.Generator,
    on_progress: OnDeepProgress,
    journal: Journal = UNKEPT,
) -> None:
    """Train the layers in order, each for `steps` steps on the mean outputs of those before it.

    The last layer learns the targets. So does a hidden one without a linear map of its own, by
    regression (one column for each class), and with outputs to spare the principal components of
    its inputs: the next layer then begins with something that the targets depend on. A hidden layer
    around the identity begins with that already, and is left as it is. Candidates begin at rows of
    what their layer sees, unless frozen. No steps change nothing.
    """
    if steps == 0:
        return
    inputs, layers = data.X, model.layers
    told = {"generator": generator, "on_progress": on_progress, "journal": journal}
    for number, layer in enumerate(layers, start=1):
        last = number == len(layers)
        if last or not bool(layer.slope.any()):
            likelihood = model.likelihood if last else GaussianLikelihood()
            Y = data.Y if last else _hidden_targets(data, inputs, layer.P, model)
            alone = DeepGP([layer], likelihood=likelihood, targets=Y.shape[1])
            parts = Parts(Dataset(inputs, Y, data.weights), batch_size, generator)
            training.run(alone, parts, f"layer {number}", steps=steps, **told)
            layer.load_state_dict(alone.layers[0].state_dict())
            if last:
                model.likelihood.load_state_dict(alone.likelihood.state_dict())
        if not last:
            inputs = layer_inputs(_mean(layer, inputs), data.X, connected=model.connected)
            if layers[number].candidates.requires_grad:
                _scatter(layers[number], inputs, generator)


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
def _scatter(layer: DeepLayer, inputs: Float[Tensor, "N D"], generator: torch.Generator) -> None:
    """Candidates at random rows of what the layer sees, as far as there are so many."""
    order = torch.randperm(len(inputs), generator=generator, device=inputs.device)
    places = inputs[order[: layer.K]]
    layer.candidates[: len(places)].copy_(places)
