"""Where a line can be drawn again."""

from __future__ import annotations

import io
import sys
import types

import pytest

from ort_trainer.core.streams import redraws


def test_terminals_and_notebooks_redraw(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, closed = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    closed.close()
    assert redraws(terminal) and not redraws(io.StringIO()) and not redraws(closed) and not redraws(None)
    shell = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert not redraws(io.StringIO())  # IPython in a terminal that is redirected
    shell.kernel = None
    assert redraws(io.StringIO())
