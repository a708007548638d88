"""Where progress can be shown as one line that is drawn again and again."""

from __future__ import annotations

import sys
from typing import Any


def redraws(stream: Any) -> bool:
    """Returns whether a stream draws over a line after a carriage return: a terminal, or the output of a notebook."""
    try:
        return bool(stream.isatty()) or _in_notebook()
    except (AttributeError, ValueError):  # no stream, as under pythonw, or a closed one
        return False


def _in_notebook() -> bool:
    """Returns whether the code runs in a kernel of Jupyter, whose streams are no terminals."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
