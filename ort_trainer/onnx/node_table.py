"""The table of operators: which function computes an operator of ONNX with PyTorch's.

Every file of ``operators/`` is a family of operators; new files are found automatically. A function

- takes the inputs positionally, as tensors; absent optional ones are None, and a variadic input is ``*args``;
- takes attributes by keyword. Defaults are those of ONNX's schema; where that has none, the function's own;
- takes as an input what is an attribute of the same name in older versions of the operator, such as ``axes``;
- may pass other attributes on, as ``**attributes``, to a function or class that takes them by keyword;
- may take the keyword ``node``, for errors, the number of outputs, and whether the model is in training mode;
- returns a tensor, a known array (see ``values.py``), or a tuple of them, one for each output.

An attribute that a node sets and the function does not take is refused, unless it has its default.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx
import onnx_ir as ir

from ..core.errors import ExportError, shown
from .user_operators import registered

NEWEST = 28
"""The newest version of ONNX's standard operators that this package was written for."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Node:
    """A node of the model, as functions of operators receive it.

    Attributes:
        name: Its name.
        op_type: Its operator.
        domain: The operator's domain; "" is ONNX's own.
        opset: The version of the domain that the model imports.
        wanted: For each output whether anything uses it.
        input_types: The ONNX type of each input; None if it is absent, no tensor or unknown.
        output_types: The ONNX type of each output.
        consumers: The operators that use the first output, directly or after a Cast.
        training: Whether the model is in training mode.
    """

    name: str
    op_type: str
    domain: str
    opset: int
    wanted: tuple[bool, ...] = (True,)
    input_types: tuple[ir.DataType | None, ...] = ()
    output_types: tuple[ir.DataType | None, ...] = ()
    consumers: frozenset[str] = frozenset()
    training: bool = False

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return len(self.wanted)

    def wants(self, index: int) -> bool:
        """Returns whether anything uses an output."""
        return index < len(self.wanted) and self.wanted[index]

    def input_type(self, index: int) -> ir.DataType | None:
        """Returns the ONNX type of an input. Unlike a tensor's dtype, it distinguishes types of 2 and 4 bits."""
        return self.input_types[index] if index < len(self.input_types) else None

    def error(self, reason: str) -> ExportError:
        """Returns an error that names the node and the reason why it can't be run."""
        return ExportError(f"{self}: {reason}")

    def __str__(self) -> str:
        return f"node {shown(self.name)}, operator {self.op_type} of {self.domain or 'ai.onnx'} {self.opset}"


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A function for an operator, and how to call it.

    Attributes:
        key: Its place in the table: the table, domain, operator and position.
        function: The function.
        since: The first version of the operator that it computes.
        until: The last, or None.
        known_inputs: The positions of inputs that it takes as known arrays or tensors. Other inputs are converted to
            tensors.
        scalars: The positions of inputs that it takes as Python numbers, if they are known and have no dimensions.
        updates: Output -> input, for each output that is the new value of an input in training mode.
        numbers: The positions of inputs that it takes as lists of numbers.
        takes_rounded: Whether it takes quantized numbers with their gradient; otherwise they come as plain tensors.
    """

    key: tuple[str, str, str, int]
    function: Callable[..., Any]
    since: int
    until: int | None
    known_inputs: Collection[int] | bool = ()
    scalars: Collection[int] | bool = ()
    updates: Mapping[int, int] = dataclasses.field(default_factory=dict)
    numbers: Collection[int] = ()
    takes_rounded: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the key instead of the function: many of the functions can't be pickled."""
        return _entry, self.key

    @functools.cached_property
    def _parameters(self) -> list[inspect.Parameter]:
        """The parameters of the function, and of those to which it passes attributes."""
        parameters = list(inspect.signature(self.function).parameters.values())
        called = _passing.get(self.function)
        while called is not None:
            parameters += [p for p in inspect.signature(called).parameters.values() if p.kind == p.KEYWORD_ONLY]
            called = _passing.get(called)
        return parameters

    @functools.cached_property
    def inputs(self) -> tuple[str, ...] | None:
        """The names of the inputs that it takes; None if any number."""
        if any(p.kind == p.VAR_POSITIONAL for p in self._parameters):
            return None
        return tuple(p.name for p in self._parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))

    @functools.cached_property
    def attributes(self) -> Mapping[str, bool]:
        """The names of the attributes that it takes -> whether it has no default for them."""
        keywords = [p for p in self._parameters if p.kind == p.KEYWORD_ONLY and p.name != "node"]
        return {p.name: p.default is p.empty for p in keywords}

    @functools.cached_property
    def takes_node(self) -> bool:
        """Whether it takes the node."""
        return any(p.name == "node" for p in self._parameters)

    def takes_known(self, index: int) -> bool:
        """Returns whether an input may be a known array."""
        return self.known_inputs if isinstance(self.known_inputs, bool) else index in self.known_inputs

    def takes_scalar(self, index: int) -> bool:
        """Returns whether an input may be a Python number."""
        return self.scalars if isinstance(self.scalars, bool) else index in self.scalars


_Table = dict[tuple[str, str], list[Operator]]
_operators: _Table = defaultdict(list)
_for_known: _Table = defaultdict(list)
_TABLES = {"operators": _operators, "known": _for_known}
# A function -> the one to which it passes its other attributes.
_passing: dict[Callable[..., Any], Callable[..., Any]] = {}


def operator(
    *names: str,
    since: int = 1,
    until: int | None = None,
    domain: str = "",
    known_inputs: Collection[int] | bool = (),
    scalars: Collection[int] | bool = (),
    updates: Mapping[int, int] | None = None,
    takes_rounded: bool = False,
    passing: Callable[..., Any] | None = None,
) -> Callable[[_Function], _Function]:
    """Registers a function for operators.

    Args:
        names: The operators.
        since: The first version of the operator, not of the opset, that the function computes.
        until: The last one; None for all later ones.
        domain: The operators' domain.
        known_inputs: The positions of inputs that the function takes as known arrays or tensors, to read them with
            :func:`~.values.integers` for example; True for all. Other known inputs are converted to tensors first.
        scalars: The positions of inputs that the function takes as Python numbers, if they are constants without
            dimensions and another input is a tensor: arithmetic with a number is faster than with a tensor.
        updates: Output -> input, for each output that is the new value of an input. In training mode it is written
            into the module's buffer, if the input is a running statistic.
        takes_rounded: Whether the function takes quantized numbers as :class:`~.values.Rounded`.
        passing: What the function passes its ``**attributes`` to; that one may pass them on, too.
    """

    def register(function: _Function) -> _Function:
        if passing is not None:
            _passing[function] = passing
        options = {"known_inputs": known_inputs, "scalars": scalars, "updates": updates or {}}
        return _register("operators", names, domain, function, since, until, takes_rounded=takes_rounded, **options)

    return register


def known_operator(
    *names: str, since: int = 1, until: int | None = None, domain: str = ""
) -> Callable[[_Function], _Function]:
    """Registers a function for operators whose inputs are all known arrays, such as arithmetic on sizes.

    It returns known arrays, or ``NotImplemented`` to leave the node to the function for tensors.
    """
    return lambda function: _register("known", names, domain, function, since, until, known_inputs=True)


def _register(
    table_name: str,
    names: tuple[str, ...],
    domain: str,
    function: _Function,
    since: int,
    until: int | None,
    **options: Any,
) -> _Function:
    """Adds a function to a table, under each operator's name."""
    table = _TABLES[table_name]
    for name in names:
        key = (table_name, domain, name, len(table[domain, name]))
        for other in table[domain, name]:
            if since <= (other.until or since) and other.since <= (until or other.since):
                raise ValueError(f"{name} is registered twice: as {function} and as {other.function}")
        table[domain, name].append(Operator(key=key, function=function, since=since, until=until, **options))
    return function


def _entry(table: str, domain: str, name: str, index: int) -> Operator:
    """Returns the operator with this key; the inverse of :meth:`Operator.__reduce__`."""
    if table == "user":
        entry = registered(domain, name)[index]
        return Operator(key=(table, domain, name, index), **vars(entry))
    _find_families()
    return _TABLES[table][domain, name][index]


@functools.cache
def schema_of(op_type: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """Returns ONNX's schema of an operator in a version of its domain; None if ONNX has none."""
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


def find_operator(node: Node) -> tuple[Operator, Operator | None]:
    """Returns the functions for a node: for tensors, and for known arrays or None.

    Raises:
        ExportError: If the operator, or this version of it, is not supported.
    """
    _find_families()
    schema = schema_of(node.op_type, node.domain, node.opset)
    version = node.opset if schema is None else schema.since_version
    # The newest registration takes precedence, also over this package's own function.
    for index in reversed(range(len(registered(node.domain, node.op_type)))):
        user_operator = _of_version([_entry("user", node.domain, node.op_type, index)], version)
        if user_operator is not None:
            return user_operator, None
    if not node.domain and version > NEWEST:
        raise node.error(
            f"this version of the operator, {version}, is newer than this package, which knows opsets up to {NEWEST}: "
            "export the model for an older opset, or install a newer ort_trainer"
        )
    for_tensors = _of_version(_operators[node.domain, node.op_type], version)
    if for_tensors is not None:
        return for_tensors, _of_version(_for_known[node.domain, node.op_type], version)
    versions = [
        f"{o.since}" + (f" to {o.until}" if o.until else " and newer") for o in _operators[node.domain, node.op_type]
    ]
    if schema is None and not node.domain:
        raise node.error("ONNX has no such operator in this opset: the model is damaged, or its opset is wrong")
    raise node.error(
        f"version {version} is not supported, only {', '.join(versions)}"
        if versions
        else "it is not supported: compose it of standard operators, make it a function in the model, or register it "
        "with ort_trainer.register_onnx_operator"
    )


def _of_version(entries: list[Operator], version: int) -> Operator | None:
    """Returns the function that computes this version of an operator, or None."""
    for entry in entries:
        if entry.since <= version and (entry.until is None or version <= entry.until):
            return entry
    return None


def attributes_of(
    node: Node, chosen: Operator, attributes: Mapping[str, ir.Attr], convert: Callable[[ir.Attr], Any]
) -> dict[str, Any]:
    """Returns the arguments of a node's function by name: its attributes, and ONNX's defaults of others.

    Some may be inputs of the function that are attributes in this version of the operator.

    Args:
        node: The node.
        chosen: The function.
        attributes: The attributes that the node sets.
        convert: Returns an attribute as a Python value.

    Raises:
        ExportError: If the node sets an attribute that the function does not take, or lacks a required one.
    """
    schema = schema_of(node.op_type, node.domain, node.opset)
    defaults: dict[str, Any] = {}
    if schema is not None:
        for name, attribute in schema.attributes.items():
            if attribute.default_value.type:
                defaults[name] = convert(ir.serde.deserialize_attribute(attribute.default_value))
    values = {name: convert(attribute) for name, attribute in attributes.items()}
    known = {} if schema is None else schema.attributes
    required = {name for name, is_required in chosen.attributes.items() if is_required}
    inputs = {name for name in chosen.inputs or () if name in known}
    names = inputs.union(chosen.attributes)
    for name, value in values.items():
        if name not in names and (name not in defaults or defaults[name] != value):
            raise node.error(
                f"its attribute {name!r} is {shown(value)}, which is not supported: leave it out"
                + (f", or set it to {shown(defaults[name])}" if name in defaults else "")
            )
    values = {name: value for name, value in {**defaults, **values}.items() if name in names}
    missing = sorted((required | {name for name in inputs if known[name].required}) - set(values))
    if missing:
        raise node.error(f"it lacks the attributes {missing}, which are required: the model is damaged")
    return values


def with_mode(node: Node, training: bool) -> Node:
    """Returns a node in training or evaluation mode."""
    return dataclasses.replace(node, training=True) if training else node


@functools.cache
def _find_families() -> None:
    """Imports every module of ``operators/``, which registers the operators of its family."""
    package = importlib.import_module(f"{__package__}.operators")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
