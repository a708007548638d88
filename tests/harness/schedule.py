"""Assigns tests to workers of pytest-xdist, so that what the tests of a file share is made only once."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from .choose import Affected

_SAME_WORLDS = ("tests/distributed/test_zero.py", "tests/distributed/test_checkpoints.py")
# This file is long, and its tests share nothing: they are assigned last, one by one, so that all workers end together.
_APART = "tests/test_fidelity.py"


class ByFile(LoadScopeScheduling):
    """Runs the tests of a file in one worker: files with many tests first, or what a change affects in its order."""

    def __init__(self, config: pytest.Config, log: Any, affected: Affected | None) -> None:
        super().__init__(config, log)
        self._affected = affected
        config.option.loadscopereorder = affected is None

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        scope = nodeid if file == _APART else _SAME_WORLDS[0] if file in _SAME_WORLDS else file
        return scope if self._affected is None else f"{scope} {self._affected.rank(nodeid)}"
