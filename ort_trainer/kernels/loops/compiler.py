"""Whether there is a C++ compiler for loops; apart from what compiles them, whose imports take half a second."""

from __future__ import annotations

import os
import shutil
import sys


def missing_compiler() -> str:
    """Returns what to do if there is no C++ compiler; "" if there is one."""
    chosen = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "cl" if os.name == "nt" else "g++")
    if shutil.which(chosen) is not None:
        return ""
    return (
        f"compiled loops need a C++ compiler, but there is no {chosen!r}: install it (on Debian: apt install g++), "
        "set the environment variable CXX to another one, or set utils.kernels to 'auto'"
    )
