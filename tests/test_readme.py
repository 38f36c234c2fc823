"""The README: every block runs after its own installation steps, and pictures and links exist."""

import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest

from helpers.short_fits import shortest_fits
from winnowgp.cli.app import run

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def commands(program: str) -> list[list[str]]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]


@pytest.mark.unchecked
def test_python_block_prints_the_output_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (code,), (shown,) = blocks("python"), blocks("text")
    exec(code, {})
    printed = capsys.readouterr().out
    number = r"-?\d+\.?\d*"
    assert re.sub(number, "#", printed) == re.sub(number, "#", shown)
    actual, expected = ([float(n) for n in re.findall(number, t)] for t in (printed, shown))
    # The last digits of a fit depend on the processor.
    np.testing.assert_allclose(actual, expected, atol=2e-3)


@pytest.mark.unchecked
def test_winnow_commands_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    size, price = rng.uniform(40, 200, 60), rng.normal(size=60)
    rows = [
        f"h{i},{s:.1f},{3 * s + p:.2f}" for i, (s, p) in enumerate(zip(size, price, strict=True))
    ]
    (tmp_path / "houses.csv").write_text("\n".join(["house,size,price", *rows]), encoding="utf-8")
    (tmp_path / "new.csv").write_text("house,size\na,100\nb,50\n", encoding="utf-8")
    sold = "house,size,price\na,100,300\nb,50,151\nc,70,209\n"
    (tmp_path / "sold.csv").write_text(sold, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    lines = commands("winnow")
    assert {"evaluate", "compare", "fit"} <= {line[1] for line in lines}
    for _, *arguments in lines:
        prints = arguments[0] in ("evaluate", "compare")
        with shortest_fits():
            assert run(arguments if prints else [*arguments, "-q"]) == 0
    written = {"houses.winnow", "cv.winnow", "predicted.csv", "houses.html", "houses.onnx"}
    assert written <= {path.name for path in tmp_path.iterdir()}


def test_alarms_gallery_priors_and_cross_validation_are_mentioned() -> None:
    for mention in ("docs/alarms.md", "docs/gallery.md", "priors=", "--cv 5"):
        assert mention in TEXT


def test_make_targets_and_extras_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [words[1] for words in commands("make")]
    assert {"demo", "test"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [
        extra for group in re.findall(r"winnowgp\[([^\]]+)\]", TEXT) for extra in group.split(",")
    ]
    assert named
    assert set(named) <= set(project["optional-dependencies"])


def test_pictures_and_links_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    local = [target for target in targets if "://" not in target]
    assert len(local) > 10
    assert [target for target in local if not (ROOT / target).is_file()] == []


def test_readme_is_at_most_130_lines() -> None:
    assert len(TEXT.splitlines()) <= 130
