"""Generated sections of a document that several scripts write: each preserves the sections of the others."""

from __future__ import annotations

from pathlib import Path

__all__ = ["read_section", "write_section"]


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: generated -->\n", f"<!-- end of {name} -->\n"


def read_section(path: Path, name: str) -> str:
    """Returns a section with its marks; empty if the document does not have it."""
    start, end = _marks(name)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    _, found, rest = text.partition(start)
    return start + rest.partition(end)[0] + end if found else ""


def write_section(path: Path, name: str, content: str) -> None:
    """Replaces the section of this name, or appends it to the document."""
    start, end = _marks(name)
    text, old = path.read_text(encoding="utf-8"), read_section(path, name)
    section = f"{start}{content.rstrip()}\n{end}"
    path.write_text(text.replace(old, section) if old else f"{text.rstrip()}\n\n{section}", encoding="utf-8")
