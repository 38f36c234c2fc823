"""Files that were cut, changed or forged: refused, and nothing executed."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import SoftmaxLikelihood
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import winnowgp
from helpers.deep_problems import deep
from helpers.forgery import forged_outline, forged_tensor
from helpers.saved_models import SAVED, X
from winnowgp import Dataset, VariationalGP
from winnowgp.errors import ModelFileError
from winnowgp.io import FORMAT_VERSION, Packed, read_packed, save, write_packed
from winnowgp.io import components as gpytorch_parts
from winnowgp.io.format import _digest


@pytest.fixture(params=SAVED)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(SAVED[request.param](), tmp_path / "model.winnow")


@pytest.fixture
def posterior_file(tmp_path: Path) -> Path:
    return save(SAVED["Posterior"](), tmp_path / "model.winnow")


def test_the_file_is_a_safetensors_file(posterior_file: Path) -> None:
    assert load_tensors(posterior_file.read_bytes())["Z"].shape == (5, 1)


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
