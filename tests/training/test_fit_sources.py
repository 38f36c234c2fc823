"""Fits of sources equal those of the same rows in memory; faulty sources raise errors."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from pyarrow import parquet

from helpers.short_fits import short_fits
from helpers.tracked_source import Tracked
from winnowgp import Checkpoint
from winnowgp.data import (
    ArraySource,
    BatchSource,
    Dataset,
    ParquetSource,
    Source,
    Standardiser,
    shard,
)
from winnowgp.data.scaling import StandardisedSource
from winnowgp.errors import InputError
from winnowgp.models import SparseGP, VariationalGP
from winnowgp.models.kernels import prior_mean
from winnowgp.point_processes import SquaredCardinality
from winnowgp.training import FastSchedule, FitResult, PaperSchedule, Progress, fit

N, GROUP = 60, 20
RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, size=(N, 1))
Y = np.sin(2 * X[:, 0]) + 0.3 * RNG.normal(size=N)
WHOLE = Dataset.of(torch.tensor(X), torch.tensor(Y))
PLAN = FastSchedule(n_candidates=8, rounds=1, selection_rows=40, gain=1e-3, inclusion_steps=5)


def parquet_file(path: Path, y: Any = Y, group: int = GROUP) -> Path:
    columns = pyarrow.table({"a": X[:, 0], "y": y})
    parquet.write_table(columns, path, row_group_size=group)
    return path


def open_source(path: Path) -> ParquetSource:
    return ParquetSource(path, targets=["y"])


def folder(path: Path) -> Path:
    path.mkdir()
    for number, rows in enumerate((slice(0, 30), slice(30, N))):
        columns = pyarrow.table({"a": X[rows, 0], "y": Y[rows]})
        parquet.write_table(columns, path / f"{number}.parquet", row_group_size=12)
    return path


def maps(path: Path) -> ArraySource:
    np.save(path / "X.npy", X)
    np.save(path / "y.npy", Y)
    return ArraySource.open(path / "X.npy", path / "y.npy")


def batches() -> Any:
    return ((X[i : i + 14], Y[i : i + 14]) for i in range(0, N, 14))


def in_units(source: Source) -> Source:
    """X and y in other units and back: divided by two, having been twice as large."""
    twice = ArraySource(2 * X, 2 * Y)
    assert source.N == twice.N
    units = [Standardiser(torch.zeros(d).double(), torch.full((d,), 2.0).double()) for d in (1, 1)]
    return StandardisedSource(twice, *units)


SOURCES: dict[str, Callable[[Path], Source]] = {
    "arrays": lambda _: ArraySource(X, Y),
    "memory maps": maps,
    "parquet": lambda path: open_source(parquet_file(path / "a.parquet")),
    "folder": lambda path: open_source(folder(path / "table")),
    "batches": lambda _: BatchSource(batches),
    "units": lambda _: in_units(ArraySource(X, Y)),
    "tracked": lambda _: Tracked(WHOLE),
    "shared tensors": lambda _: shard(WHOLE),
    "shared parquet": lambda path: shard(open_source(parquet_file(path / "a.parquet"))),
}
# The others differ in how they read, which tests of sources cover.
QUICK = {"arrays", "parquet", "batches", "shared parquet"}


def gp(K: int = 0, **settings: Any) -> SparseGP:
    kernel = ScaleKernel(RBFKernel())
    return SparseGP(kernel, WHOLE.X[:K], mean=ConstantMean(), noise=0.1, **settings)


def fitted(source: Source, **settings: Any) -> FitResult[SparseGP]:
    with short_fits():
        return fit(gp(), source, **{"schedule": PLAN, **settings})


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks per pass, none aligned with a row group or a batch."""
    monkeypatch.setattr("winnowgp.bounds.row_blocks.CHUNK", 25)
    monkeypatch.setattr("winnowgp.training.initialization.HELD", 0)


@pytest.fixture(scope="module")
def expected() -> FitResult[SparseGP]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("winnowgp.bounds.row_blocks.CHUNK", 25)
        return fitted(WHOLE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> FitResult[SparseGP]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("winnowgp.bounds.row_blocks.CHUNK", 25)
        patch.setattr("winnowgp.training.initialization.HELD", 0)
        return fitted(open_source(parquet_file(tmp_path_factory.mktemp("whole") / "table.parquet")))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in SOURCES],
)
def test_fit_any_source_equals_rows_in_memory(
    name: str, expected: FitResult[SparseGP], tmp_path: Path
) -> None:
    found = fitted(SOURCES[name](tmp_path))
    assert found.posterior.M == expected.posterior.M
    assert found.elbo == pytest.approx(expected.elbo, rel=1e-6)
    assert found.evidence is not None
    assert expected.evidence is not None
    # Exact where the rows are in memory; otherwise the ELBO and an upper bound enclose it.
    assert expected.evidence.exact
    if name == "shared tensors":
        assert found.evidence.upper == pytest.approx(expected.evidence.upper, rel=1e-6)
    else:
        assert found.evidence.method == "trace"
        assert found.evidence.lower == pytest.approx(found.elbo, rel=1e-6)
        assert found.evidence.lower <= expected.evidence.lower + 1e-6
        assert found.evidence.upper == pytest.approx(found.model.upper_bound(WHOLE), rel=1e-6)
        assert found.evidence.upper > expected.evidence.upper
    for settings in ({}, {"observed": True}):
        ours, theirs = (f.posterior.predict(WHOLE.X[:20], **settings) for f in (found, expected))
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(
        found.selection.inclusion, expected.selection.inclusion, rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("sample", [20, 10], ids=["a part of an order", "numbers drawn"])
def test_fit_uses_rows_beyond_the_sample(
    sample: int, expected: FitResult[SparseGP], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnowgp.training.initialization.SAMPLE", sample)
    source = Tracked(WHOLE)
    found = fitted(source)
    # The result is for all rows: the direct bound, and predictions of the same points.
    assert found.elbo == pytest.approx(found.model.bound(WHOLE).item(), rel=1e-8)
    means = [
        posterior.predict(WHOLE.X[:20]).mean
        for posterior in (found.posterior, found.model.posterior(WHOLE))
    ]
    torch.testing.assert_close(*means, rtol=0, atol=1e-8)
    assert found.elbo > expected.elbo - 0.2 * N


def test_fit_memory_is_limited_to_sample_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnowgp.training.initialization.SAMPLE", 10)
    monkeypatch.setattr("winnowgp.bounds.row_blocks.CHUNK", 5)
    # The first rows are read for the fingerprint.
    monkeypatch.setattr(sys.modules["winnowgp.training.fingerprint"], "FIRST", 10)
    source = Tracked(WHOLE)
    found = fitted(source)
    assert source.most <= 10 + 10 + 3 * 5
    # L-BFGS uses all rows, not the sample: two passes for each of dozens of evaluations.
    assert source.read > 60 * N
    del found
    assert source.alive == 0


def test_fit_source_where_rows_must_be_in_memory_raises(tmp_path: Path) -> None:
    source = open_source(parquet_file(tmp_path / "a.parquet"))
    kernel = ScaleKernel(RBFKernel())
    variational = VariationalGP(kernel, WHOLE.X[:5], likelihood=GaussianLikelihood())
    message = r"needs all 60 rows in memory at once; read them with"
    with pytest.raises(InputError, match=f"`VariationalGP` {message}"):
        fit(variational, source)
    plan = PaperSchedule(SquaredCardinality(5, 0.1), pre=2, joint=2, post=2)
    with pytest.raises(
        InputError, match=f"`PaperSchedule` {message}.*Regression with Gaussian noise"
    ):
        fit(gp(5), source, schedule=plan)
    # The remedy in the message works.
    read = next(source.chunks(source.N))
    assert fit(gp(5), read, schedule=plan).posterior.M <= 5


def test_fit_nan_in_row_group_raises(tmp_path: Path) -> None:
    bad = Y.copy()
    bad[37] = np.nan
    path = parquet_file(tmp_path / "table.parquet", bad, group=1)
    events: list[Progress] = []
    where = Checkpoint(tmp_path / "run", 0)
    message = r"table\.parquet: column 'y' has nan in row 38 \(row group 37, counted from 0"
    for source in (open_source(path), shard(open_source(path))):
        with pytest.raises(InputError, match=message):
            fitted(source, callbacks=events.append, checkpoint=where)
    assert events == []


def after(step: str, change: Callable[[], object]) -> Callable[[Progress], None]:
    """Return a callback that changes the file once, when a phase begins."""
    done: list[None] = []

    def watch(progress: Progress) -> None:
        if progress.phase == step and not done:
            done.append(None)
            change()

    return watch


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def changed(path: Path) -> None:
    """Change the time of the file, but neither its size nor its row groups."""
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 60_000_000_000))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (cut, r"table\.parquet has changed since it was opened"),
    "other row groups": (lambda p: parquet_file(p, group=3), r"table\.parquet has changed since"),
    "other rows": (changed, r"table\.parquet has changed since it was opened; every pass must"),
    "gone": (Path.unlink, r"table\.parquet cannot be read: No such file"),
}


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        ("cut off", "optimisation"),
        ("other rows", "optimisation"),
        pytest.param("other row groups", "optimisation", marks=pytest.mark.slow),
        pytest.param("gone", "optimisation", marks=pytest.mark.slow),
        pytest.param("cut off", "initialisation", marks=pytest.mark.slow),
    ],
)
def test_fit_changed_file_raises_and_resumes_when_restored(
    fault: str, step: str, undisturbed: FitResult[SparseGP], tmp_path: Path
) -> None:
    path, where = parquet_file(tmp_path / "table.parquet"), Checkpoint(tmp_path / "run", 0)
    whole = path.read_bytes()
    change, message = FAULTS[fault]
    watch = after(step, lambda: change(path))
    with pytest.raises(InputError, match=message):
        fitted(open_source(path), callbacks=watch, checkpoint=where)
    held = where.read()
    assert held is not None
    assert not held["finished"]
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["fit.checkpoint"]
    path.write_bytes(whole)
    events: list[Progress] = []
    found = fitted(open_source(path), callbacks=events.append, checkpoint=where)
    # Steps taken before are not repeated, and the result is that of an undisturbed fit.
    assert events[0].phase == step
    assert found.elbo == undisturbed.elbo
    assert torch.equal(found.posterior.Z, undisturbed.posterior.Z)


def test_fit_truncated_file_raises(tmp_path: Path) -> None:
    path = parquet_file(tmp_path / "table.parquet")
    cut(path)
    with pytest.raises(InputError, match=r"table\.parquet cannot be read as Parquet.*cut off"):
        open_source(path)


def test_fit_damaged_row_group_raises(tmp_path: Path) -> None:
    """The footer is intact; the row group is not."""
    path = parquet_file(tmp_path / "table.parquet")
    from pyarrow import parquet

    chunk = parquet.ParquetFile(path).metadata.row_group(2).column(1)
    content = bytearray(path.read_bytes())
    start, size = chunk.dictionary_page_offset, chunk.total_compressed_size
    content[start : start + size] = b"\xff" * size
    path.write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"table\.parquet: row group 2 .*cannot be read"):
        fitted(open_source(path))


NOISE = RNG.uniform(0.01, 0.5, N)


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", ["parquet", "batches"])
def test_known_noise_of_a_streamed_source_is_that_of_rows_in_memory(
    kind: str, tmp_path: Path
) -> None:
    if kind == "parquet":
        columns = pyarrow.table({"a": X[:, 0], "s": NOISE, "y": Y})
        parquet.write_table(columns, tmp_path / "a.parquet", row_group_size=GROUP)
        source = ParquetSource(tmp_path / "a.parquet", targets="y", noise="s")
    else:
        rows = [slice(0, 23), slice(23, N)]
        source = BatchSource(lambda: ((X[r], Y[r], NOISE[r]) for r in rows))
    assert source.has_noise
    assert source.shard(1, 2).has_noise
    assert source.D == 1
    known = torch.tensor(NOISE)
    whole, some = Dataset.of(WHOLE.X, WHOLE.Y, noise=known[:, None]), torch.tensor([41, 3, 3])
    torch.testing.assert_close(source.part(some).noise, known[some, None])
    torch.testing.assert_close(
        source.shard(1, 2).part(some[1:]).noise, known[N // 2 + some[1:], None]
    )
    small = gp(6)
    assert small.fixed_bound(source) == pytest.approx(small.fixed_bound(whole), rel=1e-10)
    with torch.no_grad():
        K = small.kernel(whole.X).to_dense()
        Q = K[:, :6] @ torch.linalg.solve(K[:6, :6], K[:6])
        row_noise = known + small.noise
        dense = (
            torch.distributions.MultivariateNormal(
                prior_mean(small.mean, whole.X)[:, 0], Q + row_noise.diag()
            ).log_prob(whole.Y[:, 0])
            - 0.5 * ((K - Q).diagonal() / row_noise).sum()
        )
    assert small.fixed_bound(source) == pytest.approx(dense.item(), rel=1e-5)
    masks = torch.tensor([[True] * 6, [True, False, True] * 2])
    torch.testing.assert_close(
        small.subset_statistics(source).value(masks), small.subset_statistics(whole).value(masks)
    )
