"""The names of ``ort_trainer``, which are imported lazily."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ort_trainer

SOURCE = Path(ort_trainer.__file__).read_text()


def run(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_type_checkers_see_the_names_at_the_places_they_are_imported_from() -> None:
    checked = next(node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.If))
    imported = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    modules = {name for name, place in imported.items() if place is None}
    assert modules == {"amp", "optim"} and modules.isdisjoint(ort_trainer._PLACES)
    assert {name: place for name, place in imported.items() if place} == ort_trainer._PLACES
    assert sorted(imported) == sorted(ort_trainer.__all__)


def test_every_way_to_a_name() -> None:
    program = """if True:
        import sys, ort_trainer
        assert set(ort_trainer.__all__) <= set(dir(ort_trainer)) and 'torch' not in sys.modules
        config = ort_trainer.optim.AdamConfig()  # a submodule, without an import of its own
        assert ort_trainer.options.ORTTrainerOptions is ort_trainer.ORTTrainerOptions
        from ort_trainer import *
        assert ORTTrainer is ort_trainer.trainer.ORTTrainer and amp is ort_trainer.amp
        from ort_trainer.optim import AdamConfig
        assert type(config) is AdamConfig and vars(ort_trainer)['ORTTrainer'] is ORTTrainer
        print(sorted(set(ort_trainer.__all__) - set(globals())))
    """
    assert run(program).strip() == "[]"


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'ort_trainer' has no attribute 'Trainer'"):
        ort_trainer.Trainer  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Trainer' from 'ort_trainer'"):
        exec("from ort_trainer import Trainer")
    assert not hasattr(ort_trainer, "_trainer") and not hasattr(ort_trainer, "torch")


@pytest.mark.parametrize("missing", ["torch", "cerberus"])
@pytest.mark.parametrize("use", ["ort_trainer.ORTTrainer", "from ort_trainer import ORTTrainer, optim"])
def test_without_a_package_the_error_says_what_to_install(missing: str, use: str) -> None:
    program = f"""if True:
        import sys
        sys.modules[{missing!r}] = None
        import ort_trainer
        try:
            {use}
        except ModuleNotFoundError as error:
            print(error.name, error)
        print(ort_trainer.CheckpointError.__name__)
    """
    said = run(program)
    assert said.startswith(f"{missing} ort_trainer.ORTTrainer needs {missing}, which is not installed. Install it, and")
    # A second engine would overwrite files of the first.
    assert re.findall(r"ort_trainer\[\w+\]", said) == ["ort_trainer[onnx]"]
    assert said.endswith("CheckpointError\n")
    said = run(
        program.replace("import ort_trainer\n", "import ort_trainer\n        sys.modules['onnxruntime'] = None\n", 1)
    )
    assert re.findall(r"pip install 'ort_trainer\[(\w+)\]'", said) == ["cpu", "cuda", "stock", "trainer"]
