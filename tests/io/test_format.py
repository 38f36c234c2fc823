"""Truncated, damaged and forged files are refused, and nothing in them is executed."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import SoftmaxLikelihood
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import winnowgp
from helpers.deep_problems import deep
from helpers.forgery import contents, file_content, forged_outline, forged_tensor
from helpers.saved_models import SAVED, X
from winnowgp import Dataset, VariationalGP
from winnowgp.errors import ModelFileError
from winnowgp.io import components, save
from winnowgp.io.format import FORMAT_VERSION, Archive, _digest, write_archive
from winnowgp.io.registry import _MAX_OBJECTS, serialise
from winnowgp.io.upgrades import upgraded

VERSION1 = Path(__file__).parents[1] / "numbers" / "files"


@pytest.fixture(params=SAVED)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(SAVED[request.param](), tmp_path / "model.winnow")


@pytest.fixture
def posterior_file(tmp_path: Path) -> Path:
    return save(SAVED["Posterior"](), tmp_path / "model.winnow")


def test_save_writes_a_safetensors_file_with_named_tensors(posterior_file: Path) -> None:
    assert load_tensors(posterior_file.read_bytes())["Z"].shape == (5, 1)


def test_load_of_a_truncated_file_is_refused(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    step = max(len(content) // 80, 1)
    for length in [*range(0, len(content), step), len(content) - 1]:
        cut = tmp_path / "cut"
        cut.write_bytes(content[:length])
        with pytest.raises(ModelFileError, match=r"cut.*(refit the model|`winnow fit` wrote)"):
            winnowgp.load(cut)


def test_load_of_a_file_with_a_changed_byte_is_refused(file: Path, tmp_path: Path) -> None:
    content = bytearray(file.read_bytes())
    written_by = content.index(b'"written_by"')
    step = max(len(content) // 200, 1)
    for position in [*range(0, len(content), step), len(content) - 1]:
        if written_by <= position < written_by + 24:
            continue  # only used in messages
        changed = bytearray(content)
        changed[position] ^= 0b101
        bad = tmp_path / "bad"
        bad.write_bytes(changed)
        with pytest.raises(ModelFileError):
            winnowgp.load(bad)


@pytest.mark.parametrize(
    "content",
    [b"", b"x,y\n1,2\n", b"\x80\x04\x95pickle", b"\x89PNG\r\n\x1a\n" + bytes(100), b"{}" * 40],
)
def test_load_of_another_kind_of_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ModelFileError, match="is not a winnowgp model"):
        winnowgp.load(tmp_path / "a")


def test_load_of_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(save_tensors({"w": X}, metadata={"format": "pt"}))
    with pytest.raises(ModelFileError, match="is not a winnowgp model"):
        winnowgp.load(tmp_path / "a")


def test_load_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    write_archive(serialise("Checkpoint", {"step": 3}), tmp_path / "a")
    with pytest.raises(ModelFileError, match="a: is a Checkpoint, not a model"):
        winnowgp.load(tmp_path / "a")


def test_load_of_a_forged_outline_is_refused_or_harmless(file: Path, tmp_path: Path) -> None:
    rng, bad = random.Random(file.name), tmp_path / "bad"
    refused = 0
    for _ in range(40):
        bad.write_bytes(forged_outline(rng, file))
        try:
            winnowgp.load(bad)
        except ModelFileError:
            refused += 1
    assert refused > 20


def test_load_of_a_forged_tensor_is_refused(file: Path, tmp_path: Path) -> None:
    rng, bad = random.Random(0), tmp_path / "bad"
    for _ in range(40):
        name, content = forged_tensor(rng, file)
        kind = contents(file)[0]["value"]["$object"]
        if name == "candidates" and kind == "LatentVariableGP":
            continue  # the model is valid with any number of candidates
        bad.write_bytes(content)
        with pytest.raises(ModelFileError, match="bad"):
            pytest.fail(f"{name} was accepted: {winnowgp.load(bad)}")


@pytest.mark.parametrize(
    "name", ["Posterior", "DeepPosterior", "SparseGPClassifier-fast", "GPLVM-fast"]
)
def test_load_of_a_forged_version_1_file_is_refused_or_harmless(name: str, tmp_path: Path) -> None:
    """Version 1 files keep their JSON in the outline under other names."""
    rng, good, bad = random.Random(name), VERSION1 / f"{name}.winnow", tmp_path / "bad"
    content = good.read_bytes()
    for _ in range(20):
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= rng.randrange(1, 256)
        for damaged in (content[: rng.randrange(len(content))], bytes(changed)):
            bad.write_bytes(damaged)
            if b'"written_by":"0.1.0"' in damaged:
                with pytest.raises(ModelFileError):
                    winnowgp.load(bad)
    refused = 0
    for _ in range(20):
        bad.write_bytes(forged_version_1(rng, content))
        try:
            winnowgp.load(bad)
        except ModelFileError:
            refused += 1
    assert refused > 10


def forged_version_1(rng: random.Random, content: bytes) -> bytes:
    """Return a version 1 file with one entry of its outline replaced."""
    length = int.from_bytes(content[:8], "little")
    outline = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["outline"])
    node = outline
    while node["parts"] and rng.random() < 0.7:
        node = node["parts"][rng.choice(list(node["parts"]))]
    field = rng.choice(["kind", "about", "parts"])
    if node[field] and isinstance(node[field], dict) and rng.random() < 0.6:
        node = node[field]
        field = rng.choice(list(node))
    node[field] = rng.choice([None, -1, "word", [], {}, {"$object": "x"}, {"$tensor": "Z"}])
    return file_content(outline, load_tensors(content), version="1")


def rewritten(file: Path, change: Any) -> Path:
    """Change the outline and metadata of a file, under a checksum that fits."""
    outline, tensors = contents(file)
    metadata: dict[str, str] = {}
    change(outline["value"]["state"], metadata)
    file.write_bytes(file_content(outline, tensors, **metadata))
    return file


def test_load_of_a_newer_format_says_what_to_do(posterior_file: Path) -> None:
    version = FORMAT_VERSION + 1
    newer = rewritten(posterior_file, lambda state, metadata: metadata.update(version=str(version)))
    with pytest.raises(
        ModelFileError, match=rf"winnowgp 9\.9 in format {version}.*Install a newer"
    ):
        winnowgp.load(newer)


def _in_kernel(**changes: Any) -> Any:
    def change(state: Any, metadata: Any) -> None:
        state["kernel"]["state"]["config"]["kernels"][1] |= changes

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, m: s["kernel"].update({"$object": "os.system"}), "does not know"),
        (lambda s, m: s["kernel"].update({"$object": ["Kernel"]}), "does not know"),
        (lambda s, m: s["kernel"].update({"$object": "Mean"}), "does not know"),
        (lambda s, m: s["kernel"].update({"$tuple": []}), "does not understand"),
        (lambda s, m: s["kernel"].update(more=1), "does not understand"),
        (lambda s, m: s.update(mean=s.pop("kernel")), "lacks fields"),
        (lambda s, m: s.update(mean=s["kernel"]), "does not understand"),
        (lambda s, m: s.update(mean=s["likelihood"], likelihood=s["mean"]), "must be Mean"),
        (lambda s, m: s.update(Z={"$tensor": "L"}), "'Z' of a Posterior must be|understand"),
        (lambda s, m: s.update(Z={"$tensor": "L"}, L={"$tensor": "Z"}), "must be Float"),
        (lambda s, m: s.update(Z={"$array": "Z"}), "must be Float.*got ndarray"),
        (lambda s, m: s.update(Z={"$set": ["Z"]}), "does not know"),
        (lambda s, m: s.pop("kernel"), "lacks fields of a Posterior.*kernel"),
        (lambda s, m: m.update(version="one"), "does not understand"),
        (lambda s, m: m.update(version="0"), "does not understand"),
        (_in_kernel(name="eval"), "does not know"),
        (_in_kernel(arguments={"nu": 2.5, "ard_num_dims": 10**15}), "impossible size"),
        (_in_kernel(arguments={"nu": 2.5, "ard_num_dims": 2}), "does not fit"),
        (_in_kernel(arguments={"nu": 7.5}), "does not understand"),
        (_in_kernel(constraints=3), "does not understand"),
    ],
    ids=[
        "function as kernel",
        "list as kind",
        "mean as kernel",
        "tuple as kernel",
        "more fields of the kernel",
        "no kernel",
        "kernel twice",
        "likelihood and mean exchanged",
        "tensor twice",
        "tensors exchanged",
        "array as points",
        "set as points",
        "kernel missing",
        "version in words",
        "version zero",
        "unknown kernel",
        "huge kernel",
        "kernel of another width",
        "unknown smoothness",
        "number as constraints",
    ],
)
def test_load_of_an_edited_file_is_refused(posterior_file: Path, change: Any, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as raised:
        winnowgp.load(rewritten(posterior_file, change))
    assert str(posterior_file) in str(raised.value)


RBF: dict[str, Any] = {"name": "RBFKernel", "arguments": {}, "constraints": {}, "priors": {}}
LARGE = {**RBF, "arguments": {"ard_num_dims": 100_000}}
TWO = ("ard_num_dims", "num_mixtures")


@pytest.mark.parametrize(
    "inner",
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
def test_load_of_huge_components_is_refused_before_they_are_built(
    posterior_file: Path, inner: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(state: Any, metadata: Any) -> None:
        state["kernel"]["state"]["config"]["kernels"] = inner

    def built(*_: Any, **__: Any) -> None:
        pytest.fail("a component was built")

    monkeypatch.setattr(components, "_class", built)
    with pytest.raises(ModelFileError, match="Kernel of an impossible size"):
        winnowgp.load(rewritten(posterior_file, change))


def test_load_of_more_classes_than_functions_is_refused(tmp_path: Path) -> None:
    likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    model = VariationalGP(ScaleKernel(RBFKernel()), X[::5], likelihood=likelihood)
    posterior = model.posterior(Dataset.of(X, X[:, 0] // 2.1))
    file = save(posterior, tmp_path / "a")

    def change(state: Any, metadata: Any) -> None:
        arguments = state["likelihood"]["state"]["config"]["arguments"]
        arguments.update(num_features=900_000, num_classes=900_000)

    with pytest.raises(ModelFileError, match="3 latent functions and a likelihood of 900000"):
        winnowgp.load(rewritten(file, change))


def test_load_of_a_huge_number_of_samples_is_refused(tmp_path: Path) -> None:
    file = save(deep("gaussian").posterior(samples=10), tmp_path / "a")
    huge = rewritten(file, lambda state, metadata: state.update(samples=10**12))
    with pytest.raises(ModelFileError, match="draws 1000000000000 samples"):
        winnowgp.load(huge)


def test_load_of_a_tensor_used_twice_is_refused(tmp_path: Path) -> None:
    """A small file could otherwise fill memory."""
    outline = {"kind": "Model", "value": [{"$tensor": "0"}, {"$tensor": "0"}]}
    (tmp_path / "a").write_bytes(file_content(outline, {"0": torch.zeros(3)}))
    with pytest.raises(ModelFileError, match="does not understand"):
        winnowgp.load(tmp_path / "a")


def test_load_of_too_many_objects_is_refused(tmp_path: Path) -> None:
    mean = serialise("Model", SAVED["Posterior"]().mean).outline
    write_archive(Archive("Model", (_MAX_OBJECTS + 1) * [mean], {}), tmp_path / "a")
    with pytest.raises(ModelFileError, match="more than 10000 objects"):
        winnowgp.load(tmp_path / "a")


def test_load_of_a_deeply_nested_outline_is_refused(tmp_path: Path) -> None:
    inner: Any = {"$object": "Kernel", "state": {}}
    for _ in range(200):
        inner = {"$object": "Kernel", "state": {"k": inner}}
    path = write_archive(Archive("Model", inner, {}), tmp_path / "a")
    with pytest.raises(ModelFileError):
        winnowgp.load(path)


def test_load_of_an_outline_nested_beyond_recursion_is_refused(tmp_path: Path) -> None:
    levels = 100_000
    text = '{"kind": "Model", "value": ' + "[" * levels + "]" * levels + "}"
    entries = {"format": "winnowgp", "version": "2", "written_by": "9.9", "outline": text}
    content = save_tensors({}, metadata=entries | {"sha256": _digest(text, {}, 2)})
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ModelFileError, match="does not understand"):
        winnowgp.load(tmp_path / "a")


def test_format_9_of_several_targets_has_no_alarms() -> None:
    table = {"$object": "MultiOutputTable", "state": {"targets": ["a", "b"]}}
    outline = upgraded({"kind": "MultiOutputTable", "value": table}, 9, [])
    assert outline["value"]["state"] == {"targets": ["a", "b"], "alarms": []}
