"""Notes that processes leave for each other where they can't meet any more: in the store that they found each other by.

The process that holds the store (rank 0, or the launcher) may be gone or hang as well, and a store that hangs does not
keep to its time limits. So everything is asked in another thread, which is given up after a while.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["Notes"]

Result = TypeVar("Result")
# Seconds that the store has to answer.
_PATIENCE = 3.0


class Notes:
    """Notes of the processes of one group.

    Args:
        group: The group.
        prefix: Of the keys; another one than notes have that may be in the store from before a restart.

    Attributes:
        rank, size: Of the group.
        lost: Whether the store does not answer.
    """

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self._store = dist.PrefixStore(prefix, group.get_group_store())  # type: ignore[attr-defined]
        self.rank, self.size = group.rank(), group.size()
        self.lost = False

    def leave(self, kind: str, note: Mapping[str, Any]) -> None:
        """Leaves a note of this process, over one of that kind that it has left before."""
        self._ask(lambda: self._store.set(f"{kind}/{self.rank}", json.dumps(note)), None)

    def end(self) -> None:
        """Says that this process has given up, so that no other waits for it."""
        self._ask(lambda: self._store.set("end", ""), None)

    def ended(self) -> bool:
        """Returns whether any process has given up."""
        return self._ask(lambda: bool(self._store.check(["end"])), False)

    def read(self, kind: str) -> dict[int, dict[str, Any]]:
        """Returns the notes of a kind, by rank."""

        def found() -> dict[int, dict[str, Any]]:
            keys = {rank: f"{kind}/{rank}" for rank in range(self.size)}
            return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

        return self._ask(found, {})

    def _ask(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """Returns what a call to the store does; something else once the store does not answer."""
        answers: list[Result] = []

        def ask() -> None:
            try:
                answers.append(call())
            except RuntimeError:  # of a broken connection
                self.lost = True

        if not self.lost:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(_PATIENCE)
            self.lost = self.lost or thread.is_alive()
        return answers[0] if answers else otherwise
