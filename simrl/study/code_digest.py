"""The digest of the code that a point's row depends on: what `simulate_point` imports, and the data files beside it.

Invariant: an edit that can move a row changes the digest, an edited docstring or comment does not. A module counts if it is
imported, transitively and wherever in a file the import is written (also inside a function), from `START`. A data file is any
file that is not Python; it counts if a module in its folder does, or in the nearest folder above that has modules, up to the
folder at the top (`shipped/` of an installation has none: a point hashes the profile that it names).
Left out: imports for type checkers alone, and `simrl/__init__.py`, which names the API and is covered by its version.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import simrl

START = "study/point.py"
CACHES = "__pycache__"


@cache
def code_digest() -> str:
    """Return the digest of the installed simrl."""
    return digest_of(Path(simrl.__file__).parent)


def digest_of(root: Path) -> str:
    """Return the digest of the simrl package at `root`, by the paths below it."""
    modules = imported(root)
    digest = hashlib.sha256()
    for path in sorted([*modules, *_data_files(root, modules)]):
        content = (root / path).read_bytes()
        part = (
            source_digest(content) if path.endswith(".py") else hashlib.sha256(content).hexdigest()
        )
        digest.update(f"{path}\0{part}\0".encode())
    return digest.hexdigest()


def source_digest(source: bytes) -> str:
    """Return the digest of a module's syntax tree without docstrings."""
    return _parsed(source)[0]


def imported(root: Path) -> set[str]:
    """Return the files that `START` imports, transitively, and itself, as paths below `root`."""
    modules, todo = set[str](), [START]
    while todo:
        path = todo.pop()
        if path not in modules:
            modules.add(path)
            todo += (
                file
                for name in _parsed((root / path).read_bytes())[1]
                for file in _files_of(root, name)
            )
    return modules


def _files_of(root: Path, name: str) -> Iterator[str]:
    """Yield the files that run when `simrl.a.b` is imported: the packages on the way, then the
    module. A name that is no module (of a function) has none."""
    place = Path()
    for part in name.split(".")[1:]:
        place /= part
        files = place / "__init__.py", place.with_suffix(".py")
        yield from (file.as_posix() for file in files if (root / file).is_file())


@cache
def _parsed(source: bytes) -> tuple[str, frozenset[str]]:
    """Return the digest of a module's syntax tree without docstrings, and the names below simrl
    that it imports."""
    tree = ast.parse(source)
    names = frozenset(name for name in _imports(tree) if name.startswith("simrl."))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [
                s
                for s in node.body
                if not (
                    isinstance(s, ast.Expr)  # a string that stands alone computes nothing
                    and isinstance(s.value, ast.Constant)
                    and isinstance(s.value.value, str)
                )
            ]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), names


def _imports(node: ast.AST) -> Iterator[str]:
    """Yield every name that may be an imported module: `from a import b` may mean `a` or `a.b`."""
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        children = node.orelse
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in children:
        yield from _imports(child)


def _data_files(root: Path, modules: set[str]) -> Iterator[str]:
    folders = {Path(path).parent for path in modules}
    for file in root.rglob("*"):
        path = file.relative_to(root)
        if (
            file.is_file()
            and file.suffix != ".py"
            and not (CACHES in path.parts or file.name.startswith("."))
            and _nearest_package(root, path.parent) in folders
        ):
            yield path.as_posix()


def _nearest_package(root: Path, folder: Path) -> Path:
    while len(folder.parts) > 1 and not any((root / folder).glob("*.py")):
        folder = folder.parent
    return folder
