"""Scripts that get lines added, such as ``model = ORTModule(model)``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["extended", "script"]


def extended(source: str, lines: Sequence[str]) -> str:
    """Returns a script with lines added, and the import of ``ORTModule``.

    Args:
        source: The script.
        lines: Assignments. Each stands after the first statement that assigns to the same, or else to the variable that
            its target begins with.

    Raises:
        ValueError: If nothing assigns to it.
    """
    kept = source.splitlines()
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assign)]
    statements.sort(key=lambda node: node.lineno)
    for line in sorted(lines):
        (target,) = ast.parse(line).body[0].targets  # type: ignore[attr-defined]
        wanted = [ast.unparse(target), *(node.id for node in ast.walk(target) if isinstance(node, ast.Name))]
        places = [
            node
            for name in wanted
            for node in statements
            if name in (ast.unparse(part) for whole in node.targets for part in getattr(whole, "elts", [whole]))
        ]
        if not places:
            raise ValueError(f"nothing assigns to {wanted[0]!r}, after which {line!r} would stand")
        assert places[0].end_lineno is not None
        kept[places[0].end_lineno - 1] += f"\n{' ' * places[0].col_offset}{line}"
    return "from ort_trainer import ORTModule\n" + "\n".join(kept)


def script(name: str, source: str) -> ModuleType:
    """Returns the module that a source makes; others can import it by its name."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, name, "exec"), vars(module))
    return module
