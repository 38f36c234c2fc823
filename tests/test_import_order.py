"""Imports fall downhill: a room imports only rooms that come before it."""

import ast
from pathlib import Path

import pytest

import winnowgp

ROOT = Path(winnowgp.__file__).parent
ROOMS = [
    "typing",
    "errors",
    "linalg",
    "data",
    "point_processes",
    "bounds",
    "gradients",
    "selection",
    "models",
    "io",
    "training",
    "plots",
    "report",
    "estimators",
    "integrations",
    "experiments",
    "cli",
]


def room_of(module: str) -> str:
    return module.split(".")[1]


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        rooms |= {room_of(m) for m in modules if m.startswith("winnowgp.")}
    return rooms


FILES = [
    p
    for p in ROOT.rglob("*.py")
    if p.parent != ROOT or p.stem in ("typing", "errors", "linalg", "gradients")
]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_rooms_before_it(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    allowed = ROOMS[: ROOMS.index(own) + 1]
    assert imported_rooms(path) <= set(allowed)


def test_every_room_is_on_the_list() -> None:
    found = {p.relative_to(ROOT).parts[0].removesuffix(".py") for p in FILES}
    assert found <= set(ROOMS)
