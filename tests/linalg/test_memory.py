"""Freed matrices are used again."""

import platform
import subprocess
import sys

import pytest
import torch

from winnowgp.linalg import on_cpu

_PROGRAM = """
import resource
import torch
from winnowgp.linalg import reuse_freed_memory
reuse_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    matrices = [torch.ones(900, 900, dtype=torch.float64) for _ in range(6)]
    del matrices
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about the allocator of glibc")
def test_reuse_freed_memory_matrices_are_cleared_at_most_thrice() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    faults = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    # Six matrices have 9,492 pages; without the call, 40,000 to 190,000 are cleared.
    assert int(faults) < 30_000


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
            ],
        ),
    ],
)
def test_on_cpu_keeps_values_and_layout(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnowgp.linalg._LONG_COPY", 20)
    module = torch.nn.Linear(5, 3).to(device)
    module.register_buffer("by_columns", torch.randn(4, 6, device=device).mT)
    before = {name: value.cpu() for name, value in module.state_dict().items()}
    after = on_cpu(module).state_dict()
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert not value.is_cuda
        assert torch.equal(value, before[name])
        assert value.stride() == before[name].stride()
