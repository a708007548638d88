"""Writes docs/options.md from the schema of the options; with --check only tells whether it is up to date."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ort_trainer.schema import load_schema

TARGET = Path(__file__).with_name("options.md")
HEAD = """# Options

All keys of `ORTTrainerOptions`, written by `make docs` from `schemas/trainer_options.json`. A key that is
*not supported yet*, or has *only the default*, is accepted at its default and refused otherwise; none is ever ignored.

| option | type | default | allowed | state | meaning |
|---|---|---|---|---|---|
"""


def rows(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yields a table row for every option."""
    for key, rules in schema.items():
        here = f"{path}.{key}" if path else key
        if "schema" in rules and rules["type"] == "dict":
            yield from rows(rules["schema"], here)
            continue
        if "rename" in rules:
            yield f"| `{here}` | | | | works | {rules['meta']['doc']} |"
            continue
        limits = [f"{word} {rules[rule]}" for rule, word in (("min", "at least"), ("max", "at most")) if rule in rules]
        limits += [f"`{rules['regex']}`".replace("|", "\\|")] if "regex" in rules else []
        limits += [", ".join(rules["allowed"])] if "allowed" in rules else []
        state = "only the default" if "only_default" in rules else "works"
        state = "not supported yet" if rules.get("unsupported") else state
        kind = rules["type"] + (" or None" if rules.get("nullable") else "")
        meaning = rules["meta"]["doc"]
        yield f"| `{here}` | {kind} | `{rules['default']!r}` | {', '.join(limits)} | {state} | {meaning} |"


def main() -> None:
    text = HEAD + "\n".join(rows(load_schema("trainer_options"))) + "\n"
    if "--check" not in sys.argv:
        TARGET.write_text(text)
    elif TARGET.read_text() != text:
        sys.exit("docs/options.md is out of date: run make docs")


if __name__ == "__main__":
    main()
