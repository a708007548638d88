"""Operators that user code registers."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxscript
import pytest
import torch
from torch import nn

import ort_trainer
from ort_trainer import ExportError, ORTTrainer, optim, register_operator
from ort_trainer.fx import operator_table as registry
from ort_trainer.kernels.onnxruntime.translate import decomposition_table

from ..helpers import assert_close

pytestmark = pytest.mark.engine

aten = torch.ops.aten
PAGE = Path(__file__).parents[2] / "docs" / "contributing.md"


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what a test registers."""
    for table in registry._TABLES:
        monkeypatch.setattr(table, "user", {})
    yield
    registry._revision += 1


class Model(nn.Module):
    """Sums a function of a product with a weight."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x @ self.weight).sum()


def compare(
    function: Callable[[torch.Tensor], torch.Tensor], theirs: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> None:
    """Trains and compares with PyTorch, which runs the operator itself or an equivalent."""
    model = Model(function)
    reference = copy.deepcopy(model)
    reference.function = theirs or function
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-3)
    desc = {"inputs": [("x", ["batch", 3, 3])], "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=1e-3))
    for size in (4, 2):
        x = torch.randn(size, 3, 3)
        loss = trainer.train_step(x)
        expected = reference(x)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert_close(loss, expected.detach(), 1e-4, "loss")
    assert_close(trainer.state_dict(pytorch_format=True)["weight"], reference.weight.detach(), 1e-5, "weight")


@pytest.mark.options(kernels="onnxruntime")
def test_example_of_the_documentation() -> None:
    with pytest.raises(ExportError, match=r"_linalg_det.* no ONNX translation(.|\n)* a composite of aten.linalg_det.d"):
        compare(torch.linalg.det)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(example, str(PAGE), "exec"), {})
    compare(torch.linalg.det)


def test_decomposition() -> None:
    edges = torch.tensor([-0.5, 0.0, 0.5])

    def search(
        boundaries: torch.Tensor, value: torch.Tensor, *, out_int32: bool = False, right: bool = False, **rest: Any
    ) -> Any:
        return (boundaries < value.unsqueeze(-1)).sum(-1) if not right else NotImplemented

    register_operator(aten.searchsorted.Tensor, decomposition=search)
    compare(lambda x: x * torch.searchsorted(edges, x))
    with pytest.raises(ExportError, match=r"aten.searchsorted.Tensor has no ONNX translation"):
        compare(lambda x: x * torch.searchsorted(edges, x, right=True))


def test_translation_of_an_operator_of_ones_own() -> None:
    library = torch.library.Library("ort_trainer_tests", "DEF")
    library.define("triple(Tensor value) -> Tensor")
    library.impl("triple", lambda value: value * 3, "CompositeExplicitAutograd")
    triple = torch.ops.ort_trainer_tests.triple.default

    def translated(value: Any) -> Any:
        return onnxscript.opset18.Mul(value, onnxscript.opset18.CastLike(3.0, value))  # type: ignore[type-var]

    register_operator(triple, translation=translated)
    compare(lambda x: x * triple(x.detach()))
    # Any callable is accepted as a composite, and a composite is differentiated.
    register_operator(triple, composite=functools.partial(torch.mul, other=3))
    compare(triple, lambda x: x * 3)


def test_it_comes_before_what_the_package_has() -> None:
    register_operator(aten.cdist.default, composite=lambda first, second, *_: first - second)
    with pytest.raises(AssertionError, match="loss"):
        compare(lambda x: torch.cdist(x, x.detach() + 1))
    # With a translation, nothing may decompose the operator first.
    assert aten.cdist.default not in registry.decompositions()
    assert aten.amax.default in decomposition_table()
    register_operator(aten.amax.default, translation=lambda value, *_: value)
    assert aten.amax.default not in decomposition_table()
    assert registry.composites()[aten.amax.default] is None


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (
            {"operator": aten.searchsorted, "composite": len},
            TypeError,
            r"one overload .*ops\.aten\.searchsorted\.Tensor",
        ),
        ({"operator": torch.linalg.det, "composite": len}, TypeError, r"such as torch\.ops\.aten\.add\.Tensor, but is"),
        ({"operator": "aten.take.default", "composite": len}, TypeError, "but is 'aten.take.default'"),
        ({"operator": aten.take.default}, ValueError, "nothing is registered for aten.take.default: give composite="),
        ({"operator": aten.take.default, "translation": 3}, TypeError, "translation must be a function .* but is 3"),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        register_operator(**arguments)


def test_an_operator_is_in_the_table_once() -> None:
    with pytest.raises(ValueError, match="aten.take.default is in the table twice"):
        registry.composites()
        registry.composite(aten.take.default)(len)


def test_names() -> None:
    assert ort_trainer.register_operator is registry.register_operator
    assert registry.replacements() and all(hasattr(module, name) for module, name in registry.replacements())
