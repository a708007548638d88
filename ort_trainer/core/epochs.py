"""How many epochs have begun in this process: callbacks and data sets change settings there, so a step is compared."""

from __future__ import annotations

count = 0
"""How many have begun; a function that returned it would be called in each step."""


def begin() -> None:
    """Counts an epoch that begins."""
    global count
    count += 1
