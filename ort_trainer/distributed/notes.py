"""Notes that processes leave for each other in the rendezvous store when they can no longer meet.

The process that holds the store (rank 0, or the launcher) may be gone or hang too, and a store that hangs ignores its
time limits. So every request runs in another thread, which is abandoned after a while.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["Notes"]

Result = TypeVar("Result")
# Seconds to wait for the store's answer.
_PATIENCE = 3.0


class Notes:
    """Notes of the processes of one group.

    Args:
        group: The group.
        prefix: The prefix of the keys, which must differ from that of notes left in the store before a restart.

    Attributes:
        rank, size: The rank in the group, and its size.
        lost: Whether the store does not answer.
    """

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self._store = dist.PrefixStore(prefix, group.get_group_store())  # type: ignore[attr-defined]
        self.rank, self.size = group.rank(), group.size()
        self.lost = False

    def leave(self, kind: str, note: Mapping[str, Any]) -> None:
        """Leaves a note of this process; replaces an earlier one of the same kind."""
        self._ask(lambda: self._store.set(f"{kind}/{self.rank}", json.dumps(note)), None)

    def end(self) -> None:
        """Records that this process has given up, so that no other waits for it."""
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
        """Returns the result of a call to the store; ``otherwise`` if the store does not answer."""
        answers: list[Result] = []

        def ask() -> None:
            try:
                answers.append(call())
            except RuntimeError:  # the connection is broken
                self.lost = True

        if not self.lost:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(_PATIENCE)
            self.lost = self.lost or thread.is_alive()
        return answers[0] if answers else otherwise
