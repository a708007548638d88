"""The differences of the cookbook's scripts, for docs/cookbook.md."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["with_diffs"]

_BLOCK = re.compile(r"<!-- diff: (\w+), written by make docs -->\n.*?<!-- /diff -->", re.DOTALL)


def with_diffs(page: str, folder: Path) -> str:
    """Returns a page with the differences written anew between its marks, ``<!-- diff: NAME, ... -->``.

    Args:
        page: The page.
        folder: Has ``NAME_torch.py`` and ``NAME.py`` for each mark.
    """

    def block(found: re.Match[str]) -> str:
        before, after = (
            (folder / f"{found[1]}{form}.py").read_text(encoding="utf-8").splitlines() for form in ("_torch", "")
        )
        head = f"<!-- diff: {found[1]}, written by make docs -->"
        return "\n".join((head, "```diff", *_changes(before, after), "```", "<!-- /diff -->"))

    return _BLOCK.sub(block, page)


def _changes(before: list[str], after: list[str]) -> Iterator[str]:
    """Yields the lines that differ, with two on each side, and three dots for what is between them."""
    lines = list(difflib.unified_diff(before, after, n=2, lineterm=""))
    for line in lines[3:]:
        yield " ..." if line.startswith("@@") else line.rstrip()
