"""Every name that works by docs/reference/names.md is called with its documented arguments and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from ort_trainer import compat

from ..helpers import Check, resolve
from .calls import BUILDER, C_SESSION, CHECKS, SIGNATURES, World, documented
from .effects import OPTIONS, PROPERTIES
from .test_effects import CLASS
from .test_names import NAMES, ROWS, SESSION_ROWS

pytestmark = pytest.mark.engine

VARIABLE = inspect.Parameter.VAR_KEYWORD


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    compat.install()
    yield World(tmp_path_factory.mktemp("calls"))
    compat.uninstall()


def test_every_name_that_works_is_called() -> None:
    properties = {f"{CLASS}{name}" for name in PROPERTIES}
    works = {old for old, _, state in (*NAMES, *SESSION_ROWS) if state.startswith("works")}
    assert sorted(works) == sorted({*CHECKS, *properties})
    options = {new for old, new, state in ROWS if state.startswith("works") and not old.startswith("onnxruntime.")}
    assert options == set(OPTIONS)


@pytest.mark.parametrize("check", dict.fromkeys(CHECKS.values()), ids=lambda check: check.__name__)
def test_calls(check: Check, world: World) -> None:
    check(world)


# A method in C tells no signature, and a Parameter is only made by a checkpoint.
UNTOLD = [name for name in SIGNATURES if name.startswith(BUILDER) or name.endswith("checkpoint_state.Parameter")]


@pytest.mark.parametrize("name", [name for name in SIGNATURES if name not in UNTOLD])
def test_signatures(name: str, world: World) -> None:
    """Arguments have the documented names, order and defaults; others need not be given."""
    ours = {key: entry for key, entry in inspect.signature(resolve(name)).parameters.items() if key != "self"}
    theirs = documented(name).parameters
    needed = [key for key, entry in ours.items() if entry.default is entry.empty and entry.kind is not VARIABLE]
    if "arg0" in theirs:  # arguments in C have no names
        assert len(needed) <= len(theirs) <= len(ours)
    elif name != C_SESSION:  # its overloads are those of calls.py
        assert [key for key in ours if key in theirs] == list(theirs) and set(needed) <= set(theirs)
        for key, entry in theirs.items():
            assert ours[key].kind is entry.kind and (ours[key].default or None) == (entry.default or None)
