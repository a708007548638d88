"""Signatures of functions whose annotations can't be evaluated."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ort_trainer.core.signatures import signature_of


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated where they are written")
def test_a_name_for_type_checkers_only() -> None:
    names: dict[str, Any] = {}
    exec(compile("def forward(x: Absent, *, y: int = 3): pass", "model.py", "exec", dont_inherit=True), names)
    found = signature_of(names["forward"])
    assert list(found.parameters) == ["x", "y"] and found.parameters["y"].default == 3
