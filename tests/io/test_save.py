"""Models in files: as they were, whole or not at all, and nothing executed."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpytorch.kernels import AdditiveKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood, SoftmaxLikelihood
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import winnowgp
from deep_problems import deep
from deep_problems import rows as deep_rows
from forgery import forged_outline, forged_tensor
from winnowgp import Dataset, Entries, LatentVariableGP, Posterior, SparseGP, VariationalGP
from winnowgp.errors import InputError, ModelFileError, NotSaveableError
from winnowgp.io import FORMAT_VERSION, Packed, gpytorch_parts, read_packed, save, write_packed
from winnowgp.io.model_file import _digest
from winnowgp.models import DeepPosterior, Latents, Prediction, SampledLatentGP

X = torch.linspace(0, 6, 40, dtype=torch.float64)[:, None]
DATA = Dataset.of(X, torch.stack([torch.sin(X[:, 0]), torch.cos(X[:, 0])], 1))


def sparse(M: int, dtype: torch.dtype = torch.float64) -> SparseGP:
    kernel = ScaleKernel(RBFKernel()) + MaternKernel(nu=2.5)
    return SparseGP(kernel, X[:: max(40 // max(M, 1), 1)][:M].to(dtype), noise=0.1)


def closed() -> tuple[LatentVariableGP, Entries]:
    """A map with a noise for each column, and a table with a hole."""
    Y = DATA.Y.clone()
    Y[3, 1] = torch.nan
    noise = torch.tensor([0.1, 0.3], dtype=torch.float64)
    latents = Latents(X - 3, variance=0.1 + 0.01 * X)
    kernel = ScaleKernel(RBFKernel())
    model = LatentVariableGP(kernel, latents, candidates=X[::6] - 3, noise=noise)
    return model, Entries.of(Y)


def sampled() -> tuple[SampledLatentGP, Entries]:
    """A map of counts."""
    kernel, likelihood = ScaleKernel(MaternKernel(nu=1.5)), PoissonLikelihood()
    function = VariationalGP(kernel, X[::6] - 3, likelihood=likelihood, targets=2)
    function.q_mean.data.copy_(torch.sin(X[::6]).expand(-1, 2))
    latents = Latents(X - 3, variance=0.1 + 0.01 * X)
    return SampledLatentGP(function, latents), Entries.of((DATA.Y.exp()).round())


SAVED: dict[str, Callable[[], Any]] = {
    "Posterior": lambda: sparse(5).posterior(DATA),
    "VariationalGP": lambda: sampled()[0].function,
    "DeepGP": lambda: deep("softmax"),
    "DeepPosterior": lambda: deep("gaussian").posterior(samples=10),
    "LatentVariableGP": lambda: closed()[0],
    "ExpectedPosterior": lambda: closed()[0].posterior(closed()[1]),
    "SampledLatentGP": lambda: sampled()[0],
    "SampledPosterior": lambda: sampled()[0].posterior(sampled()[1]),
}


@pytest.fixture(params=SAVED)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(SAVED[request.param](), tmp_path / "model.winnow")


@pytest.fixture
def posterior_file(tmp_path: Path) -> Path:
    return save(SAVED["Posterior"](), tmp_path / "model.winnow")


@pytest.mark.parametrize("M", [0, 1, 2, 13, 40])
def test_a_posterior_comes_back_at_any_size(M: int, tmp_path: Path) -> None:
    posterior = sparse(M).posterior(DATA)
    back = winnowgp.load(save(posterior, tmp_path / "a"))
    ours, theirs = posterior.predict(X, observed=True), back.predict(X, observed=True)
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-10, atol=1e-12)
    assert back.M == M


def test_the_factor_of_a_nearly_singular_covariance_is_kept(tmp_path: Path) -> None:
    plain = sparse(13).posterior(DATA)
    q: Any = {name: getattr(plain, name) for name in ("mean", "likelihood", "q_mean", "q_factor")}
    # As if another machine had needed another jitter.
    posterior = Posterior(plain.kernel, plain.Z, **q, L=1.5 * plain.L)
    assert not torch.allclose(posterior.predict(X).variance, plain.predict(X).variance)
    back = winnowgp.load(save(posterior, tmp_path / "a"))
    torch.testing.assert_close(
        back.predict(X).variance, posterior.predict(X).variance, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_come_back_ready_to_train(dtype: torch.dtype, tmp_path: Path) -> None:
    data = Dataset(X.to(dtype), DATA.Y.to(dtype))
    model = sparse(8, dtype)
    model.candidates.requires_grad_(False)
    model.likelihood.requires_grad_(False)
    back = winnowgp.load(save(model, tmp_path / "a"))
    assert torch.equal(back.bound(data), model.bound(data))
    assert trained(back) == trained(model)


@pytest.mark.parametrize("likelihood", [BernoulliLikelihood(), PoissonLikelihood()])
def test_a_variational_model_keeps_its_q(likelihood: Any, tmp_path: Path) -> None:
    data = Dataset.of(X, (DATA.Y > 0).double())
    made = VariationalGP(ScaleKernel(RBFKernel()), X[::5], likelihood=likelihood, targets=2)
    model = made.with_best_q(data)
    back = winnowgp.load(save(model, tmp_path / "a"))
    assert torch.equal(back.bound(data), model.bound(data))
    assert torch.equal(back.posterior(data).predict(X).mean, model.posterior(data).predict(X).mean)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "student", "softmax"])
def test_deep_models_come_back_ready_to_train(likelihood: str, tmp_path: Path) -> None:
    model, data = deep(likelihood), deep_rows(likelihood)
    model.layers[0].candidates.requires_grad_(False)
    model.layers[1].kernel.requires_grad_(False)
    back = winnowgp.load(save(model, tmp_path / "a"))
    noise = model.noise(data.N, 3, torch.Generator().manual_seed(0))
    assert torch.equal(
        back.evaluated(data, noise=noise).bound, model.evaluated(data, noise=noise).bound
    )
    assert trained(back) == trained(model)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli", "student", "softmax"])
def test_a_deep_posterior_comes_back_with_its_factors(likelihood: str, tmp_path: Path) -> None:
    model, data = deep(likelihood), deep_rows(likelihood)
    plain = model.posterior(samples=10)
    # As if another machine had needed another jitter.
    posterior = DeepPosterior(
        model.layers,
        likelihood=model.likelihood,
        connected=model.connected,
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
def test_latent_models_come_back_ready_to_train(made: Any, tmp_path: Path) -> None:
    model, table = made()
    model.latents.log_variance.requires_grad_(False)
    model.likelihood.requires_grad_(False)
    back = winnowgp.load(save(model, tmp_path / "a"))
    assert torch.equal(back.bound(table), model.bound(table))
    assert trained(back) == trained(model)


@pytest.mark.parametrize("made", [closed, sampled])
def test_posteriors_of_maps_come_back(made: Any, tmp_path: Path) -> None:
    model, table = made()
    posterior = model.posterior(table)
    back = winnowgp.load(save(posterior, tmp_path / "a"))
    at = X[:5] - 3, torch.full_like(X[:5], 0.3)
    close(back.predict(*at, observed=True), posterior.predict(*at, observed=True))
    rows = torch.arange(5)
    torch.testing.assert_close(
        back.row_bound(table)(rows, *at), posterior.row_bound(table)(rows, *at)
    )


def close(ours: Prediction, theirs: Prediction) -> None:
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-10, atol=1e-12)


def trained(model: torch.nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in model.named_parameters()}


def test_the_file_is_a_safetensors_file(posterior_file: Path) -> None:
    assert load_tensors(posterior_file.read_bytes())["Z"].shape == (5, 1)


def test_the_file_does_not_grow_with_the_data(tmp_path: Path) -> None:
    many = torch.linspace(0, 6, 4000, dtype=torch.float64)[:, None]
    large = sparse(5).posterior(Dataset.of(many, many.sin()))
    small = sparse(5).posterior(Dataset.of(X, X.sin()))
    sizes = [save(p, tmp_path / "a").stat().st_size for p in (large, small)]
    assert abs(sizes[0] - sizes[1]) < 10


def test_a_file_cut_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    step = max(len(content) // 80, 1)
    for length in [*range(0, len(content), step), len(content) - 1]:
        cut = tmp_path / "cut"
        cut.write_bytes(content[:length])
        with pytest.raises(ModelFileError, match=r"cut.*(fit anew|`winnow fit` wrote)"):
            winnowgp.load(cut)


def test_a_changed_byte_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    content = bytearray(file.read_bytes())
    written_by = content.index(b'"written_by"')
    step = max(len(content) // 200, 1)
    for place in [*range(0, len(content), step), len(content) - 1]:
        if written_by <= place < written_by + 24:
            continue  # who wrote it is only said in messages
        changed = bytearray(content)
        changed[place] ^= 0b101
        bad = tmp_path / "bad"
        bad.write_bytes(changed)
        with pytest.raises(ModelFileError):
            winnowgp.load(bad)


@pytest.mark.parametrize(
    "content",
    [b"", b"x,y\n1,2\n", b"\x80\x04\x95pickle", b"\x89PNG\r\n\x1a\n" + bytes(100), b"{}" * 40],
)
def test_another_kind_of_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ModelFileError, match="is not a winnowgp model"):
        winnowgp.load(tmp_path / "a")


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(save_tensors({"w": X}, metadata={"format": "pt"}))
    with pytest.raises(ModelFileError, match="is not a winnowgp model"):
        winnowgp.load(tmp_path / "a")


def test_a_forged_outline_is_refused_or_harmless(file: Path, tmp_path: Path) -> None:
    rng, bad = random.Random(file.name), tmp_path / "bad"
    refused = 0
    for _ in range(40):
        bad.write_bytes(forged_outline(rng, file))
        try:
            winnowgp.load(bad)
        except ModelFileError:
            refused += 1
    assert refused > 20


def test_a_forged_tensor_is_refused(file: Path, tmp_path: Path) -> None:
    rng, bad = random.Random(0), tmp_path / "bad"
    for _ in range(40):
        name, content = forged_tensor(rng, file)
        if name == "candidates" and read_packed(file).kind == "LatentVariableGP":
            continue  # with more or fewer of them it is a model as good as any
        bad.write_bytes(content)
        with pytest.raises(ModelFileError, match="bad"):
            pytest.fail(f"{name} was let in: {winnowgp.load(bad)}")


def rewritten(file: Path, change: Any) -> Path:
    """The file with its outline and metadata changed, and a checksum that fits."""
    packed = read_packed(file)
    outline, metadata = packed.outline(), {"version": str(FORMAT_VERSION)}
    change(outline, metadata)
    text, tensors = json.dumps(outline), packed.all_tensors()
    whole = {"format": "winnowgp", "written_by": "9.9", "outline": text}
    whole |= {"sha256": _digest(text, tensors), **metadata}
    file.write_bytes(save_tensors(tensors, metadata=whole))
    return file


def test_a_newer_version_says_what_to_do(posterior_file: Path) -> None:
    newer = rewritten(posterior_file, lambda outline, metadata: metadata.update(version="7"))
    with pytest.raises(ModelFileError, match=r"winnowgp 9\.9 in format 7.*pip install --upgrade"):
        winnowgp.load(newer)


def _in_kernel(**changes: Any) -> Any:
    def change(outline: Any, metadata: Any) -> None:
        outline["parts"]["kernel"]["about"]["kernels"][1] |= changes

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o, m: o.update(kind="os.system"), "does not know"),
        (lambda o, m: o.update(kind=["Posterior"]), "does not understand"),
        (lambda o, m: o["parts"].pop("kernel"), "does not understand"),
        (lambda o, m: m.update(version="one"), "does not understand"),
        (lambda o, m: m.update(version="0"), "does not understand"),
        (_in_kernel(name="eval"), "does not know"),
        (_in_kernel(arguments={"nu": 2.5, "ard_num_dims": 10**15}), "impossible size"),
        (_in_kernel(arguments={"nu": 2.5, "ard_num_dims": 2}), "does not fit"),
        (_in_kernel(arguments={"nu": 7.5}), "does not understand"),
        (_in_kernel(constraints=3), "does not understand"),
    ],
)
def test_a_file_made_by_hand_is_refused(posterior_file: Path, change: Any, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as raised:
        winnowgp.load(rewritten(posterior_file, change))
    assert str(posterior_file) in str(raised.value)


RBF: dict[str, Any] = {"name": "RBFKernel", "arguments": {}, "constraints": {}, "priors": {}}
LARGE = {**RBF, "arguments": {"ard_num_dims": 100_000}}
TWO = ("ard_num_dims", "num_mixtures")


@pytest.mark.parametrize(
    "parts",
    [
        100 * [LARGE],
        [{**RBF, "name": "AdditiveKernel", "kernels": 10 * [LARGE]}],
        [{**RBF, "name": "ScaleKernel", "base_kernel": LARGE}],
        2000 * [RBF],
        2000 * [{**RBF, "name": "ProductKernel", "kernels": []}],
        [{**RBF, "name": "SpectralMixtureKernel"} | {"arguments": dict.fromkeys(TWO, 1000)}],
    ],
    ids=["many large", "a sum of large", "one scaled", "very many small", "empty", "a product"],
)
def test_parts_that_are_huge_together_are_refused_before_they_are_made(
    posterior_file: Path, parts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(outline: Any, metadata: Any) -> None:
        outline["parts"]["kernel"]["about"]["kernels"] = parts

    def made(*_: Any, **__: Any) -> None:
        pytest.fail("a part was made")

    monkeypatch.setattr(gpytorch_parts, "_kernel", made)
    with pytest.raises(ModelFileError, match="parts of an impossible size"):
        winnowgp.load(rewritten(posterior_file, change))


def test_a_sum_of_many_kernels_comes_back(tmp_path: Path) -> None:
    kernel = AdditiveKernel(*[ScaleKernel(RBFKernel()) for _ in range(60)])
    for _ in range(5):
        kernel = AdditiveKernel(kernel)
    model = SparseGP(kernel, X[:3], noise=0.1)
    back = winnowgp.load(save(model, tmp_path / "a"))
    assert torch.equal(back.bound(DATA), model.bound(DATA))


def test_more_classes_than_functions_are_refused(tmp_path: Path) -> None:
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    model = VariationalGP(ScaleKernel(RBFKernel()), X[::5], likelihood=likelihood)
    posterior = model.posterior(Dataset.of(X, X[:, 0] // 2.1))
    file = save(posterior, tmp_path / "a")

    def change(outline: Any, metadata: Any) -> None:
        arguments = outline["parts"]["likelihood"]["about"]["arguments"]
        arguments.update(num_features=900_000, num_classes=900_000)

    with pytest.raises(ModelFileError, match="3 functions and a likelihood of 900000"):
        winnowgp.load(rewritten(file, change))


def test_more_samples_than_memory_are_refused(tmp_path: Path) -> None:
    file = save(deep("gaussian").posterior(samples=10), tmp_path / "a")
    huge = rewritten(file, lambda outline, metadata: outline["about"].update(samples=10**12))
    with pytest.raises(ModelFileError, match="asks for 1000000000000 samples"):
        winnowgp.load(huge)


def test_an_outline_of_a_thousand_levels_is_refused(tmp_path: Path) -> None:
    inner = Packed("Kernel")
    for _ in range(200):
        inner = Packed("Kernel", parts={"k": inner})
    path = write_packed(inner, tmp_path / "a")
    with pytest.raises(ModelFileError):
        winnowgp.load(path)


def test_an_interrupted_save_leaves_what_was_there(
    posterior_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = posterior_file
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


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "a"):
        with pytest.raises(InputError, match="folder that exists"):
            save(sparse(2), path)


def test_other_things_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(NotSaveableError, match="a Linear cannot be saved"):
        save(torch.nn.Linear(1, 1), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="not a plain file"):
        save(sparse(2), pipe)
    assert pipe.is_fifo()
