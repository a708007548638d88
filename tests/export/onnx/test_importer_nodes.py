"""The importer against the node tests of the onnx package: all forward, and a sample of the gradients.

``make onnx-operators`` compares all, and writes docs/reference/onnx_operators.md.
"""

from __future__ import annotations

import zlib

import pytest

from ort_trainer.core.errors import ExportError
from ort_trainer.export.onnx import OnnxModule

from .node_tests import Case, NotCompared, forward_agrees, gradient_agrees, node_cases

# One in so many of the gradients.
SAMPLE = 24


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [case for case in node_cases() if not case.left_out]


@pytest.fixture(scope="module")
def modules(cases: list[Case]) -> dict[str, OnnxModule]:
    found = {}
    for case in cases:
        try:
            found[case.name] = OnnxModule(case.model)
        except ExportError as error:
            assert "operator" in str(error), case.name  # it names the operator
    assert len(found) >= 0.99 * len(cases)
    return found


def test_outputs(cases: list[Case], modules: dict[str, OnnxModule]) -> None:
    differences, refused = {}, {}
    for case in cases:
        if case.name in modules:
            try:
                differences[case.name] = forward_agrees(case, modules[case.name])
            except ExportError as error:
                refused[case.name] = str(error)
    assert not {name: what for name, what in differences.items() if what}
    # A generator with a seed.
    assert set(refused) == {"test_bernoulli_seed", "test_bernoulli_seed_expanded"}
    assert all("operator Bernoulli" in error or "operator Random" in error for error in refused.values())


def test_gradients(cases: list[Case], modules: dict[str, OnnxModule]) -> None:
    differences = {}
    for case in cases:
        if case.name in modules and zlib.crc32(case.name.encode()) % SAMPLE == 0:
            try:
                differences[case.name] = gradient_agrees(case, modules[case.name])
            except NotCompared:
                continue
    assert len(differences) > 20
    assert not {name: what for name, what in differences.items() if what}
