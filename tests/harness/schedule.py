"""Which tests one worker of pytest-xdist runs, so that what the tests of a file share is made once and not by each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xdist.scheduler import LoadScopeScheduling

_SAME_WORLDS = ("tests/distributed/test_zero.py", "tests/distributed/test_checkpoints.py")
# Long, and its tests share nothing: they come last, one by one, so that all workers end together.
_APART = "tests/test_fidelity.py"


class ByFile(LoadScopeScheduling):
    """The tests of a file run in one worker; files with many tests come first."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file == _APART:
            return nodeid
        return _SAME_WORLDS[0] if file in _SAME_WORLDS else file


class InOrder(ByFile):
    """The same, but files keep their order, and those of their tests that have a lower rank come before the others.

    Args:
        rank: What a test comes after; see ``Affected``.
        args: What every scheduler takes.
    """

    def __init__(self, rank: Callable[[str], int], *args: Any) -> None:
        super().__init__(*args)
        self._rank = rank
        self.config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return f"{super()._split_scope(nodeid)} {self._rank(nodeid)}"
