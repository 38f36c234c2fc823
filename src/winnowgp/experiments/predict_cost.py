"""What a prediction of a two-layer model costs, by its sizes alone."""

from collections.abc import Sequence
from time import process_time

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood

from winnowgp.estimators import kernel_from
from winnowgp.experiments.one_thread import one_thread
from winnowgp.models import DeepGP, deep_layers

ROWS = 500


def deep_predict_us(sizes: Sequence[int], *, connected: bool, samples: int, best_of: int) -> float:
    """CPU microseconds for the mean and variance of one row, a mixture of `samples`.

    Eight inputs, eight hidden outputs, one thread; the least of `best_of` times, as whatever else
    a machine does makes them longer. No training comes before it: the time depends on sizes, not on
    where points lie.
    """
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)

    def kernel(number: int, inputs: int) -> Kernel:
        return kernel_from("rbf", inputs)

    layers = deep_layers(X, X[: max(sizes)], kernel=kernel, widths=(8, 1), connected=connected)
    model = DeepGP(layers, likelihood=GaussianLikelihood(), connected=connected)
    masks = [torch.arange(layer.K) < M for layer, M in zip(model.layers, sizes, strict=True)]
    posterior = model.prune(masks).posterior(samples=samples)
    seconds = []
    with one_thread(), torch.no_grad():
        posterior.predict(X)
        for _ in range(best_of):
            start = process_time()
            posterior.predict(X)
            seconds.append(process_time() - start)
    return round(1e6 * min(seconds) / ROWS, 2)
