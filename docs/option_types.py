"""Generates Python types of the options from the schema, for docs/generate.py."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["option_types"]

HEAD = '''"""Types of all options, as attributes and as dicts; generated from the schema by `make docs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from .section import Section

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from enum import Enum
    from os import PathLike
    from typing import Any, Literal

    import onnx
    import torch

    from ..amp import LossScaler
    from ..engine.ort import SessionOptions
    from ..optim import LRScheduler
'''
# The schema's types in Python, and additional types that its coercions take.
SIMPLE = {
    "boolean": "bool",
    "callable": "Callable[[onnx.ModelProto], onnx.ModelProto]",
    "integer": "int",
    "integer or string": "int | str",
    "loss_scaler": "LossScaler",
    "lr_scheduler": "LRScheduler | torch.optim.lr_scheduler.LRScheduler | Callable[[int], float]",
    "number": "float",
    "session_options": "SessionOptions",
    "string": "str",
}
COERCED = {"device_name": "torch.device", "dtype_name": "torch.dtype", "enum_name": "Enum", "path": "PathLike[str]"}


def _is_section(rules: Mapping[str, Any]) -> bool:
    return rules["type"] == "dict" and "schema" in rules


def _name(path: str) -> str:
    """Returns the name of a section's class without its suffix."""
    return "".join(word.capitalize() for word in path.rpartition(".")[2].split("_"))


def _type(rules: Mapping[str, Any], given: bool) -> str:
    """Returns the type of a value: of the attribute, or of a given value."""
    kind = rules.get("type")
    if kind is None or (kind == "dict" and "valuesrules" not in rules):
        return "Any" if kind is None else "Mapping[str, Any]"
    if kind == "list":
        entry = _type(rules["schema"], given)
        return f"Sequence[{entry}]" if given else f"tuple[{entry}, ...]"
    if kind == "dict":
        return f"Mapping[str, {_type(rules['valuesrules'], given)}]"
    name = f"Literal[{', '.join(map(_quoted, rules['allowed']))}]" if "allowed" in rules else SIMPLE[kind]
    if given and "coerce" in rules:
        name += f" | {COERCED[rules['coerce']]}"
    return name + (" | None" if rules.get("nullable") else "")


def _quoted(text: str) -> str:
    return f'"{text}"'


def _docstring(doc: str) -> Iterator[str]:
    """Yields the lines of a docstring with the first sentence."""
    sentence = re.sub(r"\[(.*?)\]\(.*?\)", r"\1 in the documentation", doc.partition(". ")[0].rstrip(".")) + "."
    *lines, last = textwrap.wrap(f'"""{sentence}', 116)
    yield from (f"    {line}" for line in lines)
    yield f'    {last}"""' if len(last) <= 113 else f'    {last}\n    """'


def _attributes(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields the class of a section."""
    title = f"Section `{path}` of the options" if path else "All sections of the options"
    yield f'\n\nclass {_name(path)}Options(Section):\n    """{title}."""\n'
    for key, rules in schema.items():
        if _is_section(rules):
            yield f"    {key}: {_name(key)}Options"
        else:
            yield f"    {key}: {_type(rules, False)}"
            yield from _docstring(rules["meta"]["doc"])


def _dict(path: str, schema: Mapping[str, Any], spellings: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the type of a section's dict, including other spellings of its keys."""
    title = f"Section `{path}` of the options, as a dict" if path else "The dict that `ORTTrainerOptions` takes"
    yield f'\n\nclass {_name(path)}OptionsDict(TypedDict, total=False):\n    """{title}."""\n'
    for key, rules in schema.items():
        yield f"    {key}: {f'{_name(key)}OptionsDict' if _is_section(rules) else _type(rules, True)}"
    for spelling, rules in spellings.items():
        section, _, key = spelling.rpartition(".")
        if section == path and key not in schema:
            yield f"    {key}: {_type(rules, True)}"


def _section(path: str, schema: Mapping[str, Any], spellings: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the classes of a section, after those of its subsections."""
    for key, rules in schema.items():
        if _is_section(rules):
            yield from _section(f"{path}.{key}" if path else key, rules["schema"], spellings)
    yield from _attributes(path, schema)
    yield from _dict(path, schema, spellings)


def option_types(schema: Mapping[str, Any], spellings: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the text of the module.

    Args:
        schema: The schema of all options.
        spellings: Other spellings of options, as dotted paths, with the option's rules.
    """
    return HEAD + "\n".join(_section("", schema, spellings)) + "\n"
