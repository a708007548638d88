"""Writes docs/options.md and the options of docs/names.md from the schema; --check tells whether they are current."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ort_trainer.compat.options import NEVER_WORKED, SPELLINGS
from ort_trainer.schema import load_schema

HERE = Path(__file__).parent
HEAD = """# Options

All keys of `ORTTrainerOptions`, written by `make docs` from `schemas/trainer_options.json`. A key that is
*not supported yet* is accepted at its default and refused otherwise; *one process only* means that a value is checked
and those that need several processes are refused. None is ever ignored.

| option | type | default | allowed | state | meaning |
|---|---|---|---|---|---|
"""
NAMES_HEAD = """<!-- options: written by make docs -->
| option | in `ort_trainer` | state |
|---|---|---|
"""
NAMES_TAIL = "<!-- /options -->"


def leaves(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the dotted path and the rules of every option."""
    for key, rules in schema.items():
        here = f"{path}.{key}" if path else key
        if "schema" in rules and rules["type"] == "dict":
            yield from leaves(rules["schema"], here)
        else:
            yield here, rules


def rows(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields a table row for every option."""
    for path, rules in leaves(schema):
        limits = [f"{word} {rules[rule]}" for rule, word in (("min", "at least"), ("max", "at most")) if rule in rules]
        limits += [f"`{rules['regex']}`".replace("|", "\\|")] if "regex" in rules else []
        limits += [", ".join(rules["allowed"])] if "allowed" in rules else []
        state = "not supported yet" if rules.get("unsupported") else rules["meta"].get("state", "works")
        kind = rules["type"] + (" or None" if rules.get("nullable") else "")
        meaning = rules["meta"]["doc"]
        yield f"| `{path}` | {kind} | `{rules['default']!r}` | {', '.join(limits)} | {state} | {meaning} |"


def name_rows(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields a row of docs/names.md for every option, and for every other spelling of one."""
    states = {
        path: f"refused: not supported yet; leave it at `{rules['default']!r}`" if rules.get("unsupported") else "works"
        for path, rules in leaves(schema)
    }
    for path, state in states.items():
        yield f"| `{path}` | `{path}` | {state} |"
    for spelling, path in SPELLINGS.items():
        if spelling not in states:
            state = states[path]
            differs = "works, differs: this spelling only after `compat.install()`" if state == "works" else state
            yield f"| `{spelling}` | `{path}` | {differs} |"
    for path in NEVER_WORKED:
        if path not in states:
            yield f"| `{path}` | | refused: the legacy code refused it too; fp16 follows PyTorch's autocast policy |"


def main() -> None:
    schema = load_schema("trainer_options")
    names = HERE / "names.md"
    block = NAMES_HEAD + "\n".join(name_rows(schema)) + "\n" + NAMES_TAIL
    begin = re.escape(NAMES_HEAD.splitlines()[0])
    targets = {
        HERE / "options.md": HEAD + "\n".join(rows(schema)) + "\n",
        names: re.sub(f"{begin}.*?{re.escape(NAMES_TAIL)}", lambda _: block, names.read_text(), flags=re.DOTALL),
    }
    for target, text in targets.items():
        if "--check" not in sys.argv:
            target.write_text(text)
        elif target.read_text() != text:
            sys.exit(f"docs/{target.name} is out of date: run make docs")


if __name__ == "__main__":
    main()
