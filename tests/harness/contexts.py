"""Coverage's contexts under ``make reach``: every process reports which test runs in it."""

from __future__ import annotations

import os
import re


def follow_forks() -> None:
    """Tells coverage in every forked process which test it belongs to; coverage restarts there without a context."""
    os.register_at_fork(after_in_child=lambda: now_runs(os.environ.get("PYTEST_CURRENT_TEST", "")))


def now_runs(test: str) -> None:
    """Tells coverage which test runs in this process, if coverage runs at all.

    Args:
        test: Its identifier, with or without the phase that pytest appends.
    """
    from coverage import Coverage

    current = Coverage.current()
    if current is not None:
        current.switch_context(without_phase(test))


def without_phase(test: str) -> str:
    """Returns the identifier of a test without the phase that pytest may append."""
    return re.sub(r" \((setup|call|teardown)\)$", "", test)
