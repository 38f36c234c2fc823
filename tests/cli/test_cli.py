"""The command as a newcomer types it."""

import subprocess
import sys
from pathlib import Path

import pytest

from winnowgp import __version__

WINNOW = [sys.executable, "-m", "winnowgp"]


def winnow(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WINNOW, *words], cwd=cwd, capture_output=True, text=True, timeout=300)


def test_version(tmp_path: Path) -> None:
    result = winnow("--version", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"winnow {__version__}\n")


def test_help_names_the_commands_without_importing_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['winnow', '--help']\n"
        "from winnowgp.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "demo" in result.stdout
    assert result.stdout.endswith("False\n")


def test_a_name_brings_in_only_what_it_needs() -> None:
    """scikit-learn, a second and a half, with estimators alone; clusters and pictures never."""
    code = (
        "import sys, winnowgp\n"
        "heavy = {'torch', 'sklearn', 'sklearn.cluster', 'matplotlib', 'safetensors', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "from winnowgp import SparseGP, fit\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "from winnowgp import SparseGPRegressor, GPLVM\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    nothing, models, estimators = result.stdout.splitlines()
    assert nothing == "[]"
    # Fits write checkpoints.
    assert models == "['safetensors', 'torch']"
    assert estimators == "['safetensors', 'sklearn', 'torch']"


def test_the_demo_draws_a_picture_and_prints_a_table(tmp_path: Path) -> None:
    result = winnow("demo", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "kept and refitted" in result.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["winnow-demo.png"]
    assert (tmp_path / "winnow-demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("figure.doc", "must end in one of .png"),
        ("nowhere/figure.png", "folder that exists"),
        ("taken.png", "a file that can be written"),
    ],
)
def test_a_bad_output_is_one_line_and_exit_code_2(
    tmp_path: Path, output: str, message: str
) -> None:
    (tmp_path / "taken.png").mkdir()
    result = winnow("demo", "--output", output, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["taken.png"]
