"""The question before every step, whether places hold what they held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import nn

from ort_trainer.guard import reads
from ort_trainer.guard.reads import Reads, Root
from ort_trainer.outside.notes import Notes
from ort_trainer.outside.places import Access
from ort_trainer.outside.values import frozen

TABLE = (Access("get", "model"), Access("attribute", "table"))


def watched(table: np.ndarray) -> Reads:
    """Returns the watch of a model that reads a table."""
    model = nn.Linear(1, 1)
    vars(model)["table"] = table
    found = Reads(Root(model))
    found.variant("")
    found.add(Notes(reads=(TABLE,)))
    return found


def test_a_large_array_is_compared_more_and_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    table, hashed = np.zeros((1024, 256), np.float64), list[int]()
    watch = watched(table)
    first = watch.variant("")
    monkeypatch.setattr(reads, "frozen", lambda value: hashed.append(1) or frozen(value))
    assert {watch.variant("") for _ in range(99)} == {first} and len(hashed) == 6
    table[3, 4] = 2.0
    numbers = [watch.variant("") for _ in range(40)]
    assert numbers[:27] == [first] * 27 and first not in numbers[28:]


def test_a_small_array_is_compared_in_each_step() -> None:
    table = np.zeros(4)
    watch = watched(table)
    first = watch.variant("")
    table[0] = 1.0
    assert watch.variant("") != first


def test_an_array_in_a_file_is_not_read(tmp_path: Path) -> None:
    table = np.memmap(tmp_path / "table", np.float32, "w+", shape=(4, 4))
    for array in (table, table[1:], np.asarray(table)):
        watch = watched(array)
        first = watch.variant("")
        table[2, 2] += 1.0
        assert watch.variant("") == first
        watch._root.model.__dict__["table"] = array.copy()
        assert watch.variant("") != first
