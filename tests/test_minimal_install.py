"""The package works without its optional dependencies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


# `make dist` runs the same script where only the requirements are installed.
@pytest.mark.slow
def test_everything_but_the_extras_works_without_them() -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run(
        [sys.executable, str(HERE / "minimal_install.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "pip install 'winnowgp[onnx]'" in result.stderr + result.stdout
    assert "pip install 'winnowgp[parquet]'" in result.stderr + result.stdout
