"""Reads the Python source with which Inductor calls its loops, as steps of a program, and the loops as C++.

Inductor's source for a CPU has a function without branches::

    cpp_fused_add_0 = async_compile.cpp_pybinding(['const float*', 'float*', 'const int64_t'], '''...''')

    def call(args):
        arg0_1, arg1_1 = args
        arg0_1_size = arg0_1.size()
        s77 = arg0_1_size[0]
        buf0 = empty_strided_cpu((s77, 8), (8, 1), torch.float32)
        cpp_fused_add_0(arg0_1, buf0, s77)
        buf1 = reinterpret_tensor(buf0, (8, s77), (1, 8), 0); del buf0  # reuse
        buf2 = empty_strided_cpu((8, 4), (4, 1), torch.float32)
        extern_kernels.mm(buf1, arg1_1, out=buf2)
        return (buf2, )
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...engine.programs.loops import EMPTY, VIEW
from ...engine.programs.program import GETITEM
from ...step.program_graph import LOOPS

_MAKE_KERNEL = "async_compile.cpp_pybinding"
_KERNEL = re.compile(r'extern "C"[\w\s]*? kernel\(')
_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
# No exception may leave a function that Python calls by its address.
_FUNCTION = """
extern "C" const char* {name}({parameters}) {{
    try {{
        {name}_loops({arguments});
        return nullptr;
    }} catch (const std::exception& error) {{
        static thread_local std::string message;
        message = error.what();
        return message.c_str();
    }}
}}
"""
_MEMORY = {"empty_strided_cpu": EMPTY, "reinterpret_tensor": VIEW}
# Calls without effect on values: the checks of tensors that Inductor adds, and what frees the list of inputs.
_IGNORED = re.compile(r"assert_\w+|args\.clear")
# Names in arithmetic over sizes.
_OF_SIZES = {"dim", "max", "min", "math", "abs", "int"}
_NUMBERS = {"inf": float("inf"), "nan": float("nan")}


class Launch(NamedTuple):
    """How loops are called.

    Attributes:
        symbols: Symbolic size -> an input and an axis that have it.
        steps: The steps of a program.
        results: Number of the step of each result; each has memory of its own.
        functions: Name of a function -> how many arguments it takes.
        source: The functions in C++.
    """

    symbols: dict[str, tuple[int, int]]
    steps: list[tuple[str, list[Any], dict[str, Any]]]
    results: list[int]
    functions: dict[str, int]
    source: str


def read_launch(source: str) -> Launch:
    """Returns what Inductor's source does.

    Raises:
        ValueError: If it does anything else than to call loops and PyTorch's kernels.
    """
    module = ast.parse(source)
    kernels = {
        statement.targets[0].id: tuple(map(ast.literal_eval, statement.value.args))
        for statement in module.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func) == _MAKE_KERNEL
    }
    functions = {name: len(kinds) for name, (kinds, _) in kernels.items()}
    reader = _Reader(functions)
    (call,) = [each for each in ast.walk(module) if isinstance(each, ast.FunctionDef) and each.name == "call"]
    for statement in call.body:
        reader.read(statement)
    text = "\n".join([_HEADER, *(_function(name, kinds, text) for name, (kinds, text) in kernels.items())])
    return Launch(reader.symbols, reader.steps, reader.results, functions, text)


def _function(name: str, kinds: list[str], source: str) -> str:
    """Returns the C++ of a kernel as a function with a name of its own."""
    text, count = _KERNEL.subn(f"static void {name}_loops(", source.replace(_HEADER, ""))
    if count != 1 or not all(kind.endswith("*") or kind == "const int64_t" for kind in kinds):
        raise ValueError(f"a kernel takes {kinds}: {source[:200]}")
    parameters = ", ".join(f"{kind} value{index}" for index, kind in enumerate(kinds))
    arguments = ", ".join(f"value{index}" for index in range(len(kinds)))
    return text + _FUNCTION.format(name=name, parameters=parameters, arguments=arguments)


class _Sizes(ast.NodeTransformer):
    """Replaces symbolic sizes by what they are: arithmetic over sizes of inputs.

    Attributes:
        symbols: Name of a size of an input -> the input and the axis that have it.
        shapes: Variable -> the input whose shape it is.
        known: Variable -> the arithmetic that it stands for.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        self.symbols: dict[str, tuple[int, int]] = {}
        self.shapes: dict[str, int] = {}
        self.known: dict[str, ast.expr] = {}

    def find(self, value: ast.expr) -> ast.expr | None:
        """Returns arithmetic over sizes of inputs; None for anything else."""
        found: ast.expr = self.visit(copy.deepcopy(value))
        names = {part.id for part in ast.walk(found) if isinstance(part, ast.Name)}
        return found if "dim" in names and names <= _OF_SIZES else None

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.known.get(node.id, node)

    def visit_Call(self, node: ast.Call) -> Any:
        match node:
            case ast.Call(ast.Attribute(ast.Name("torch"), "sym_float"), [size]):
                return self.visit(size)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        match node:
            case ast.Subscript(ast.Name(id=name), ast.Constant(value=int(axis))) if name in self.shapes:
                source = self.shapes[name]
            case ast.Subscript(ast.Call(ast.Attribute(ast.Name(id=name), "size"), []), ast.Constant(value=int(axis))):
                source = self._inputs[name]["x"]
            case _:
                return node
        self.symbols[f"x{source}_{axis}"] = source, axis
        return ast.Call(ast.Name("dim"), [ast.Constant(f"x{source}_{axis}")], [])


class _Reader:
    """Turns statements into steps; see :class:`Launch` for the attributes."""

    def __init__(self, functions: Mapping[str, int]) -> None:
        self._functions = functions
        self._values: dict[str, Any] = {}  # variable -> argument of a step
        self._sizes = _Sizes(self._values)
        self.symbols = self._sizes.symbols
        self.steps: list[tuple[str, list[Any], dict[str, Any]]] = []
        self.results: list[int] = []

    def read(self, statement: ast.stmt) -> None:
        """Adds the steps of a statement."""
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=inputs)], value=ast.Name(id="args")):
                self._values |= {ast.unparse(name): {"x": index} for index, name in enumerate(inputs)}
            case ast.Assign([ast.Name(id=name)], ast.Call(ast.Attribute(ast.Name(id=of), "size"), [])):
                self._sizes.shapes[name] = self._values[of]["x"]
            case ast.Assign([ast.Name(id=name)], value) if (size := self._sizes.find(value)) is not None:
                self._sizes.known[name] = size
            case ast.Assign([ast.Name(id=name)], ast.Subscript(ast.Name(id=of), ast.Constant(value=index))):
                self._values[name] = self._add(GETITEM, [self._values[of], index])
            case ast.Assign([ast.Name(id=name)], value):
                self._values[name] = self._argument(value)
            case ast.Expr(ast.Call(func=function)) if _IGNORED.fullmatch(ast.unparse(function)):
                pass
            case ast.Expr(ast.Call() as called):
                self._call(called)
            case ast.Return(ast.Tuple(elts=results)):
                self._return([self._argument(result) for result in results])
            case ast.Delete():
                pass
            case _:
                raise ValueError(f"{ast.unparse(statement)[:200]!r} is no call of a kernel")

    def _return(self, results: list[Any]) -> None:
        """Sets the results, with copies of those that share memory with an input or another result.

        In the graph no result is a view. But Inductor makes views of some operators that are none: ``unsafe_split``.
        """
        owners: list[Any] = [None]
        for result in results:
            owner = self._owner(result)
            shares = owner in owners
            owners.append(owner)
            self.results.append((self._add("aten.clone.default", [result]) if shares else result)["v"])

    def _owner(self, value: dict[str, int]) -> Any:
        """Returns the step that made the memory of a value; None for an input."""
        while "v" in value:
            target, args, _ = self.steps[value["v"]]
            if target != VIEW:
                return value["v"]
            value = args[0]
        return None

    def _call(self, call: ast.Call) -> dict[str, int]:
        """Adds the step of a call; returns its value."""
        name = ast.unparse(call.func)
        args = [self._argument(value) for value in call.args]
        kwargs = {str(each.arg): self._argument(each.value) for each in call.keywords}
        if name in self._functions:
            return self._add(f"{LOOPS}{name}", args, kwargs)
        if name in _MEMORY:
            return self._add(_MEMORY[name], args, kwargs)
        if name.startswith("extern_kernels."):
            kernel = name.removeprefix("extern_kernels.")
            return self._add(f"aten.{kernel}.{'out' if 'out' in kwargs else 'default'}", args, kwargs)
        target = name.removeprefix("torch.ops.")
        if target.count(".") == 1 and target.startswith("aten."):
            target = f"{target}.default"
        if target.count(".") != 2:
            raise ValueError(f"{ast.unparse(call)[:200]!r} is no call of a kernel")
        # Everything is on one device, that of the step.
        return self._add(target, args, {key: value for key, value in kwargs.items() if key != "device"})

    def _add(self, target: str, args: list[Any], kwargs: Mapping[str, Any] = {}) -> dict[str, int]:
        self.steps.append((target, args, dict(kwargs)))
        return {"v": len(self.steps) - 1}

    def _argument(self, value: ast.expr) -> Any:
        """Returns an expression as an argument of a step."""
        match value:
            case ast.Constant():
                return value.value
            case ast.Name(id=name) if name in self._values:
                return self._values[name]
            case ast.Name(id=name) if name in _NUMBERS:
                return _NUMBERS[name]
            case ast.Tuple() | ast.List():
                return [self._argument(part) for part in value.elts]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant() | ast.Name(id="inf") as number):
                return -self._argument(number)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return {"torch": name}
            case ast.Call(func=ast.Name(id="device")):
                return None
        size = self._sizes.find(value)
        if size is not None:
            return {"dim": ast.unparse(size)}
        if isinstance(value, ast.Call):
            return self._call(value)
        raise ValueError(f"{ast.unparse(value)[:200]!r} is no argument of a kernel")
