"""How long a prediction takes with M points, on this machine."""

from collections.abc import Callable
from time import perf_counter

import torch

from winnowgp.data import Source
from winnowgp.errors import InputError
from winnowgp.models import InducingModel, Posterior, SparseGP, latent_functions

ROWS = 1000
_REPEATS = 5


def points_within(max_us: float, *, predict_us: Callable[[int], float], most: int) -> int:
    """The largest number of points, up to `most`, that predicts a row in `max_us` microseconds.

    Bisection; a measured time is noisy, and the answer is as good as the measurements.

    >>> points_within(10.0, predict_us=lambda M: 1 + M**2 / 100, most=500)
    30
    """
    if predict_us(1) > max_us:
        raise InputError(
            f"`max_predict_us` must allow at least one point; got {max_us:g}, and one point takes "
            f"{predict_us(1):.3g} here."
        )
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if predict_us(middle) <= max_us else (low, middle)
    return low


def measured_predict_us(model: InducingModel, data: Source, M: int) -> float:
    """Microseconds a row for mean and variance of a batch of 1,000 rows with M points."""
    some = data.part(torch.arange(min(data.N, max(ROWS, M)))).to(model.candidates.device).X
    rows = some[torch.arange(ROWS, device=some.device) % len(some)]
    points = some[torch.arange(M, device=some.device) % len(some)]
    # Times do not depend on where the points are, so long as they are apart.
    points = points + torch.linspace(0, 1, M, dtype=points.dtype, device=points.device)[:, None]
    P = latent_functions(model.likelihood, data.P)
    eye = torch.eye(M, dtype=points.dtype, device=points.device)
    # Only the collapsed model has one covariance for all its outputs.
    posterior = Posterior(
        model.kernel,
        points,
        mean=model.mean,
        likelihood=model.likelihood,
        q_mean=points.new_zeros(M, P),
        q_factor=eye.repeat(1 if isinstance(model, SparseGP) else P, 1, 1),
    )
    seconds = []
    for _ in range(_REPEATS):
        start = perf_counter()
        posterior.predict(rows).variance.sum().item()
        seconds.append(perf_counter() - start)
    return 1e6 * min(seconds) / ROWS
