"""Imports follow the data flow, never against it; each heavy library is imported in one place."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ort_trainer.step import cache

from .harness.import_map import FILES, PACKAGE, circular, closure, room, rooms_imported, tree

# Every room, with the rooms that it may import from: those upstream in the data flow.
ALLOWED = {
    "core": set(),
    "step": {"core"},
    "optim": {"core", "engine", "step"},
    "amp": {"core", "optim"},
    "options": {"amp", "core", "engine", "optim"},
    "engine": {"core", "step"},
    "profiling": {"core", "engine", "step"},
    "state": {"core"},
    # The files of onnxruntime-training: read and written.
    "upstream": {"core", "optim", "state", "step"},
    # Needs no torch; of the engine it uses only what needs none either. Models of onnxruntime-training are converted,
    # which needs torch and is imported when such a model is loaded.
    "api": {"artifacts", "core", "engine", "state", "step", "upstream"},
    # How a model becomes a step, from the lowest room to the highest.
    "fx": {"core", "engine", "options", "step"},
    "outside": {"core", "fx"},
    "capture": {"core", "engine", "fx", "options", "outside", "step"},
    "guard": {"capture", "core", "engine", "outside"},
    "graph": {"capture", "core", "engine", "fx", "options", "outside", "step"},
    "operators": {"core", "engine", "fx", "graph"},
    "kernels": {"capture", "core", "engine", "fx", "graph", "operators", "step"},
    "export": {"capture", "core", "engine", "fx", "graph", "guard", "kernels", "operators", "optim", "options"}
    | {"outside", "step"},
    "onnx": {"capture", "core", "engine", "export", "guard", "optim", "options", "step"},
    "sources": {"capture", "core", "engine", "export", "onnx", "optim", "options"},
    "train": {"amp", "capture", "core", "engine", "export", "optim", "options", "profiling", "state", "step"},
    "distributed": {"capture", "core", "engine", "optim", "options", "sources", "train"},
    "runs": {"core", "optim", "options", "state", "train"},
    "fit": {"core", "runs"},
    "module": {"capture", "core", "engine", "export", "fx", "guard", "kernels", "options", "outside", "step"},
    # The trainer imports it lazily for exports.
    "artifacts": {"capture", "core", "distributed", "engine", "onnx", "optim", "options", "sources", "state", "step"}
    | {"train", "upstream"},
    "trainer": {"amp", "artifacts", "capture", "core", "distributed", "engine", "fit", "onnx", "optim", "options"}
    | {"profiling", "runs", "sources", "state", "train"},
    "adapters": {"core", "onnx", "step", "train", "trainer"},
    "integrations": {"core", "module", "options"},
    # Each command imports what it needs when it runs; inspecting checkpoints of exports needs no PyTorch.
    "cli": {"artifacts", "core", "engine", "options", "state", "step", "upstream"},
    "__main__": {"cli"},
    # It imports the public names with ``import ort_trainer``; nothing else may do that, or import compat.
    "compat": {"amp", "api", "artifacts", "capture", "core", "engine", "export", "onnx", "optim", "options", "state"}
    | {"step", "train", "trainer"},
    "__init__": {
        "adapters",
        "amp",
        "compat",
        "core",
        "fx",
        "module",
        "onnx",
        "optim",
        "options",
        "runs",
        "state",
        "trainer",
    },
}


def test_kinds_of_kernels_are_compared_in_one_place() -> None:
    """What differs between them is a method of ``graph/kernels.py``."""
    names = {"pytorch", "compiled", "onnxruntime"}
    for path in FILES:
        if path.is_relative_to(PACKAGE / "kernels"):
            continue
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            strings = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
            about_kernels = any("kernels" in ast.unparse(side) for side in sides)
            assert not (about_kernels and strings & names), f"{path}:{node.lineno}"


def test_every_room_is_listed() -> None:
    assert {room(path) for path in FILES} == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_direction(path: Path) -> None:
    assert rooms_imported(path) - {room(path)} <= ALLOWED[room(path)]


def test_no_room_depends_on_itself_through_others() -> None:
    known = {name: set(rooms) for name, rooms in ALLOWED.items()}
    for _ in ALLOWED:
        for rooms in known.values():
            rooms.update(*(known[name] for name in list(rooms)))
    assert {name for name, rooms in known.items() if name in rooms} == set()


def test_no_file_imports_itself_through_others() -> None:
    """Imports inside functions and for type checkers count."""
    assert not circular()


def test_only_compat_uses_the_package_from_outside() -> None:
    for path in FILES:
        if any(name.split(".")[0] == "ort_trainer" for name in imported(path)):
            assert room(path) == "compat", path


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("torch.onnx", {"kernels/onnxruntime/translate.py"}),
        ("torch._functorch", {"graph/differentiate.py"}),
        ("torch.export", {"kernels/onnxruntime/translate.py"}),
        ("onnxruntime", {"engine/ort.py"}),
        ("xxhash", {"core/sealed.py"}),
        ("cerberus", {"options/schema.py"}),
        ("h5py", {"state/legacy.py"}),
        ("transformers", {"integrations/transformers.py"}),
        ("accelerate", {"integrations/transformers.py"}),
        ("peft", {"adapters/models.py"}),
        ("pickle", set()),
    ],
)
def test_heavy_libraries_have_one_place(library: str, places: set[str]) -> None:
    assert importers(library) == places


def test_other_processes_are_met_in_one_room() -> None:
    assert {Path(name).parts[0] for name in importers("torch.distributed")} == {"distributed"}


# What files outside the exporter use of torch's private parts.
PRIVATE_PARTS_OF_TORCH = {
    # Compiled loops are a library of Inductor's, whose public loader unpacks an archive first; or source that Inductor
    # wrote, with Triton's kernels.
    "engine/programs/loops.py": {
        "torch._C._dynamo.guards._empty_strided_cpu",
        "torch._C._dynamo.guards._reinterpret_tensor",
        "torch._inductor.codecache.PyCodeCache.load",
        "torch._inductor.utils.clear_caches",
    },
    # The public class makes an object for each change, in each step.
    "engine/programs/runner.py": {"torch._C._set_grad_enabled"},
    # A wrapped tensor has no memory that an engine could take; nothing public says that it is wrapped.
    "engine/torch_memory.py": {"torch._C._functorch.is_functorch_wrapped_tensor", "torch._is_functional_tensor"},
    # What surrounds a call of a module, of which a graph would know nothing.
    "module/fallback.py": {
        "torch._C._current_graph_task_id",
        "torch._C._functorch.peek_interpreter_stack",
        "torch._C._get_tracing_state",
        "torch._C._len_torch_dispatch_stack",
        "torch.autograd.forward_ad._current_level",
    },
}


def test_private_parts_of_torch_are_used_in_one_room() -> None:
    """They are what ``torch_versions.py`` warns of."""
    exporter = {"capture", "export", "fx", "graph", "guard", "kernels", "operators", "outside"}
    private = {str(path.relative_to(PACKAGE)): private_parts_of_torch(path) for path in FILES}
    outside = {name: parts for name, parts in private.items() if parts and name.partition("/")[0] not in exporter}
    assert outside == PRIVATE_PARTS_OF_TORCH


def private_parts_of_torch(path: Path) -> set[str]:
    """Returns the private modules and names of torch that a file imports or reaches by attributes.

    Operators are not private, though names of some begin with an underscore, and neither are the classes of
    ``torch.ops``.
    """
    modules = {"torch": "torch"}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch" and not node.level:
            modules.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    names = {name for name in imported(path) if name.split(".")[0] == "torch"}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in modules and re.fullmatch(r"[\w.]+", rest):
                names.add(f"{modules[first]}.{rest}")
    private = {name for name in names if re.match(r"torch\.(fx\.experimental|([\w.]+\.)?_(?!_))", name)}
    longest = {name for name in private if not any(other.startswith(f"{name}.") for other in private)}
    return {name for name in longest if not re.match(r"torch\.(ops\.|_ops\.Op|_foreach_|_fused_|_grouped_mm)", name)}


def imported(path: Path) -> set[str]:
    """Returns the modules that a file imports, and what it imports from them."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.update([node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


def importers(library: str) -> set[str]:
    """Returns the files that import a library or a part of it in any way."""
    return {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(name == library or name.startswith(f"{library}.") for name in imported(path))
    }


# Imports all public names except those for ONNX models.
USES_THE_PACKAGE = """
import ort_trainer
for name in ort_trainer.__all__:
    if name not in ('TrainingParameters', 'TrainingSession'):
        getattr(ort_trainer, name)
"""


def run(program: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout.strip()


def test_importing_the_package_imports_nothing_else() -> None:
    program = """if True:
        import sys
        before = set(sys.modules)
        import ort_trainer
        print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
    """
    assert run(program) == "['ort_trainer']"


def test_the_package_imports_nothing_heavy_but_torch() -> None:
    program = f"""{USES_THE_PACKAGE}
import sys
heavy = ('ort_trainer.export.export', 'ort_trainer.onnx.load', 'onnxscript', 'onnx_ir', 'onnx')
print([m for m in (*heavy, 'onnxruntime', 'sympy') if m in sys.modules])
"""
    assert run(program) == "[]"


def test_the_package_adds_little_to_torch() -> None:
    """Checks for two small other distributions, no further parts of torch, and no log output."""
    program = f"""
import logging, sys, torch
before, path = set(sys.modules), list(sys.path)
{USES_THE_PACKAGE}
names = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(sorted(names - sys.stdlib_module_names))
assert not logging.getLogger().handlers and sys.path == path
"""
    assert run(program) == "['cerberus', 'ort_trainer', 'xxhash']"


def test_a_capture_does_not_import_the_translator() -> None:
    """Everything up to differentiation works without onnxscript, whose import takes a second."""
    program = """if True:
        import sys
        from ort_trainer.capture import capture
        from ort_trainer.graph import differentiate, random_inputs
        from ort_trainer.fx import operator_table
        assert operator_table.composites() and operator_table.replacements() and operator_table.random_operators()
        print([m for m in ('ort_trainer.kernels.onnxruntime.translate', 'onnxscript') if m in sys.modules])
    """
    assert run(program) == "[]"


def test_the_key_of_an_export_covers_what_an_export_depends_on() -> None:
    """These are the rooms that its code imports, directly or indirectly."""
    used = closure([PACKAGE / "export" / "builder.py"])
    assert {room(path) for path in used} == set(cache._ROOMS)
