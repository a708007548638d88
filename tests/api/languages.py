"""Training from artifacts in each language, behind the same calls, for random histories.

``ours(name, *arguments)`` does one of the actions below. Python's are the methods of :class:`InPython`; the programs
``c/test/histories.cc`` and ``js/test/histories.mjs`` read calls as lines of JSON, and answer each with a line.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ort_trainer.api import CheckpointState, LinearLRScheduler, Module, Optimizer

__all__ = ["REFUSALS", "InPython", "Language", "Program", "Refused"]


class Refused(RuntimeError):
    """An error that a program in another language has met."""


REFUSALS = (TypeError, ValueError, LookupError, RuntimeError, OSError)


class Language(Protocol):
    """A model, an optimizer and a state in some language.

    Attributes:
        lacks: Names of the actions that the language has no function for.
    """

    lacks: Collection[str]

    def __call__(self, *call: Any) -> Any:
        """Does an action."""

    def together(self, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """Does several actions, without waiting for one before the next one is asked for."""


class InPython:
    """The same in this process."""

    lacks = ("train_into", "evaluate_into")

    def __call__(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def together(self, calls: Sequence[Sequence[Any]]) -> list[Any]:
        return [self(*call) for call in calls]

    def load(self, folder: str, path: str, in_memory: bool) -> None:
        if in_memory:
            state = CheckpointState.load_checkpoint_from_buffer(Path(path).read_bytes())
        else:
            state = CheckpointState.load_checkpoint(path)
        self.open(folder, in_memory, state)

    def open(self, folder: str, in_memory: bool, state: CheckpointState | None = None) -> None:
        """Makes other objects, on the same state unless another one is given."""
        state = state or self._state
        files = [Path(folder) / f"{kind}_model.onnx" for kind in ("training", "eval", "optimizer")]
        train, evaluation, update = [file.read_bytes() if in_memory else file for file in files]
        module = Module(train, state, evaluation)
        self._optimizer = Optimizer(update, module)
        self._module, self._state = module, state

    def save(self, path: str, complete: bool, in_memory: bool) -> None:
        if in_memory:
            Path(path).write_bytes(CheckpointState.save_checkpoint_to_buffer(self._state, complete))
        else:
            CheckpointState.save_checkpoint(self._state, path, complete)

    def train(self, *batch: Any) -> Any:
        return list(self._module.train()(*batch))

    def evaluate(self, *batch: Any) -> Any:
        return list(self._module.eval()(*batch))

    def step(self) -> None:
        self._optimizer.step()

    def reset(self) -> None:
        self._module.lazy_reset_grad()

    def rate(self) -> float:
        return self._optimizer.get_learning_rate()

    def set_rate(self, rate: float) -> None:
        self._optimizer.set_learning_rate(rate)

    def schedule(self, warmup: int, total: int, rate: float) -> None:
        self._scheduler = LinearLRScheduler(self._optimizer, warmup, total, rate)

    def step_schedule(self) -> None:
        self._scheduler.step()

    def parameter(self, name: str) -> Any:
        return self._state.parameters[name].data

    def set_parameter(self, name: str, value: Any) -> None:
        self._state.parameters[name].data = value

    def buffer(self, trainable_only: bool) -> Any:
        return self._module.get_contiguous_parameters(trainable_only).numpy()

    def set_buffer(self, value: Any, trainable_only: bool) -> None:
        self._module.copy_buffer_to_parameters(value, trainable_only)

    def set_property(self, name: str, value: Any) -> None:
        self._state.properties[name] = value

    def property(self, name: str) -> Any:
        return self._state.properties[name]

    def export(self, path: str, outputs: list[str]) -> None:
        self._module.export_model_for_inferencing(path, outputs)


class Program:
    """A program in another language, which starts with the first call.

    Args:
        command: The command that starts it.
        lacks: Names of the actions that the language has no function for.
    """

    def __init__(self, *command: str | Path, lacks: Collection[str] = ()) -> None:
        self._command, self.lacks = command, lacks
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, *call: Any) -> Any:
        return self.together([call])[0]

    def together(self, calls: Sequence[Sequence[Any]]) -> list[Any]:
        if self._process is None or self._process.poll() is not None:  # the last history may have ended it
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("".join(json.dumps(call, default=_encoded) + "\n" for call in calls))
        self._process.stdin.flush()
        answers = [self._process.stdout.readline() for _ in calls]
        assert all(answers), f"{self._command[0]} has ended"
        results = [json.loads(answer, object_hook=_decoded) for answer in answers]
        for error, _ in results:
            if error is not None:
                raise Refused(error)
        return [result for _, result in results]

    def close(self) -> None:
        """Ends the program, which checks that it has freed its memory."""
        if self._process is not None:
            self._process.communicate()
            assert self._process.returncode == 0


def _encoded(value: Any) -> Any:
    array = np.asarray(value)
    return {"dtype": str(array.dtype), "shape": array.shape, "data": array.tobytes().hex()}


def _decoded(value: dict[str, Any]) -> Any:
    return np.frombuffer(bytes.fromhex(value["data"]), value["dtype"]).reshape(value["shape"])
