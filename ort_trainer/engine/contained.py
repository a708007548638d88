"""Checks that a model is self-contained: it reads no other files and makes no calls back into Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..core.errors import shown
from ..core.protobuf import DEEPEST, Field, Malformed, content, delimited, fields, text
from .ort import CALLING_OUT, DOMAINS

# Field numbers of onnx.proto: kind of message -> field -> kind of the messages in it.
_INSIDE: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {},
}
_TENSOR_NAME, _EXTERNAL_DATA, _DATA_LOCATION = 8, 13, 14
_NODE_OUTPUT, _NODE_NAME, _NODE_OPERATOR, _NODE_DOMAIN = 2, 3, 4, 7
_FUNCTION_NAME, _FUNCTION_DOMAIN = 1, 10

# The key under which external data has its path, and the names of operators that call out.
_PLACE = b"location"
_CALLING_DOMAIN = "org.pytorch.aten"
_SIGNS = (_PLACE, _CALLING_DOMAIN.encode(), *(name.encode() for name in CALLING_OUT))


def check_contained(data: bytes, name: str) -> None:
    """Checks a model before it goes to ONNX Runtime, which would read external data from any path the model names.

    Args:
        data: The bytes of the model.
        name: Name of the model in error messages.

    Raises:
        ValueError: If it keeps a tensor in another file, a node calls Python or names a file, or it is damaged.
    """
    # Strings are stored uncompressed, so a model without these bytes has neither; parsing it would take longer.
    if not any(sign in data for sign in _SIGNS):
        return
    try:
        parts = list(_parts(data))
        _check(parts, name)
    except Malformed as error:
        raise ValueError(f"{name} is damaged or not an ONNX model: {error}") from error


def _check(parts: Iterable[tuple[str, memoryview]], name: str) -> None:
    """Raises a ValueError for a tensor in another file, or a node that calls out."""
    for kind, part in parts:
        if kind == "tensor":
            if any(_names_file(member) for member in fields(part)):
                raise ValueError(
                    f"{name} keeps the data of {shown(text(part, _TENSOR_NAME))} in another file. No exported model "
                    "does, and it could name any file: save the model with all its data in it"
                )
        elif kind == "node":
            domain, operator = text(part, _NODE_DOMAIN), text(part, _NODE_OPERATOR)
            if domain == _CALLING_DOMAIN or operator in CALLING_OUT:
                raise ValueError(
                    f"{name} has the node {_called(part)}, operator {operator} of domain {domain!r}, which calls "
                    "Python or opens other files: no exported model has one"
                )


def _names_file(member: Field) -> bool:
    """Returns whether a field of a tensor is a part of ``external_data``, or ``data_location = EXTERNAL``."""
    if isinstance(member.value, int):
        return member.number == _DATA_LOCATION and member.value != 0
    return member.number == _EXTERNAL_DATA and member.value is not None


def custom_operators(data: bytes) -> list[str]:
    """Describes the nodes of a model whose operators are neither ONNX Runtime's nor functions of the model.

    Raises:
        ValueError: If it is not an ONNX model.
    """
    parts = list(_parts(data))
    functions = {
        (text(part, _FUNCTION_DOMAIN), text(part, _FUNCTION_NAME)) for kind, part in parts if kind == "function"
    }
    nodes = [(text(part, _NODE_DOMAIN), text(part, _NODE_OPERATOR), part) for kind, part in parts if kind == "node"]
    return [
        f"node {_called(part)}, operator {shown(operator)} of domain {shown(domain)}"
        for domain, operator, part in nodes
        if domain not in DOMAINS and (domain, operator) not in functions
    ]


def _called(node: memoryview) -> str:
    """Returns the name of a node for messages; without one, the values that it computes."""
    return shown(text(node, _NODE_NAME) or f"that computes {text(node, _NODE_OUTPUT)}")


def _parts(data: bytes) -> Iterator[tuple[str, memoryview]]:
    """Yields each message of a model with its kind."""
    pending = [("model", memoryview(data), 0)]
    while pending:
        kind, part, depth = pending.pop()
        if depth > DEEPEST:
            raise Malformed("its graphs are nested too deeply")
        yield kind, part
        inside = _INSIDE[kind]
        if inside:
            pending += [
                (inside[member.number], content(member), depth + 1)
                for member in delimited(part)
                if member.number in inside
            ]
