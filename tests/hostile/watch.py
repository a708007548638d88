"""Records what Python opens, imports and executes."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["WATCH"]


class Watch:
    """Records what Python opens, imports and executes."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        sys.addaudithook(self._event)

    def _event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in (
            "os.system",
            "subprocess.Popen",
            "os.exec",
            "os.posix_spawn",
            "pickle.find_class",
            "ctypes.dlopen",
        ) and args != (None,):  # the process itself
            self.seen.append(f"{event} {args}")
        if event in ("open", "os.remove", "os.rename", "os.mkdir", "os.link", "os.symlink") and "evil" in str(args[0]):
            self.seen.append(f"{event} {args}")


WATCH = Watch()
"""An audit hook can't be removed, so there is one."""
