"""The reference: a page a room, with every public name under the module that it lives in.

Rooms and modules open with their own docstrings, so that reference and code say the same.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "winnowgp"


@dataclass(frozen=True, slots=True)
class Drawer:
    """A module of a room, and the public names that it holds."""

    package: str
    """Where they are imported from."""
    module: str
    """Where they are written."""
    names: tuple[str, ...]

    def paths(self) -> list[str]:
        """Where each name is imported from, or written where a module has taken that place."""
        taken = self.module.rpartition(".")[2]
        return [f"{self.module if n == taken else self.package}.{n}" for n in self.names]


def rooms() -> list[str]:
    """Every room that has public names, folders and files, in the order of the alphabet."""
    folders = [room.name for room in PACKAGE.iterdir() if room.is_dir() and drawers(room.name)]
    files = [file.stem for file in PACKAGE.glob("*.py") if not file.stem.startswith("_")]
    return sorted([*folders, *files])


def drawers(room: str) -> list[Drawer]:
    """The public names of a room, and of the packages inside it."""
    files = sorted((PACKAGE / room).rglob("__init__.py"), key=lambda file: file.parts)
    return [drawer for file in files for drawer in _imported(file)]


def room_page(room: str) -> str:
    """The reference page of a room, in markdown."""
    path = f"winnowgp.{room}"
    if not (PACKAGE / room).is_dir():
        bare = "      show_root_heading: false\n      show_root_toc_entry: false\n"
        return f"# {path}\n\n::: {path}\n    options:\n{bare}"
    parts, package = [f"# {path}", _docstring(path)], path
    for drawer in drawers(room):
        if drawer.package != package:
            package = drawer.package
            parts += [f"## {package}", _docstring(package)]
        parts += [f"## {drawer.module.rpartition('.')[2].replace('_', ' ')}"]
        parts += [_docstring(drawer.module)]
        parts += [f"::: {path}" for path in drawer.paths()]
    return "\n\n".join(parts) + "\n"


def _imported(file: Path) -> list[Drawer]:
    """What an `__init__.py` imports and lists in `__all__`, module by module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    public: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public = set(ast.literal_eval(node.value))
    package = ".".join(("winnowgp", *file.parent.relative_to(PACKAGE).parts))
    found = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = tuple(alias.name for alias in node.names if alias.name in public)
            found += [Drawer(package, node.module, names)] if names else []
    return found


def _docstring(module: str) -> str:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
