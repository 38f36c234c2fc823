"""Training steps of deep GPs that are recorded as CUDA graphs and replayed.

A step of a deep GP of 100 + 100 inducing points launches some 800 operations, which takes a CPU 25
times as long as a GPU takes to execute them. A graph launches all of them at once.
"""

import logging
from collections.abc import Callable, Sequence
from math import isfinite
from typing import final

import torch
from torch import Tensor

from winnowgp.data import Dataset
from winnowgp.errors import NotPositiveDefiniteError
from winnowgp.models import DeepGP
from winnowgp.models.deep_sites import layer_sites
from winnowgp.models.priors import log_prior
from winnowgp.training.adam import Gradient, Minibatches
from winnowgp.typing import Scalar

_LOG = logging.getLogger(__name__)
# Number of evaluations before recording, in which libraries allocate what they need.
_WARM_UP = 3


@final
class CapturedPass:
    """Gradient of the ELBO of minibatches, and natural-gradient steps of the last layer's q(u).

    Args:
        model: a deep GP with Gaussian noise; its parameters are changed in place only.
        batches: minibatches of one process.
        parameters: those whose gradient is computed.
        samples: number of samples propagated for each row.
    """

    def __init__(
        self, model: DeepGP, batches: Minibatches, parameters: Sequence[Tensor], *, samples: int
    ) -> None:
        # The first rows, and samples of zero: a recording needs their shapes only.
        rows = batches.data.part(slice(batches.rows))
        weights = None if rows.weights is None else rows.weights.clone()
        self._rows = Dataset(rows.X.clone(), rows.Y.clone(), weights)
        self._eps = [rows.X.new_zeros(samples, rows.N, layer.P) for layer in model.layers[:-1]]
        self._model, self._batches, self._parameters = model, batches, list(parameters)
        self._rate = rows.X.new_ones(())
        # The ELBO and the norm of its gradient, which are read together.
        self._numbers, self._gradients = rows.X.new_zeros(2), list[Tensor]()
        self._last: list[Tensor] = []
        self._pass = _captured(self._differentiate)
        self._pass()  # A recording is not computed, and the step reads its results.
        self._step = _captured(self._natural_step)

    def gradient(self, rows: Dataset, eps: Sequence[Tensor]) -> Gradient | None:
        """Return the ELBO and the gradient of −ELBO / scale; None if it cannot be computed.

        The next call overwrites the gradient.
        """
        pairs = [(self._rows.X, rows.X), (self._rows.Y, rows.Y), *zip(self._eps, eps, strict=True)]
        if rows.weights is not None and self._rows.weights is not None:
            pairs.append((self._rows.weights, rows.weights))
        for own, given in pairs:
            own.copy_(given)
        self._pass()
        value, norm = self._numbers.tolist()
        if not (isfinite(value) and isfinite(norm)):
            return None
        return Gradient(value, norm, self._gradients)

    def step(self, rate: float) -> None:
        """Take a natural-gradient step from the last gradient; none if it cannot be computed."""
        self._rate.fill_(rate)
        self._step()

    def _differentiate(self) -> None:
        batches = self._batches
        evaluation = self._model.evaluated(self._rows, total=batches.total, eps=self._eps)
        top = evaluation.passed.last
        (curvature,) = torch.autograd.grad(evaluation.fit, [top.variance], retain_graph=True)
        value: Scalar = evaluation.bound + log_prior(self._model)
        *gradients, slope = torch.autograd.grad(
            -value / batches.scale, [*self._parameters, top.mean], materialize_grads=True
        )
        norm = torch.nn.utils.get_total_norm(gradients)
        self._numbers, self._gradients = torch.stack([value.detach(), norm]), gradients
        self._last = [
            evaluation.passed.inputs[-1].detach(),
            top.mean.detach(),
            -batches.scale * slope,
            (-2 * curvature).clamp_min(0),
            evaluation.passed.whitened[-1].detach(),
        ]

    @torch.no_grad()
    def _natural_step(self) -> None:
        layer, (*sited, whitened) = self._model.layers[-1], self._last
        sites = layer_sites(layer, *sited)
        q_mean, q_factor = sites.natural_step(layer, rate=self._rate, whitened=whitened)
        finite = torch.isfinite(q_mean).all() & torch.isfinite(q_factor).all()
        layer.q_mean.copy_(torch.where(finite, q_mean, layer.q_mean))
        layer.q_factor.copy_(torch.where(finite, q_factor, layer.q_factor))


def captured_pass(
    model: DeepGP, batches: Minibatches, parameters: Sequence[Tensor], *, samples: int
) -> CapturedPass | None:
    """Return the recorded pass; None on a CPU, or if an operation cannot be recorded.

    The parameters are as before: what a recording computes is not stored in them.
    """
    if not batches.data.X.is_cuda:
        return None
    last = model.layers[-1]
    before = [last.q_mean.detach().clone(), last.q_factor.detach().clone()]
    try:
        return CapturedPass(model, batches, parameters, samples=samples)
    except (RuntimeError, NotPositiveDefiniteError) as error:
        _LOG.info("training steps are not recorded as a CUDA graph: %s", error)
        return None
    finally:
        with torch.no_grad():
            last.q_mean.copy_(before[0])
            last.q_factor.copy_(before[1])


def _captured(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function that replays what another one does on the GPU."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
