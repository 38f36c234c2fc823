import pytest
import torch

from helpers.latent_problems import dense_bound, latent, linear
from winnowgp.bounds import collapsed_bound
from winnowgp.bounds.chunked import moment_bound, moment_posterior
from winnowgp.bounds.gplvm import gplvm_moments, whitening_factor
from winnowgp.bounds.row_blocks import JITTER
from winnowgp.models import Latents, LatentVariableGP

noises = pytest.mark.parametrize(
    "noise", [0.3, torch.tensor([0.3, 0.1, 0.9], dtype=torch.float64)], ids=["shared", "a column"]
)
tables = pytest.mark.parametrize("missing", [False, True], ids=["complete", "missing"])


@noises
@tables
@pytest.mark.parametrize("kind", ["rbf", "linear"])
def test_gplvm_bound_equals_dense_bound_of_each_column(noise, missing, kind) -> None:
    p = latent(linear(), M=2, missing=missing) if kind == "linear" else latent(missing=missing)
    model = p.model(noise=noise)
    jitter = JITTER * p.k(p.Z, p.Z).diagonal().mean().item()
    variances = torch.as_tensor(noise, dtype=torch.float64).expand(3).tolist()
    expected = -model.latents.kl()
    for column in range(3):
        rows = p.table.observed[:, column]
        expected = expected + dense_bound(
            p, y=p.Y[:, column], rows=rows, noise=variances[column], jitter=jitter
        )
    torch.testing.assert_close(model.bound(p.table), expected, rtol=1e-7, atol=1e-6)


@noises
@tables
def test_gplvm_moments_give_the_same_bound(noise, missing) -> None:
    p = latent(missing=missing)
    model = p.model(noise=noise)
    objective = model.subset_objective(p.table)
    moments = gplvm_moments(whitening_factor(objective.Kuu), objective.psi, objective.columns)
    assert len(moments) == (1 if isinstance(noise, float) and not missing else 3)
    total = torch.stack([moment_bound(m) for m in moments]).sum() - model.latents.kl()
    torch.testing.assert_close(total, model.bound(p.table))


def test_gplvm_bound_zero_variance_equals_collapsed_bound() -> None:
    p = latent()
    latents = Latents(p.mean, variance=1e-14)
    model = LatentVariableGP(p.kernel, latents, candidates=p.Z, noise=0.3)
    Kuu = p.k(p.Z, p.Z)
    Kuu += JITTER * Kuu.diagonal().mean() * torch.eye(5, dtype=torch.float64)
    kff = p.k(p.mean, p.mean).diagonal()
    noise = torch.tensor(0.3, dtype=torch.float64)
    expected = collapsed_bound(Kuu, p.k(p.Z, p.mean), kff=kff, Y=p.Y, noise=noise)
    torch.testing.assert_close(model.bound(p.table) + latents.kl(), expected, rtol=1e-9, atol=1e-8)


@noises
def test_moment_posterior_equals_dense_solution_of_each_column(noise) -> None:
    p = latent(missing=True)
    objective = p.model(noise=noise).subset_objective(p.table)
    moments = gplvm_moments(whitening_factor(objective.Kuu), objective.psi, objective.columns)
    mean, factor = moment_posterior(*moments)
    for column, m in enumerate(moments):
        B = m.C + torch.eye(5, dtype=torch.float64)
        torch.testing.assert_close(mean[:, column], torch.linalg.solve(B, m.D[:, 0]))
        torch.testing.assert_close(factor[column] @ factor[column].mT, B.inverse())
