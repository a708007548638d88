"""Explains an invalid option: what it must be, in words, and what the user probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

from ..core.errors import instead, shown
from ..core.unknown import nearest
from .checks import SPELLINGS

# Settings of other trainers -> the options for them here.
_ELSEWHERE = {
    "bf16": "{'mixed_precision': {'enabled': True, 'dtype': 'bfloat16'}}",
    "fp16": "{'mixed_precision': {'enabled': True, 'dtype': 'float16'}}",
}
_TYPES = {
    "boolean": "True or False",
    "integer": "an int",
    "integer or string": "an int of at least 0, 'auto' or 'off'",
    "number": "a number",
    "string": "a str",
    "callable": "a function",
}
_COERCED = {"dtype_name": "the torch.dtype of that name", "enum_name": "an enum member of that name", "path": "a path"}


def explained(schema: Mapping[str, Any], path: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Returns an error that starts with the dotted path of the option.

    Args:
        schema: The schema of all options.
        path: The keys and indices that lead to the invalid value.
        options: What the user gave.
    """
    rules: Mapping[str, Any] | None = {"type": "dict", "schema": schema}
    value: Any = options
    for key in path:
        rules, value = _inner(rules or {}, key), value[key]
    name = ".".join(map(str, path))
    if rules is None:
        return f"{name}: unknown option{shown_given(value)}: {_known_options(schema, path)}"
    return f"{name}: must be {requirement(rules)}{shown_given(value)}{_value_hint(rules, value)}"


def shown_given(value: Any) -> str:
    """Returns a value of the user and its type, in brackets after a space."""
    return f" (given: {shown(value)}, {type(value).__name__})"


def requirement(rules: Mapping[str, Any]) -> str:
    """Returns what the value of an option must be, in words: its type, and its allowed values or limits."""
    if "expected" in rules.get("meta", {}):
        return str(rules["meta"]["expected"])
    kind = rules["type"]
    if "allowed" in rules:
        words = listed(rules["allowed"], "or")
    elif kind == "list":
        words = f"a list, each entry {requirement(rules['schema'])}"
    elif kind == "dict" and "schema" in rules:
        words = f"a dict with any of the keys {listed(rules['schema'], 'and')}"
    elif kind == "dict":
        words = (
            f"a dict with str keys, each value {requirement(rules['valuesrules'])}"
            if "valuesrules" in rules
            else "a dict"
        )
    else:
        positive = "a positive, finite number" if rules.get("check_with") == "positive" else _TYPES[kind]
        words = positive + _limits(rules)
    words += f", or {_COERCED[rules['coerce']]}" if "coerce" in rules else ""
    return words + (", or None" if rules.get("nullable") else "")


def listed(names: Iterable[str], word: str) -> str:
    """Returns quoted names as text: ``'a', 'b' or 'c'``."""
    *others, last = map(repr, names)
    return f"{', '.join(others)} {word} {last}" if others else last


def _limits(rules: Mapping[str, Any]) -> str:
    """Returns the limits of a number, to be appended to its type."""
    if "min" in rules and "max" in rules:
        return f" from {rules['min']} to {rules['max']}"
    return f" of at least {rules['min']}" if "min" in rules else f" of at most {rules['max']}" if "max" in rules else ""


def _inner(rules: Mapping[str, Any], key: Any) -> Mapping[str, Any] | None:
    """Returns the rules of an entry; None if there can be no such entry."""
    if rules["type"] == "list":
        entry: Mapping[str, Any] = rules["schema"]
        return entry
    entry_rules: Mapping[str, Any] | None = rules["schema"].get(key) if "schema" in rules else rules["valuesrules"]
    return entry_rules


def _value_hint(rules: Mapping[str, Any], value: Any) -> str:
    """Returns a correction for a class, or for a misspelled value."""
    if isinstance(value, type):
        return f": {instead(value)}"
    if not isinstance(value, str) or "allowed" not in rules:
        return ""
    allowed = [name for name in rules["allowed"] if _digits(name) == _digits(value)]
    close = nearest(value.replace("fp", "float"), allowed)
    return f": did you mean {close[0]!r}?" if close else ""


def _digits(name: str) -> list[str]:
    """Returns the numbers in a name: float32 is no misspelling of float16."""
    return re.findall(r"\d+", name)


def _known_options(schema: Mapping[str, Any], path: Sequence[Any]) -> str:
    """Returns what an unknown option may have meant; if nothing resembles it, the options of its section."""
    *sections, key = path
    rules: Any = reduce(lambda inner, name: inner[name]["schema"], sections, schema)
    word = key.rpartition(".")[2].lower()
    if word in _ELSEWHERE:
        return f"did you mean {_ELSEWHERE[word]}?"
    places = {path.rpartition(".")[2]: path for path, _ in entries(schema)}
    places |= {spelling.rpartition(".")[2]: path for spelling, path in SPELLINGS.items()}
    close = nearest(word, places)
    if close:
        place = places[close[0]]
        nested = reduce(lambda inner, name: f"{{{name!r}: {inner}}}", reversed(place.split(".")), "...")
        is_elsewhere = "." in key or place.split(".")[:-1] != sections
        return f"did you mean {place}{f', as in {nested}' if is_elsewhere else ''}?"
    alternatives = listed((name for name in rules if not name.startswith("_")), "and")
    return f"the options {'of ' + '.'.join(sections) if sections else 'and their sections'} are {alternatives}"


def entries(schema: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the dotted path and the rules of every section and option; a section precedes its options."""
    for key, rules in schema.items():
        yield f"{section}{key}", rules
        if rules["type"] == "dict":
            yield from entries(rules.get("schema", {}), f"{section}{key}.")
