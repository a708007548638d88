"""Assigns tests to workers of pytest-xdist, so that what the tests of a file share is made only once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xdist.scheduler import LoadScopeScheduling

_SAME_WORLDS = ("tests/distributed/test_zero.py", "tests/distributed/test_checkpoints.py")
# This file is long, and its tests share nothing: they are assigned last, one by one, so that all workers end together.
_APART = "tests/test_fidelity.py"


class ByFile(LoadScopeScheduling):
    """Runs the tests of a file in one worker; files with many tests come first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file == _APART:
            return nodeid
        return _SAME_WORLDS[0] if file in _SAME_WORLDS else file


class InOrder(ByFile):
    """Does the same, but keeps the order of files, and runs their tests with a lower rank before the others.

    Args:
        rank: Returns the rank of a test; see ``Affected``.
        args: The arguments of every scheduler.
    """

    def __init__(self, rank: Callable[[str], int], *args: Any) -> None:
        super().__init__(*args)
        self._rank = rank
        self.config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return f"{super()._split_scope(nodeid)} {self._rank(nodeid)}"
