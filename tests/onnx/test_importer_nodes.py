"""The importer against the node tests of the onnx package: all forward, and the gradients of small ones.

``make onnx-operators`` compares all, and writes docs/reference/onnx_operators.md.
"""

from __future__ import annotations

import numpy as np
import pytest

from ort_trainer.core.errors import ExportError
from ort_trainer.onnx.module import OnnxModule

from .node_tests import Case, NotCompared, forward_agrees, gradient_agrees, node_cases

# The reference implementation takes seconds for a derivative of more elements.
MOST_ELEMENTS = 700
# The derivative of a scale that is computed from the range of the values; training takes it as a constant.
WITHOUT_GRADIENT = "DynamicQuantizeLinear"


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
        elements = sum(np.size(value) for value in case.inputs if isinstance(value, np.ndarray))
        is_whole = not case.name.endswith("_expanded") and case.node.op_type != WITHOUT_GRADIENT
        if case.name in modules and is_whole and elements <= MOST_ELEMENTS:
            # Dropout of old opsets drops in training mode.
            module = modules[case.name].train(case.node.op_type != "Dropout")
            try:
                differences[case.name] = gradient_agrees(case, module)
            except NotCompared:
                continue
    assert len(differences) > 400
    assert not {name: what for name, what in differences.items() if what}
