"""Assumes during a capture, where values are unknown, that checks on values pass: skips branches that only raise."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = ["value_checks_passed"]

_IS_FINITE = ("isfinite", "isinf", "isnan")
# NOT_TAKEN, from Python 3.14 on, has the line of the condition before it.
_NO_STEPS = ("CACHE", "EXTENDED_ARG", "NOT_TAKEN")


@contextlib.contextmanager
def value_checks_passed() -> Iterator[list[str]]:
    """Makes conditions on values choose the branch that continues if the other only raises; yields their lines.

    Models write ``if not torch.isfinite(x).all(): x = torch.clamp(x, ...)`` against overflows in fp16: this branch is
    taken, because clamping finite values to the largest ones changes nothing.
    """
    lines: list[str] = []
    of_tensor: Any = torch.Tensor.__bool__
    of_size: Any = torch.SymBool.__bool__

    def bool_of_tensor(value: torch.Tensor) -> bool:
        chosen = _choice(sys._getframe(1), lines) if _is_unknown(value) else None
        return bool(of_tensor(value)) if chosen is None else chosen

    def bool_of_size(value: torch.SymBool) -> bool:
        try:
            return bool(of_size(value))
        except GuardOnDataDependentSymNode:
            chosen = _choice(sys._getframe(1), lines)
            if chosen is None:
                raise
            return chosen

    with (
        mock.patch.object(torch.Tensor, "__bool__", bool_of_tensor),
        mock.patch.object(torch.SymBool, "__bool__", bool_of_size),
    ):
        yield lines


def _is_unknown(value: torch.Tensor) -> bool:
    if isinstance(value, FunctionalTensor):
        value = torch._from_functional_tensor(value.elem)  # type: ignore[no-untyped-call]
    return isinstance(value, FakeTensor) and value.constant is None


def _choice(frame: FrameType, lines: list[str]) -> bool | None:
    """Returns the value of the condition that a frame evaluates; None if both branches are possible."""
    chosen = _passing(frame.f_code, frame.f_lasti)
    if chosen is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        text = linecache.getline(file, line).strip()
        place = f'File "{file}", line {line}, in {frame.f_code.co_name}: {text}'
        if place not in lines:
            lines.append(place)
    return chosen


@functools.lru_cache(maxsize=256)
def _passing(code: CodeType, offset: int) -> bool | None:
    """Returns the value of a jump's condition that avoids a branch that only raises, or enters one that clamps."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _NO_STEPS]
    (at,) = (index for index, step in enumerate(steps) if step.offset == offset)
    if steps[at].opname in ("TO_BOOL", "COMPARE_OP"):  # from Python 3.13 on, evaluated before the jump
        at += 1
    jump = steps[at]
    if "POP_JUMP" not in jump.opname or "NONE" in jump.opname:
        return None
    by_offset = {step.offset: index for index, step in enumerate(steps)}
    if_true = "_IF_TRUE" in jump.opname
    branches = {if_true: by_offset[jump.argval], not if_true: at + 1}
    tree = _tree(code)
    raising = [value for value, start in branches.items() if _only_raises(steps, by_offset, start)]
    if raising:
        return None if len(raising) == 2 or _is_caught(tree, _line(code, offset)) else not raising[0]
    clamps = _lines_that_clamp(tree)
    clamping = [value for value, start in branches.items() if _line(code, steps[start].offset) in clamps]
    return clamping[0] if len(clamping) == 1 else None


def _line(code: CodeType, offset: int) -> int:
    return next(line or 0 for start, end, line in code.co_lines() if start <= offset < end)


def _tree(code: CodeType) -> ast.AST:
    """Returns the syntax tree of a function, with the lines of its file; an empty one if the source is unknown."""
    try:
        source, first = inspect.getsourcelines(code)
        return ast.increment_lineno(ast.parse(textwrap.dedent("".join(source))), first - 1)
    except (OSError, SyntaxError):
        return ast.Module([], [])


def _is_caught(tree: ast.AST, line: int) -> bool:
    """Returns whether a line is in a ``try`` that handles errors: what is raised there only chooses a branch."""
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers]
    return any(node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0) for node in tries)


def _only_raises(steps: list[dis.Instruction], by_offset: dict[int, int], start: int) -> bool:
    """Returns whether all paths from an instruction end in a ``raise``."""
    seen: set[int] = set()
    pending = [start]
    while pending:
        index = pending.pop()
        step = steps[index]
        if index in seen or step.opname in ("RAISE_VARARGS", "RERAISE"):
            continue
        seen.add(index)
        if step.opname.startswith(("RETURN", "YIELD")):
            return False
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            pending.append(by_offset[step.argval])
        if not step.opname.startswith("JUMP") or "_IF_" in step.opname:
            pending.append(index + 1)
    return True


def _lines_that_clamp(tree: ast.AST) -> set[int]:
    """Returns the first lines of branches that only clamp a tensor that is not finite."""
    found = set()
    for branch in ast.walk(tree):
        if (
            isinstance(branch, ast.If)
            and not branch.orelse
            and all(isinstance(part, ast.Assign) for part in branch.body)
        ):
            asked = {node.attr for node in ast.walk(branch.test) if isinstance(node, ast.Attribute)}
            if asked.intersection(_IS_FINITE) and _clamps(branch.body[-1]):
                found.add(branch.body[0].lineno)
    return found


def _clamps(statement: Any) -> bool:
    """Returns whether a statement is ``x = torch.clamp(x, ...)``."""
    call = statement.value
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "clamp"
        and ast.dump(statement.targets[0]).replace("Store()", "Load()")
        in (ast.dump(call.args[0]) if call.args else "", ast.dump(call.func.value))
    )
