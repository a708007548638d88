"""Fuzzes every reader of files with Hypothesis, for minutes instead of seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..hostile.readers import readers
from ..hostile.test_files import SLOW, fuzz

pytestmark = pytest.mark.torture


@pytest.mark.parametrize("name", sorted(readers()))
def test_no_file_makes_a_reader_fail_otherwise(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, 20_000 // SLOW.get(name, 1))
