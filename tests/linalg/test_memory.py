"""Freed matrices are used again."""

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource
import torch
from winnowgp.linalg import reuse_freed_memory
{call}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
for _ in range(20):
    blocks = [torch.ones(900, 900, dtype=torch.float64) for _ in range(6)]
    del blocks
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about the allocator of glibc")
def test_reuse_freed_memory_matrices_are_cleared_once() -> None:
    def faults(call: str) -> int:
        command = [sys.executable, "-c", _PROGRAM.format(call=call)]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    # Six matrices have 9,492 pages, which 20 rounds would clear 190,000 times.
    assert faults("reuse_freed_memory()") < 40_000
    assert faults("") > 80_000
