"""Loads the cerberus schemas that ship with the package, lists their options, and validates documents against them.

Only this module imports cerberus. A schema file is JSON; the caller maps the names of its custom types to Python
classes.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import cerberus

from .checks import SPELLINGS
from .explain import entries, shown_given


def load_schema(name: str) -> dict[str, Any]:
    """Returns the schema ``name`` (a file in ``schemas/`` without its extension) as a new dict.

    The folder is inside the package in an installed wheel, and beside it in a checkout.
    """
    packaged = importlib.resources.files("ort_trainer") / "schemas" / f"{name}.json"
    if packaged.is_file():
        return dict(json.loads(packaged.read_text(encoding="utf-8")))
    checkout = Path(__file__).resolve().parents[2] / "schemas" / f"{name}.json"
    return dict(json.loads(checkout.read_text(encoding="utf-8")))


class SchemaValidator(cerberus.Validator):  # type: ignore[misc]
    """A cerberus validator with the additional rules of this package's schemas.

    cerberus finds methods by name: ``_check_with_positive`` for ``check_with: positive`` in a schema, and
    ``_normalize_coerce_path`` for ``coerce: path``.
    """

    types_mapping = cerberus.Validator.types_mapping.copy()
    types_mapping["callable"] = cerberus.TypeDefinition("callable", (object,), ())
    # A bool is an int for Python and cerberus, but True is not a number of steps.
    types_mapping["integer"] = cerberus.TypeDefinition("integer", (int,), (bool,))
    types_mapping["integer or string"] = cerberus.TypeDefinition("integer or string", (int, str), (bool,))

    @classmethod
    def with_types(cls, **types: tuple[type, ...]) -> type[SchemaValidator]:
        """Returns a subclass with more type names, each with the Python classes that it accepts."""
        mapping = cls.types_mapping.copy()
        for name, classes in types.items():
            mapping[name] = cerberus.TypeDefinition(name, classes, ())
        return type("TypedSchemaValidator", (cls,), {"types_mapping": mapping})

    def _check_with_callable(self, field: str, value: Any) -> None:
        if value is not None and not callable(value):
            self._error(field, "must be callable or None")

    def _check_with_positive(self, field: str, value: Any) -> None:
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < float("inf")):
            self._error(field, "must be positive and finite")


def beyond_default(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Yields (dotted path, message, harmless) for every option that supports only its default but has another value.

    These options have the reason as ``only_default`` in their ``meta``; in ``happens``, other values that ask for what
    happens anyway; and perhaps their own message: ``idle`` if the value has no effect, so that ignoring it does no
    harm, or ``refused``.
    """
    for path, rules in leaves(schema):
        value, meta = reduce(getitem, path.split("."), document), rules["meta"]
        if "only_default" in meta and value not in (rules["default"], *meta.get("happens", ())):
            only = f"can't be changed from {rules['default']!r}, because other values have no effect: "
            template = meta.get("refused", meta.get("idle", ""))
            harmless = "refused" not in meta
            message = template.format(value) or only + meta["only_default"]
            yield path, message + shown_given(value) if harmless else message, harmless


def flatten_errors(errors: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yields every (keys, message) of a cerberus error tree, in the tree's order."""
    for key, children in errors.items():
        for child in children:
            if isinstance(child, Mapping):
                yield from flatten_errors(child, (*path, key))
            else:
                yield (*path, key), str(child)


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


def leaves(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the dotted path and the rules of every option."""
    for path, rules in entries(schema):
        if rules["type"] != "dict" or "schema" not in rules:  # not a section
            yield path, rules


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
        spellings=tuple(spelling for spelling, path in SPELLINGS.items() if path == key),
    )
