"""Writes what follows from other files; --check says whether it is up to date.

From the schema of the options that is docs/options.md, the options in docs/names.md, and their types in
ort_trainer/options/sections.py; from examples/cookbook/ and examples/recipes/ the differences in docs/cookbook.md and
docs/recipes.md; from the imports the picture of docs/code_map.md; from benchmarks/results/ docs/speed.md and its
pictures; from these and docs/fidelity.md the figures in README.md and docs/questions.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cookbook_diffs import with_diffs
from figures import equality, with_blocks
from option_types import option_types
from room_picture import room_picture
from speed import blocks, pictures, read_results

from ort_trainer.options.checks import SPELLINGS
from ort_trainer.options.schema import leaves, listed_options, load_schema

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
HEAD = """# Options

All keys of `ORTTrainerOptions`, written by `make docs` from `schemas/trainer_options.json`. A key with the state
*data parallel only* is checked, and refused beyond its default, as each process trains the whole model
([distributed.md](distributed.md#what-is-not-there)); one with *only the default* is refused with any other value. None
is ignored. After `ort_trainer.compat.install()`, what has no effect and does no harm is a warning:
[names.md](names.md#options) says which.

| option | type | default | allowed | state | meaning |
|---|---|---|---|---|---|
"""
WITH_FIGURES = (ROOT / "README.md", HERE / "names.md", HERE / "questions.md", HERE / "speed.md")


def rows() -> Iterator[str]:
    """Yields a table row for every option."""
    for option in listed_options():
        allowed = ", ".join(option.allowed).replace("|", "\\|")
        facts = f"{option.type} | `{option.default!r}` | {allowed} | {option.state}"
        yield f"| `{option.key}` | {facts} | {option.meaning} |"


def name_rows(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields a row of docs/names.md for every option, and for every other spelling of one."""
    states = {}
    for path, rules in leaves(schema):
        meta = rules["meta"]
        refused = f"refused beyond the default, `{rules['default']!r}`"
        if "only_default" in meta:
            installed = "" if "refused" in meta else f", after `install()` {meta.get('installed', 'a warning')}"
            states[path] = f"{refused}{installed}; {meta['only_default']}"
        else:
            states[path] = f"works, differs: {meta['differs']}" if meta.get("differs") else "works"
    for spelling, path in [*((path, path) for path in states), *SPELLINGS.items()]:
        yield f"| `{spelling}` | `{path}` | {states[path]} |"


def main() -> None:
    schema = load_schema("trainer_options")
    rules = dict(leaves(schema))
    results = read_results(ROOT / "benchmarks" / "results")
    fidelity = (HERE / "fidelity.md").read_text(encoding="utf-8")
    names = ["| option | in `ort_trainer` | state |", "|---|---|---|", *name_rows(schema)]
    figures = {**blocks(results), "equality": [*equality(fidelity)], "options": names}
    targets = {
        HERE / "options.md": HEAD + "\n".join(rows()) + "\n",
        ROOT / "ort_trainer" / "options" / "sections.py": option_types(
            schema, {spelling: rules[path] for spelling, path in SPELLINGS.items()}
        ),
        **{HERE / "images" / f"{name}.svg": picture for name, picture in pictures(results).items()},
        **{page: with_blocks(page.read_text(encoding="utf-8"), figures) for page in WITH_FIGURES},
        HERE / "images" / "rooms.svg": room_picture(),
        **{
            page: with_diffs(page.read_text(encoding="utf-8"), ROOT / "examples" / page.stem)
            for page in (HERE / "cookbook.md", HERE / "recipes.md")
        },
    }
    for target, text in targets.items():
        if "--check" not in sys.argv:
            target.write_text(text, encoding="utf-8")
        elif not target.exists() or target.read_text(encoding="utf-8") != text:
            sys.exit(f"{target.relative_to(ROOT)} is out of date: run make docs")


if __name__ == "__main__":
    main()
