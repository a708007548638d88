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
*not supported yet* is accepted at its default and refused otherwise; *one process only* means that a value is checked
and those that need several processes are refused. None is ever ignored.

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
        limits = [f"{word} {rules[rule]}" for rule, word in (("min", "at least"), ("max", "at most")) if rule in rules]
        limits += [f"`{rules['regex']}`".replace("|", "\\|")] if "regex" in rules else []
        limits += [", ".join(rules["allowed"])] if "allowed" in rules else []
        state = "not supported yet" if rules.get("unsupported") else rules["meta"].get("state", "works")
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
