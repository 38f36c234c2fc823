"""Models and posteriors survive `save` and `load`."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gpytorch.kernels import AdditiveKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood

import winnowgp
from helpers.deep_problems import deep
from helpers.deep_problems import rows as deep_rows
from helpers.forgery import contents, file_content
from helpers.saved_models import DATA, X, closed, sampled, sparse
from winnowgp import Dataset, Posterior, SparseGP, VariationalGP
from winnowgp.errors import InputError, NotSaveableError
from winnowgp.io import save
from winnowgp.io.format import Archive
from winnowgp.io.registry import deserialise
from winnowgp.models import DeepPosterior
from winnowgp.models.observations import Prediction


@pytest.mark.parametrize("M", [0, 1, 2, 13, 40])
def test_load_restores_a_posterior_of_any_size(M: int, tmp_path: Path) -> None:
    posterior = sparse(M).posterior(DATA)
    back = winnowgp.load(save(posterior, tmp_path / "a"))
    ours, theirs = posterior.predict(X, observed=True), back.predict(X, observed=True)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-10, atol=1e-12)
    assert back.M == M


def test_load_restores_the_saved_cholesky_factor(tmp_path: Path) -> None:
    plain = sparse(13).posterior(DATA)
    q: Any = {name: getattr(plain, name) for name in ("mean", "likelihood", "q_mean", "q_factor")}
    # As if another machine had needed a larger jitter.
    posterior = Posterior(plain.kernel, plain.Z, **q, L=1.5 * plain.L)
    assert not torch.allclose(posterior.predict(X).variance, plain.predict(X).variance)
    back = winnowgp.load(save(posterior, tmp_path / "a"))
    torch.testing.assert_close(
        back.predict(X).variance, posterior.predict(X).variance, rtol=1e-10, atol=1e-12
    )


def test_load_of_a_posterior_factorises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def factorise(*_: Any, **__: Any) -> None:
        raise AssertionError("a factor was computed again")

    posterior = sparse(13).posterior(DATA)
    path = save(posterior, tmp_path / "a")
    for name in ("eigh", "cholesky_ex", "cholesky", "qr", "svd"):
        monkeypatch.setattr(torch.linalg, name, factorise)
    back = winnowgp.load(path)
    torch.testing.assert_close(
        back.predict(X).variance, posterior.predict(X).variance, rtol=1e-10, atol=1e-12
    )


def test_load_copies_and_checks_tensors_on_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, threads, before = save(sparse(13), tmp_path / "a"), [], torch.get_num_threads()

    def recorded(archive: Archive) -> Any:
        threads.append(torch.get_num_threads())
        return deserialise(archive)

    monkeypatch.setattr("winnowgp.io.registry.deserialise", recorded)
    torch.set_num_threads(3)
    try:
        winnowgp.load(path)
        assert threads == [1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_load_of_a_version_3_posterior_computes_the_missing_factor(tmp_path: Path) -> None:
    posterior = sparse(13).posterior(DATA)
    outline, tensors = contents(save(posterior, tmp_path / "a"))
    for name in ("gain", "signs"):
        del tensors[outline["value"]["state"].pop(name)["$tensor"]]
    old = tmp_path / "old"
    old.write_bytes(file_content(outline, tensors, version="3"))
    back = winnowgp.load(old)
    torch.testing.assert_close(
        back.predict(X).variance, posterior.predict(X).variance, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_load_restores_a_sparse_gp_and_what_is_trained(dtype: torch.dtype, tmp_path: Path) -> None:
    data = Dataset(X.to(dtype), DATA.Y.to(dtype))
    model = sparse(8, dtype)
    model.candidates.requires_grad_(False)
    model.likelihood.requires_grad_(False)
    back = winnowgp.load(save(model, tmp_path / "a"))
    torch.testing.assert_close(back.bound(data), model.bound(data), rtol=1e-10, atol=1e-12)
    assert trained(back) == trained(model)


@pytest.mark.parametrize("likelihood", [BernoulliLikelihood(), PoissonLikelihood()])
def test_load_restores_the_q_of_a_variational_gp(likelihood: Any, tmp_path: Path) -> None:
    data = Dataset.of(X, (DATA.Y > 0).double())
    made = VariationalGP(ScaleKernel(RBFKernel()), X[::5], likelihood=likelihood, targets=2)
    model = made.with_best_q(data)
    back = winnowgp.load(save(model, tmp_path / "a"))
    torch.testing.assert_close(back.bound(data), model.bound(data), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        back.posterior(data).predict(X).mean,
        model.posterior(data).predict(X).mean,
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "student", "softmax"])
def test_load_restores_a_deep_gp_and_what_is_trained(likelihood: str, tmp_path: Path) -> None:
    model, data = deep(likelihood), deep_rows(likelihood)
    model.layers[0].candidates.requires_grad_(False)
    model.layers[1].kernel.requires_grad_(False)
    back = winnowgp.load(save(model, tmp_path / "a"))
    noise = model.base_samples(data.N, 3, torch.Generator().manual_seed(0))
    bounds = [each.evaluated(data, eps=noise).bound for each in (back, model)]
    torch.testing.assert_close(*bounds, rtol=1e-10, atol=1e-12)
    assert trained(back) == trained(model)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "student", "softmax"])
def test_load_restores_a_deep_posterior_and_its_factors(likelihood: str, tmp_path: Path) -> None:
    model, data = deep(likelihood), deep_rows(likelihood)
    plain = model.posterior(samples=10)
    # As if another machine had needed a larger jitter.
    posterior = DeepPosterior(
        model.layers,
        likelihood=model.likelihood,
        skip_connections=model.skip_connections,
        samples=10,
        factors=[1.5 * L for L in plain.factors],
    )
    back = winnowgp.load(save(posterior, tmp_path / "a"))
    assert not torch.allclose(plain.predict(data.X).mean, posterior.predict(data.X).mean)
    close(back.predict(data.X), posterior.predict(data.X))
    torch.testing.assert_close(
        back.log_density(data.X, data.Y), posterior.log_density(data.X, data.Y)
    )
    assert back.M == posterior.M


@pytest.mark.parametrize("made", [closed, sampled])
def test_load_restores_a_latent_model_and_what_is_trained(made: Any, tmp_path: Path) -> None:
    model, table = made()
    model.latents.log_variance.requires_grad_(False)
    model.likelihood.requires_grad_(False)
    back = winnowgp.load(save(model, tmp_path / "a"))
    torch.testing.assert_close(back.bound(table), model.bound(table), rtol=1e-10, atol=1e-12)
    assert trained(back) == trained(model)


@pytest.mark.parametrize("made", [closed, sampled])
def test_load_restores_a_latent_posterior(made: Any, tmp_path: Path) -> None:
    model, table = made()
    posterior = model.posterior(table)
    back = winnowgp.load(save(posterior, tmp_path / "a"))
    at = X[:5] - 3, torch.full_like(X[:5], 0.3)
    close(back.predict(*at, observed=True), posterior.predict(*at, observed=True))
    rows = torch.arange(5)
    torch.testing.assert_close(
        back.row_elbo(table)(rows, *at), posterior.row_elbo(table)(rows, *at)
    )


def close(ours: Prediction, theirs: Prediction) -> None:
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-10, atol=1e-12)


def trained(model: torch.nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in model.named_parameters()}


def test_save_of_a_posterior_does_not_grow_with_the_data(tmp_path: Path) -> None:
    many = torch.linspace(0, 6, 4000, dtype=torch.float64)[:, None]
    large = sparse(5).posterior(Dataset.of(many, many.sin()))
    small = sparse(5).posterior(Dataset.of(X, X.sin()))
    sizes = [save(p, tmp_path / "a").stat().st_size for p in (large, small)]
    assert abs(sizes[0] - sizes[1]) < 10


def test_load_restores_a_sum_of_many_kernels(tmp_path: Path) -> None:
    kernel = AdditiveKernel(*[ScaleKernel(RBFKernel()) for _ in range(60)])
    for _ in range(5):
        kernel = AdditiveKernel(kernel)
    model = SparseGP(kernel, X[:3], noise=0.1)
    back = winnowgp.load(save(model, tmp_path / "a"))
    torch.testing.assert_close(back.bound(DATA), model.bound(DATA), rtol=1e-10, atol=1e-12)


def test_save_when_interrupted_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(sparse(5).posterior(DATA), tmp_path / "model.winnow")
    before = file.read_bytes()

    def interrupted(self: Path, content: bytes) -> None:
        with self.open("wb") as part:
            part.write(content[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(sparse(9).posterior(DATA), file)
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_save_to_a_path_that_cannot_be_written_names_it(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "a"):
        with pytest.raises(InputError, match="folder that exists"):
            save(sparse(2), path)


def test_save_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSaveableError, match="got a Linear, which cannot be saved"):
        save(torch.nn.Linear(1, 1), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_save_does_not_replace_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="not a regular file"):
        save(sparse(2), pipe)
    assert pipe.is_fifo()
