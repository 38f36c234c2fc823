"""The command `winnow`: version, help, imports, demo and bad output paths."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from winnowgp import __version__
from winnowgp.cli.app import run
from winnowgp.experiments import illustration

WINNOW = [sys.executable, "-m", "winnowgp"]


def winnow(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WINNOW, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )


def test_version_is_printed(tmp_path: Path) -> None:
    result = winnow("--version", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"winnow {__version__}\n")


def test_help_does_not_import_torch(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "9"}, "None")],
)
def test_command_waits_passively_unless_the_user_has_set_how(
    given: dict[str, str], expected: str
) -> None:
    code = (
        "import os, sys; sys.argv = ['winnow', '--version']\n"
        "from winnowgp.cli import main\n"
        "assert 'torch' not in sys.modules\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(os.environ.get('OMP_WAIT_POLICY'))"
    )
    names = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
    environment = {k: v for k, v in os.environ.items() if k not in names} | given
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert result.stdout.splitlines()[-1] == expected


def test_info_does_not_import_scikit_learn(models: dict[str, Path]) -> None:
    code = (
        f"import sys; sys.argv = ['winnow', 'info', {str(models['y'])!r}]\n"
        "from winnowgp.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'sklearn', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "inducing points" in result.stdout
    assert result.stdout.endswith("['torch']\n")


def test_import_of_a_name_loads_only_what_it_needs() -> None:
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


def drew(output: str, folder: Path) -> None:
    """A table of fewer points than there were, and a picture that is all there is in the folder."""
    every, kept = (
        re.search(rf"{name} +│ +(\d+) │ +(-?\d+\.\d\d) │", output)
        for name in ("all candidates", "selected and refitted")
    )
    assert every is not None
    assert kept is not None
    assert 0 < int(kept.group(1)) < int(every.group(1)) == 50
    assert float(kept.group(2)) != float(every.group(2))
    assert [p.name for p in folder.iterdir()] == ["winnow-demo.png"]
    assert (folder / "winnow-demo.png").read_bytes().startswith(b"\x89PNG")


def test_demo_saves_a_plot_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Train for few steps: the output alone is tested."""
    short = partial(illustration.illustrate, pre=20, process=8, post=10)
    monkeypatch.setattr(illustration, "illustrate", short)
    monkeypatch.chdir(tmp_path)
    assert run(["demo"]) == 0
    drew(capsys.readouterr().out, tmp_path)


@pytest.mark.slow
def test_demo_in_full(tmp_path: Path) -> None:
    result = winnow("demo", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    drew(result.stdout, tmp_path)


def test_invalid_input_sets_the_exit_code(tmp_path: Path) -> None:
    result = winnow("demo", "--output", "figure.doc", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "must end in one of .png" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("nowhere/figure.png", "folder that exists"),
        ("taken.png", "a file that can be written"),
    ],
)
def test_bad_output_is_one_line_and_exit_code_2(
    output: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.png").mkdir()
    assert run(["demo", "--output", output]) == 2
    output = capfd.readouterr().err
    assert output.count("\n") == 1
    assert message in output
    assert [p.name for p in tmp_path.iterdir()] == ["taken.png"]
