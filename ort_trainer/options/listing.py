"""All options with type, default, allowed values and meaning, for the documentation and the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .checks import SPELLINGS
from .schema import load_schema

__all__ = ["ListedOption", "leaves", "listed_options"]


class ListedOption(NamedTuple):
    """An option.

    Attributes:
        key: Its dotted path.
        type: Name of its type in the schema.
        default: Its default value.
        allowed: Its allowed values or limits, each as text; empty if only the type restricts it.
        state: ``works``, ``data parallel only`` or ``only the default``.
        meaning: What it does, as Markdown.
        spellings: Other spellings of its key.
    """

    key: str
    type: str
    default: Any
    allowed: tuple[str, ...]
    state: str
    meaning: str
    spellings: tuple[str, ...]


def leaves(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the dotted path and the rules of every option."""
    for key, rules in schema.items():
        here = f"{path}.{key}" if path else key
        if "schema" in rules and rules["type"] == "dict":
            yield from leaves(rules["schema"], here)
        else:
            yield here, rules


def listed_options() -> list[ListedOption]:
    """Returns all options, in the order of the schema."""
    return [_listed(key, rules) for key, rules in leaves(load_schema("trainer_options"))]


def _listed(key: str, rules: Mapping[str, Any]) -> ListedOption:
    allowed = [f"{word} {rules[rule]}" for rule, word in (("min", "at least"), ("max", "at most")) if rule in rules]
    allowed += [f"`{rules['regex']}`"] if "regex" in rules else []
    allowed += rules.get("allowed", [])
    return ListedOption(
        key=key,
        type=rules["type"] + (" or None" if rules.get("nullable") else ""),
        default=rules["default"],
        allowed=tuple(str(value) for value in allowed),
        state=rules["meta"].get("state", "only the default" if "only_default" in rules["meta"] else "works"),
        meaning=rules["meta"]["doc"],
        spellings=tuple(spelling for spelling, own in SPELLINGS.items() if own == key),
    )
