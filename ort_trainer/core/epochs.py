"""How many epochs have begun in this process: callbacks and data sets change settings there, so a step is compared."""

from __future__ import annotations

__all__ = ["begin", "begun"]

_count = 0


def begin() -> None:
    """Counts an epoch that begins."""
    global _count
    _count += 1


def begun() -> int:
    """Returns how many epochs have begun."""
    return _count
