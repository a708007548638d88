"""Reads from the files of the package and the tests which file imports which."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ort_trainer"
TESTS = ROOT / "tests"
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    """Returns a file, parsed."""
    return ast.parse(path.read_text(), filename=str(path))


def target(path: Path, node: ast.ImportFrom) -> tuple[str, ...]:
    """Returns the module that a file imports names from, as parts that begin at the root.

    Raises:
        AssertionError: If it is outside the package.
    """
    name = tuple(node.module.split(".")) if node.module else ()
    if not node.level:
        return name
    parts = path.relative_to(ROOT).parts
    if node.level >= len(parts):
        raise AssertionError(f"{path} imports from outside the package")
    return (*parts[: len(parts) - node.level], *name)


def room(path: Path) -> str:
    """Returns the room of a file of the package: its folder at the top, or the file itself if it lies there."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def rooms_imported(path: Path) -> set[str]:
    """Returns the rooms that a file of the package imports from, for type checkers too."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            _, *parts = target(path, node)
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
    return found


@functools.cache
def imported(path: Path, checkers: bool = False) -> frozenset[Path]:
    """Returns the files that a file imports: those that define the names, not those that re-export them.

    Args:
        path: The file.
        checkers: Whether imports for type checkers only count; otherwise, a file that iterates over the modules of its
            folder imports them all.
    """
    found: set[Path] = set()
    for node in ast.walk(tree(path)) if checkers else _running(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr == "iter_modules" and not checkers:
            found |= set(path.parent.glob("*.py"))
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found |= _definition(target(path, node), alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found |= _definition(tuple(alias.name.split(".")), "")
    return frozenset(found - {path})


def closure(paths: Iterable[Path]) -> set[Path]:
    """Returns some files and all files that they import, directly or indirectly."""
    return set(_reached(paths, imported))


def circular() -> set[Path]:
    """Returns the files of the package that import themselves through others, imports for type checkers included."""

    def each(path: Path) -> Iterable[Path]:
        return imported(path, checkers=True)

    return {path for path in FILES if path in _reached(each(path), each)}


def dependents(paths: Iterable[Path], files: Iterable[Path]) -> dict[Path, int]:
    """Returns which of ``files`` depend on ``paths`` -> number of imports in between; 0 for ``paths`` themselves."""
    importers = defaultdict(set)
    for file in files:
        for path in imported(file):
            importers[path].add(file)
    return _reached(paths, lambda path: importers[path])


def _reached(paths: Iterable[Path], step: Callable[[Path], Iterable[Path]]) -> dict[Path, int]:
    found = dict.fromkeys(paths, 0)
    waiting = deque(found)
    while waiting:
        path = waiting.popleft()
        for other in step(path):
            if other not in found:
                found[other] = found[path] + 1
                waiting.append(other)
    return found


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a file that run, unlike those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and child not in node.orelse:
            continue
        yield child
        yield from _running(child)


def _definition(module: tuple[str, ...], name: str) -> set[Path]:
    """Returns the file that defines a name of a module, or an empty set if it belongs to another library."""
    if module[:1] not in (("ort_trainer",), ("tests",)):
        return set()
    submodule = _file((*module, name)) if name else None
    if submodule is not None:
        return {submodule}
    path = _file(module)
    if path is None:
        return set()
    if path.name == "__init__.py" and name:
        place = _passed_on(path).get(name)
        if place is not None:
            return _definition(*place)
    return {path}


def _file(module: tuple[str, ...]) -> Path | None:
    path = ROOT.joinpath(*module)
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


@functools.cache
def _passed_on(path: Path) -> dict[str, tuple[tuple[str, ...], str]]:
    """Returns the names that an ``__init__`` re-exports, including by ``lazily``, with their modules."""
    found = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = (target(path, node), alias.name)
    return found
