"""Programs of PyTorch's operators: as text, as functions, and invalid ones."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ort_trainer.core.errors import ExportError
from ort_trainer.engine.programs import Program
from ort_trainer.engine.programs.compiler import LoadedCall, compiled
from ort_trainer.kernels.programs.partition import partition


def program(**changes: Any) -> str:
    whole: dict[str, Any] = {
        "inputs": [None, [1, 0]],
        "symbols": {"n": [0, 0]},
        "steps": [
            ["aten.mm.default", [{"x": 0}, {"x": 1}], {}],
            ["aten.sum.dim_IntList", [{"v": 0}, [0], True], {"dtype": {"torch": "float64"}}],
            ["aten.split.Tensor", [{"v": 0}, 2, 1], {}],
            ["getitem", [{"v": 2}, 1], {}],
            ["aten.reshape.default", [{"v": 3}, [{"dim": "dim('n') * 2"}]], {}],
            ["aten.gt.Scalar", [{"v": 4}, 0.5], {}],
        ],
        "results": [[1, None], [3, [1, 0]], [4, None], [5, None]],
    }
    return json.dumps({**whole, **changes})


def function(text: str, timed: bool = False) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns a program as a function of a list of its inputs."""
    found = Program.from_text(text)
    inputs, outputs = (
        [f"{kind}{index}" for index in range(len(of))] for kind, of in (("x", found.inputs), ("y", found.results))
    )
    return compiled([LoadedCall("node", found, inputs, outputs)], inputs, outputs, timed=timed)


@pytest.mark.parametrize("rows", [3, 5])
def test_a_program_does_what_it_says(rows: int) -> None:
    found = Program.from_text(program())
    assert Program.from_text(found.to_text()) == found and found.key == Program.from_text(program()).key
    run = function(program())
    left, right = torch.randn(rows, 6), torch.randn(6, 4)
    product = left @ right
    # The second input is passed in memory order, which differs from the order of its dimensions.
    total, part, flat, large = run([left, right.t().contiguous()])
    torch.testing.assert_close(total, product.sum(0, keepdim=True, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(part, product[:, 2:].t())
    torch.testing.assert_close(flat, product[:, 2:].reshape(-1))
    assert part.is_contiguous()
    assert torch.equal(large, flat > 0.5)


def test_a_program_that_is_timed_does_the_same() -> None:
    found = Program.from_text(program())
    marks: list[int] = []
    given = torch.randn(3, 6), torch.randn(4, 6)
    results = function(program(), timed=True)([*given], marks.append)
    for ours, theirs in zip(results, function(program())([*given]), strict=True):
        assert torch.equal(ours, theirs)
    assert marks == sorted(marks) and len(marks) == 1 + len(found.steps) + len(found.results)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": [["os.system.default", ["true"], {}]]}, "os.system.default is not an operator on tensors"),
        ({"steps": [["aten.from_file.default", ["/etc/passwd"], {}]]}, "from_file.default is not an operator on ten"),
        ({"steps": [["aten._reshape_alias.default", [], {}]]}, "alias.default is not an operator on tensors"),
        ({"steps": [["aten.set_.source_Storage", [], {}]]}, "source_Storage is not an operator on tensors"),
        ({"steps": [["aten.save.default", [], {}]]}, "save.default is not an operator on tensors"),
        ({"steps": [["prim.Print.default", [], {}]]}, "prim.Print.default is not an operator on tensors"),
        ({"steps": [["aten.no_such_thing.default", [], {}]]}, "no_such_thing.default is not an operator on tensors"),
        ({"steps": [["aten.mm", [], {}]]}, "not enough values"),
        ({"more": []}, "not a program of PyTorch's operators"),
    ],
)
def test_what_is_no_program_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Program.from_text(program(**changes))


def test_attributes_of_python_objects_are_no_operators() -> None:
    packet = torch.ops.aten.add
    names = {*dir(type(packet)), *vars(packet), "_op", "__call__", "__globals__"} - set(packet.overloads())
    targets = [f"aten.add.{name}" for name in names]
    targets += [f"aten.{name}.{inner}" for name in dir(type(torch.ops.aten)) for inner in ("default", "__call__")]
    targets += [f"{library}.aten.add" for library in ("__class__", "_dir", "load_library", "loaded_libraries")]
    for target in targets:
        with pytest.raises(ValueError, match=r"is not an operator on tensors|too many values"):
            Program.from_text(program(steps=[[target, [], {}]]))


def test_a_model_that_opens_a_file_is_refused_before_a_program_is_made() -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.from_file.default, ("name", False, 3))
    node.meta["val"] = torch.empty(3)
    with pytest.raises(ExportError, match="from_file.default is not one of PyTorch's operators on tensors"):
        partition(graph)


@pytest.mark.parametrize(
    "argument",
    [{"torch": "load"}, {"torch": "hub"}, {"dim": "__import__('os')"}, {"eval": "1"}, {"x": "0)+(x0"}],
)
def test_an_argument_can_be_no_code(argument: dict[str, str]) -> None:
    text = program(steps=[["aten.neg.default", [argument], {}]], results=[[0, None]])
    with pytest.raises((ValueError, TypeError, KeyError)):
        function(text)([torch.ones(2, 2), torch.ones(2, 2)])


def test_names_of_arguments_can_be_no_code() -> None:
    text = program(steps=[["aten.neg.default", [{"x": 0}], {"a=1) or print(": 1}]], results=[[0, None]])
    with pytest.raises(ValueError, match="is not a valid argument name"):
        function(text)


def test_memory_is_free_as_soon_as_nothing_needs_it() -> None:
    """A chain of steps holds only the value that it reads and the value that it computes."""
    steps: list[Any] = [["aten.add.Tensor", [{"x": 0}, 1], {}]]
    steps += [["aten.add.Tensor", [{"v": number}, 1], {}] for number in range(20)]
    run = function(program(inputs=[None], symbols={}, steps=steps, results=[[20, None]]))
    alive: list[int] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
            result: torch.Tensor = func(*args, **(kwargs or {}))
            living.add(result)
            alive.append(len(living))
            return result

    living = weakref.WeakSet[torch.Tensor]()
    given = [torch.zeros(1000)]
    living.add(given[0])
    with Mode():
        (result,) = run(given)
    assert torch.equal(result, torch.full((1000,), 21.0)) and not given
    assert alive == [2] * 21, "the input too is freed"


def test_new_tensors_are_made_on_the_device_of_the_step() -> None:
    sum_of_both = "aten.add.Tensor", [{"v": 0}, {"v": 1}], {}
    steps = [("aten.arange.default", [4], {}), ("aten.full.default", [[4], 2.0], {}), sum_of_both]
    found = Program([], {}, steps, [(2, None)])
    call = [LoadedCall("node", found, [], ["y"])]
    (here,) = compiled(call, [], ["y"])([])
    (there,) = compiled(call, [], ["y"], device=torch.device("meta"))([])
    assert here.tolist() == [2.0, 3.0, 4.0, 5.0] and there.device.type == "meta" and there.shape == (4,)
