import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean

from winnowgp import Dataset, SparseGP, fit
from winnowgp.data import hills
from winnowgp.errors import InputError
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import FastSchedule, FixedAlpha, PaperSchedule, Tolerance
from winnowgp.training.lbfgs import Stop, maximise_elbo


@pytest.mark.usefixtures("quickly")
@pytest.mark.unchecked
@pytest.mark.parametrize("kernel", [ScaleKernel(RBFKernel()), ScaleKernel(MaternKernel())])
def test_fit_is_invariant_to_translation(kernel) -> None:
    rows = hills()
    near = Dataset(rows.X[::3], rows.Y[::3])
    far = Dataset.of(near.X + 2000, near.Y)
    bounds = [fit(SparseGP(kernel, data.X[:0]), data).elbo for data in (near, far)]
    assert bounds[0] == pytest.approx(bounds[1], abs=1.0)


@pytest.mark.usefixtures("quickly")
@pytest.mark.unchecked
def test_fit_constant_mean_follows_targets() -> None:
    rows = hills()
    data = Dataset(rows.X[::3], rows.Y[::3])
    raised = Dataset.of(data.X, data.Y + 100)
    model = SparseGP(ScaleKernel(RBFKernel()), data.X[:0], mean=ConstantMean())
    plain, lifted = (fit(model, d).elbo for d in (data, raised))
    assert lifted > plain - 10


@pytest.mark.usefixtures("one_size")
def test_fit_frozen_hyperparameters_stay() -> None:
    rows = hills()
    data = Dataset(rows.X[::2], rows.Y[::2])
    model = SparseGP(ScaleKernel(RBFKernel()), data.X[::4], noise=0.02)
    model.requires_grad_(False)
    for schedule in (FastSchedule(), PaperSchedule(SquaredCardinality(model.K, 0.1), joint=20)):
        fitted = fit(model, data, schedule=schedule)
        assert fitted.model.noise == model.noise
        assert fitted.posterior.M < model.K


@pytest.mark.parametrize("goal", [Tolerance(100.0), FixedAlpha(30.0)])
# Noise that cannot rise costs twelve nats with seed 1, two with seed 2, and none with seed 0.
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2))]
)
@pytest.mark.usefixtures("one_size")
def test_fit_noise_leaves_its_lower_limit(seed: int, goal) -> None:
    g = torch.Generator().manual_seed(seed)
    X = 6 * torch.rand(30, 2, generator=g, dtype=torch.float64) - 3
    data = Dataset.of(X, torch.sin(X[:, 0]))
    fitted = fit(
        SparseGP(ScaleKernel(RBFKernel(ard_num_dims=2)), X[:0]), data, schedule=FastSchedule(goal)
    )
    # Restarted from a large noise, the same points must not reach a much better optimum.
    again = fitted.model.with_candidates(fitted.posterior.Z)
    again.likelihood.noise = X.new_tensor(0.1)
    maximise_elbo(again, X, objective=again.chunked_bound(data), stop=Stop(1e-3, 20, 300))
    assert fitted.elbo > again.fixed_bound(data) - 10


def test_fit_mismatched_model_and_data_raise() -> None:
    data = hills()
    with pytest.raises(InputError, match="model and data must have the same"):
        fit(SparseGP(RBFKernel(), torch.zeros(2, 3, dtype=torch.float64)), data)
    with pytest.raises(InputError, match="model and data must have the same"):
        fit(SparseGP(RBFKernel(), torch.zeros(2, 1)), data)


@pytest.mark.unchecked
def test_fit_to_a_tensor_says_how_to_make_a_dataset() -> None:
    X = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
    model = SparseGP(ScaleKernel(RBFKernel()), X)
    for data in (X, (X, X[:, 0])):
        with pytest.raises(
            InputError, match=r"`data` must be .*got (Tensor|tuple).*Dataset.of\(X, y"
        ):
            fit(model, data)  # pyright: ignore[reportArgumentType]
