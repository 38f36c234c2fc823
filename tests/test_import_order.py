"""The layout of the package: the order of imports, and one meaning per public name."""

import ast
import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import winnowgp
from winnowgp.errors import MissingExtraError

ROOT = Path(winnowgp.__file__).parent
# Every package and top-level module, lowest first: each may import those before it.
LAYOUT = [
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
    "report",
    "plots",
    "estimators",
    "tabular",
    "integrations",
    "experiments",
    "cli",
]
FILES = sorted(p for p in ROOT.rglob("*.py") if p.name not in ("__init__.py", "__main__.py"))
FILES += sorted(p for p in ROOT.rglob("__init__.py") if p.parent != ROOT)
PACKAGES = sorted(p.parent for p in ROOT.rglob("__init__.py"))
MODULE_NAME = re.compile(r"winnowgp(\.\w+)+")
UNKNOWN = "a name that is only known at run time"


def layer(path: Path) -> str:
    """The entry of the layout that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(source: str, package: str = "winnowgp") -> set[str]:
    """Entries of the layout that a module's source imports, by statement or by string."""
    layers = set()
    for node in ast.walk(ast.parse(source)):
        for name in _module_names(node, package.split(".")):
            layers.add(_layer_of(name))
    return layers - {""}


def _module_names(node: ast.AST, package: list[str]) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        parents = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join([*parents, *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return [f"{node.value.id}.{node.attr}"]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value] if MODULE_NAME.fullmatch(node.value) else []
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        start = str(node.values[0].value)
        # f"winnowgp.{name}" could be any module.
        return [start if MODULE_NAME.match(start) else "winnowgp.*"] * start.startswith("winnowgp.")
    return []


def _layer_of(name: str) -> str:
    parts = name.split(".")
    if parts[0] != "winnowgp" or len(parts) == 1 or parts[1].startswith("__"):
        return ""
    if parts[1] in winnowgp.__all__:
        return getattr(winnowgp, parts[1]).__module__.split(".")[1]
    return UNKNOWN if parts[1] == "*" else parts[1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_imports_only_lower_layers(path: Path) -> None:
    allowed = LAYOUT[: LAYOUT.index(layer(path)) + 1]
    package = ".".join(["winnowgp", *path.relative_to(ROOT).parts[:-1]])
    assert imported(path.read_text(encoding="utf-8"), package) <= set(allowed)


def test_layout_lists_every_package() -> None:
    assert {layer(path) for path in FILES} == set(LAYOUT)


@pytest.mark.parametrize(
    ("source", "layers"),
    [
        ("import winnowgp.io", {"io"}),
        ("from winnowgp.models.sgpr import SparseGP", {"models"}),
        ("from winnowgp import models, errors", {"models", "errors"}),
        ("from winnowgp import SparseGPRegressor", {"estimators"}),
        ("import winnowgp\nwinnowgp.cli.run()", {"cli"}),
        ("from ..estimators import base", {"estimators"}),
        ("from .format import load", {"io"}),
        ("import_module('winnowgp.estimators.base')", {"estimators"}),
        ("HOMES = {'GPLVM': 'winnowgp.estimators'}", {"estimators"}),
        ("import_module(f'winnowgp.estimators.{name}')", {"estimators"}),
        ("import_module(f'winnowgp.{name}')", {UNKNOWN}),
        ("'winnowgp is a package'; 'winnowgp.SparseGP, which'; f'winnowgp {1}'", set()),
        ("import torch\nfrom torch import nn\ntorch.io", set()),
    ],
)
def test_imported_finds_statements_and_strings(source: str, layers: set[str]) -> None:
    assert imported(source, "winnowgp.io") == layers


def exported(package: Path) -> set[str]:
    """Names that a package's `__init__.py` defines or imports, other than its own modules."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        own = ".".join(("winnowgp", *package.relative_to(ROOT).parts))
        if isinstance(node, ast.ImportFrom) and node.module != own:
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return names


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: str(p.relative_to(ROOT.parent)))
def test_no_module_shares_its_name_with_an_export(package: Path) -> None:
    modules = {p.stem for p in package.glob("*.py")} | {p.name for p in package.iterdir()}
    assert exported(package) & (modules - {"__init__"}) == set()


def test_public_name_has_one_meaning() -> None:
    meanings: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    names = [".".join(p.relative_to(ROOT.parent).parts) for p in PACKAGES]
    names += [f"winnowgp.{p.stem}" for p in ROOT.glob("*.py") if not p.stem.startswith("__")]
    for name in names:
        try:
            module = import_module(name)
        except MissingExtraError:
            continue
        for public in getattr(module, "__all__", ()):
            meanings[public].append((name, getattr(module, public)))
    ambiguous = {
        public: [name for name, _ in exports]
        for public, exports in meanings.items()
        if len({id(meaning) for _, meaning in exports}) > 1
    }
    assert ambiguous == {}
    assert len(meanings) > 80
