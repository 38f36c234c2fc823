"""What a prediction of a two-layer model costs, by its sizes alone."""

import time
from collections.abc import Sequence

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood

from winnowgp.estimators import kernel_from
from winnowgp.models import DeepGP, deep_layers

ROWS, REPEATS = 500, 3


def deep_predict_us(sizes: Sequence[int], *, connected: bool, samples: int) -> float:
    """CPU microseconds for the mean and variance of one row, a mixture of `samples`.

    Eight inputs, eight hidden outputs, one thread; the quickest of three.
    """
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)

    def kernel(number: int, inputs: int) -> Kernel:
        return kernel_from("rbf", inputs)

    layers = deep_layers(X, X[: max(sizes)], kernel=kernel, widths=(8, 1), connected=connected)
    model = DeepGP(layers, likelihood=GaussianLikelihood(), connected=connected)
    masks = [torch.arange(layer.K) < M for layer, M in zip(model.layers, sizes, strict=True)]
    posterior = model.prune(masks).posterior(samples=samples)
    threads, seconds = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for _ in range(REPEATS):
            start = time.process_time()
            with torch.no_grad():
                posterior.predict(X)
            seconds.append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return round(1e6 * min(seconds) / ROWS, 2)
