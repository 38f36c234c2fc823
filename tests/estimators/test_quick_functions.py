"""Functions that change quickly along their inputs are not taken for noise."""

import pytest

from winnowgp import SparseGPRegressor
from winnowgp.experiments.synthetic import sampled


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_a_quick_function_is_found(sigma: float) -> None:
    """A draw with a hundred lengthscales within reach, which starts of one spread all miss."""
    data = sampled("noise", sigma, rows=500, seed=1)
    model = SparseGPRegressor(random_state=0).fit(data.X.numpy(), data.Y[:, 0].numpy())
    assert model.n_inducing_ > 40
    # Noise alone has −709 nats.
    assert model.elbo_ > -600
