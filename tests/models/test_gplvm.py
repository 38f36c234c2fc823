import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel

from helpers.latent_problems import latent
from winnowgp.data import MaskedMatrix
from winnowgp.errors import InputError, NotPositiveDefiniteError
from winnowgp.models import LatentVariableGP
from winnowgp.models.kernels import expected_kernel

NOISES = [0.3, torch.tensor([0.3, 0.1, 0.9], dtype=torch.float64)]
noises = pytest.mark.parametrize("noise", NOISES, ids=["shared", "a column"])
tables = pytest.mark.parametrize("missing", [False, True], ids=["complete", "missing"])
MASKS = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()


@noises
@tables
def test_latent_objective_subset_equals_pruned_bound(noise, missing) -> None:
    p = latent(missing=missing)
    model = p.model(noise=noise)
    # The jitter is relative to the mean prior variance, the same for every subset of a
    # stationary kernel.
    expected = torch.stack([model.prune(mask).bound(p.table) for mask in MASKS])
    values = model.subset_objective(p.table).value(MASKS)
    torch.testing.assert_close(values, expected, rtol=1e-8, atol=1e-7)
    relaxed = model.subset_objective(p.table).relaxed_value(MASKS.double())
    torch.testing.assert_close(relaxed, expected, rtol=1e-6, atol=1e-5)


@noises
@tables
def test_latent_statistics_and_gains_equal_regression(noise, missing) -> None:
    p = latent(missing=missing)
    model = p.model(noise=noise)
    statistics = model.subset_statistics(p.table)
    values = model.subset_objective(p.table).value(MASKS) + model.latents.kl()
    torch.testing.assert_close(statistics.value(MASKS), values.detach(), rtol=1e-8, atol=1e-7)
    marginal_gains = statistics.marginal_gains(MASKS[0])
    for k in range(5):
        pair = MASKS[0].repeat(2, 1)
        pair[:, k] = torch.tensor([True, False])
        on, off = statistics.value(pair)
        torch.testing.assert_close(marginal_gains[k], on - off, rtol=1e-7, atol=1e-7)


def test_latent_bound_has_exact_gradients() -> None:
    p = latent(missing=True, N=5, M=3)
    model = p.model(noise=NOISES[1])
    parameters = dict(model.named_parameters())
    model.bound(p.table).backward()
    step = 1e-6
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for i in range(len(flat)):
            values = []
            for sign in (1, -1):
                flat[i] += sign * step
                values.append(model.bound(p.table).item())
                flat[i] -= sign * step
            slope = (values[0] - values[1]) / (2 * step)
            assert gradient[i].item() == pytest.approx(slope, rel=1e-5, abs=1e-5), name


def test_latent_fixed_bound_survives_rounding() -> None:
    """With tiny noise and coincident points I + C is indefinite by rounding."""
    p = latent(N=40, M=5)
    close = torch.cat([p.Z + 1e-5 * k for k in range(4)])
    model = p.model(noise=1e-5).with_candidates(close)
    model.kernel.initialize(outputscale=1e4)
    with pytest.raises(NotPositiveDefiniteError):
        model.bound(p.table)
    statistics = model.subset_statistics(p.table)
    assert torch.isfinite(statistics.marginal_gains(torch.arange(20) < 5)).all()
    whole = torch.ones(1, 20, dtype=torch.bool)
    found = statistics.value(whole).item() - model.latents.kl().item()
    assert model.fixed_bound(p.table) == pytest.approx(found, rel=1e-6)
    few = p.model()
    assert few.fixed_bound(p.table) == pytest.approx(few.bound(p.table).item(), rel=1e-9)


def test_latent_prune_keeps_candidates_frozen() -> None:
    p = latent()
    model = p.model()
    model.candidates.requires_grad_(False)
    assert not model.prune(MASKS[0]).candidates.requires_grad
    assert model.prune(MASKS[0]).K == 3


def test_latent_gp_invalid_kernel_table_or_noise_raise() -> None:
    p = latent()
    with pytest.raises(InputError, match="SampledLatentGP"):
        LatentVariableGP(MaternKernel(), p.mean, candidates=p.Z)
    with pytest.raises(InputError, match="on all dimensions"):
        expected_kernel(RBFKernel(active_dims=(0,)), 2)
    with pytest.raises(InputError, match="must exceed"):
        p.model(noise=0.0)
    with pytest.raises(InputError, match="7 rows and the table has 3"):
        p.model().bound(MaskedMatrix.of(p.Y[:3]))
    with pytest.raises(InputError, match="all rows at once"):
        p.model().bound(p.table, rows=torch.tensor([0]))
    with pytest.raises(InputError, match="`variance` must be positive"):
        type(p.model().latents)(p.mean, variance=0.0)
