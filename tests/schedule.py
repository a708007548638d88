"""Which tests one worker of pytest-xdist runs, so that what the tests of a file share is made once and not by each."""

from __future__ import annotations

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
