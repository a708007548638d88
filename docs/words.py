"""Counts the pages of docs/ and the words that are written by hand: all but tables and what `make docs` writes."""

from __future__ import annotations

import re
from pathlib import Path

_MADE = re.compile(r"<!-- [\w-]+: written by make docs -->.*?<!-- /[\w-]+ -->|```diff\n.*?```", re.DOTALL)


def words(page: Path) -> int:
    """Returns how many words of a page are written by hand."""
    lines = _MADE.sub("", page.read_text(encoding="utf-8")).splitlines()
    return sum(len(line.split()) for line in lines if not line.startswith("|"))


def main() -> None:
    pages = {page.name: words(page) for page in sorted(Path(__file__).parent.glob("*.md"))}
    for name, count in pages.items():
        print(f"{count:7,}  {name}")
    print(f"{sum(pages.values()):7,}  on {len(pages)} pages")


if __name__ == "__main__":
    main()
