"""Newton's step for the means against one dense solve."""

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

import winnowgp.models.site_inference as mean_step_module
from winnowgp.bounds import RowBlocks, WhitenedChunks
from winnowgp.data import Dataset
from winnowgp.models.sgpr import chunked_kernel
from winnowgp.models.site_inference import mean_step

N, M, P = 11, 4, 3


@torch.no_grad()
def chunks(chunk: int) -> WhitenedChunks:
    g = torch.Generator().manual_seed(0)
    X = torch.randn(N, 2, generator=g, dtype=torch.float64)
    kernel = ScaleKernel(RBFKernel()).double()
    blocks = RowBlocks.of(Dataset(X, X), size=chunk)
    chunked, _ = chunked_kernel(kernel, X[:M], blocks)
    return WhitenedChunks.for_values(chunked, blocks)


def parts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Precisions, positive-definite couplings with them on the diagonal, slopes and pulls."""
    g = torch.Generator().manual_seed(1)
    A = torch.randn(N, P, P, generator=g, dtype=torch.float64)
    H = 4 * A @ A.mT
    slope, pull = torch.randn(2, N, P, generator=g, dtype=torch.float64)
    return H.diagonal(dim1=1, dim2=2).clone(), H, slope, pull


def step_of(coupled: bool, chunk: int):
    whitened = chunks(chunk)
    V = torch.cat([part.V for part in whitened], 1)
    precision, H, slope, pull = parts()
    B = torch.stack([torch.eye(M).to(V) + (V * precision[:, p]) @ V.mT for p in range(P)])
    step = mean_step(
        whitened,
        roots=torch.linalg.cholesky(B),
        precision=precision,
        residual=slope - pull,
        lifted=V @ (slope - pull),
        coupling=H if coupled else None,
    )
    return V, step


@pytest.mark.parametrize("chunk", [N, 4])
@pytest.mark.parametrize("coupled", [False, True])
def test_the_step_solves_newtons_equations(
    coupled: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mean_step_module, "_PRECISE", 1e-10)
    V, step = step_of(coupled, chunk)
    precision, H, slope, pull = parts()
    if not coupled:
        H = torch.diag_embed(precision)
    # Over (point, latent function) pairs: I + Σ_i v_i v_iᵀ ⊗ H_i.
    A = torch.einsum("mi,ni,ipq->mpnq", V, V, H).reshape(M * P, M * P)
    A += torch.eye(M * P).to(A)
    expected = torch.linalg.solve(A, (V @ (slope - pull)).flatten()).reshape(M, P)
    torch.testing.assert_close(step.q_mean, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("precise", [0.5, 1e-10])
@pytest.mark.parametrize("coupled", [False, True])
def test_however_rough_the_step_is_of_the_form_that_sites_have(
    coupled: bool, precise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mean_step_module, "_PRECISE", precise)
    V, step = step_of(coupled, 4)
    torch.testing.assert_close(step.q_mean, V @ step.alpha, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(step.mean, V.mT @ step.q_mean, rtol=1e-9, atol=1e-9)
