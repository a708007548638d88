"""The picture of docs/code_map.md: which room imports from which."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.harness.import_map import FILES, room, rooms_imported  # noqa: E402

__all__ = ["with_picture"]

_HEAD, _TAIL = "<!-- rooms: drawn by make docs from the imports -->", "<!-- /rooms -->"
# They only pass names on.
_DOORS = {"__init__", "__main__", "sources"}
# generate_artifacts makes a trainer when it is called, and trainer.export_artifacts calls this room.
_LATE = ("trainer", "artifacts")


def with_picture(page: str) -> str:
    """Returns a page with the picture drawn anew between its marks.

    An arrow leads from a room to one that imports from it. Arrows that follow from others are left out.
    """
    graph = networkx.DiGraph(
        (upstream, room(path))
        for path in FILES
        for upstream in sorted(rooms_imported(path) - {room(path)})
        if not {upstream, room(path)} & _DOORS and (upstream, room(path)) != _LATE
    )
    arrows = sorted(networkx.transitive_reduction(graph).edges)
    lines = [_HEAD, "```mermaid", "flowchart LR", *(f"    {first} --> {then}" for first, then in arrows), "```", _TAIL]
    return re.sub(f"{re.escape(_HEAD)}.*?{re.escape(_TAIL)}", "\n".join(lines), page, flags=re.DOTALL)
