"""Whose code a line is: the user's, or this package's, whose files may move."""

from __future__ import annotations

from pathlib import Path

import ort_trainer
from ort_trainer.export.torch import builder
from ort_trainer.export.torch.capture import branches, capture, step_module
from ort_trainer.export.torch.fx import explain, symbols


def test_lines_of_this_package_are_not_the_users() -> None:
    for module in (builder, branches, capture, step_module):
        assert str(module.__file__).startswith(explain.LIBRARIES), module
    assert step_module.__file__ == symbols._CALLS_MODEL
    assert Path(capture._OURS) == Path(ort_trainer.__file__).parent
