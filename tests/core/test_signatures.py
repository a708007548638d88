"""Signatures of functions whose annotations can't be evaluated, and of wrappers that take anything."""

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


def test_a_model_of_peft_takes_what_its_base_takes() -> None:
    class Base:
        def forward(self, pixels: Any, mask: Any = None) -> None:
            pass

    class Wrapper:
        """As ``peft.PeftModel``."""

        def get_base_model(self) -> Base:
            return Base()

        def forward(self, *args: Any, **kwargs: Any) -> None:
            pass

    class OfTask(Wrapper):
        def forward(self, input_ids: Any, **kwargs: Any) -> None:
            pass

    assert list(signature_of(Wrapper().forward).parameters) == ["pixels", "mask"]
    assert list(signature_of(OfTask().forward).parameters) == ["input_ids", "kwargs"]
