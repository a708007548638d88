"""The differences of the scripts in examples/cookbook/ and examples/recipes/, for pages that show them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["with_diffs"]

_BLOCK = re.compile(r"<!-- diff: (\w+), written by make docs -->\n.*?<!-- /diff -->", re.DOTALL)


def with_diffs(page: str, examples: Path) -> str:
    """Returns a page with the differences written anew between its marks, ``<!-- diff: NAME, ... -->``.

    Args:
        page: The page.
        examples: One of its folders has ``NAME_torch.py`` and ``NAME.py`` for each mark.
    """

    def block(found: re.Match[str]) -> str:
        (script,) = examples.glob(f"*/{found[1]}_torch.py")
        pair = (script, script.with_name(f"{found[1]}.py"))
        before, after = (path.read_text(encoding="utf-8").splitlines() for path in pair)
        head = f"<!-- diff: {found[1]}, written by make docs -->"
        return "\n".join((head, "```diff", *_changes(before, after), "```", "<!-- /diff -->"))

    return _BLOCK.sub(block, page)


def _changes(before: list[str], after: list[str]) -> Iterator[str]:
    """Yields the lines that differ, with two on each side, and three dots for what is between them."""
    lines = list(difflib.unified_diff(before, after, n=2, lineterm=""))
    for line in lines[3:]:
        yield " ..." if line.startswith("@@") else line.rstrip()
