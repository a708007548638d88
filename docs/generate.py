"""Writes what follows from other files; --check says whether it is up to date.

From the schema of the options that is docs/options.md, the options in docs/names.md, and their types in
ort_trainer/options/sections.py; from examples/cookbook/ and examples/recipes/ the differences in docs/cookbook.md and
docs/recipes.md; from the imports the picture of docs/code_map.md; from benchmarks/results/ docs/speed.md and its
pictures.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cookbook_diffs import with_diffs
from option_types import option_types
from room_picture import room_picture
from speed import pictures, read_results, with_results

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
NAMES_HEAD = """<!-- options: written by make docs -->
| option | in `ort_trainer` | state |
|---|---|---|
"""
NAMES_TAIL = "<!-- /options -->"


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
            warned = "" if "refused" in meta else ", after `install()` a warning"
            states[path] = f"{refused}{warned}; {meta['only_default']}"
        else:
            states[path] = f"works, differs: {meta['differs']}" if meta.get("differs") else "works"
    for spelling, path in [*((path, path) for path in states), *SPELLINGS.items()]:
        yield f"| `{spelling}` | `{path}` | {states[path]} |"


def main() -> None:
    schema = load_schema("trainer_options")
    rules = dict(leaves(schema))
    names = HERE / "names.md"
    block = NAMES_HEAD + "\n".join(name_rows(schema)) + "\n" + NAMES_TAIL
    begin = re.escape(NAMES_HEAD.splitlines()[0])
    results = read_results(ROOT / "benchmarks" / "results")
    targets = {
        HERE / "options.md": HEAD + "\n".join(rows()) + "\n",
        ROOT / "ort_trainer" / "options" / "sections.py": option_types(
            schema, {spelling: rules[path] for spelling, path in SPELLINGS.items()}
        ),
        names: re.sub(
            f"{begin}.*?{re.escape(NAMES_TAIL)}", lambda _: block, names.read_text(encoding="utf-8"), flags=re.DOTALL
        ),
        **{HERE / "images" / f"{name}.svg": picture for name, picture in pictures(results).items()},
        HERE / "speed.md": with_results((HERE / "speed.md").read_text(encoding="utf-8"), results),
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
