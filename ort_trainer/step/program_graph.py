"""``ProgramGraph``: a graph of PyTorch's operators, as data; reading it needs neither torch nor onnx."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

LOOPS = "loops."
"""With this begins the target of a step that calls one of a program's compiled loops, by its name."""


class ProgramCall(NamedTuple):
    """A node of a graph.

    Attributes:
        name: Its name, in origins and profiles.
        program: Key of the program that it runs.
        inputs: Names of the graph's values that it takes.
        outputs: Names of the values that it returns.
    """

    name: str
    program: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Constant(NamedTuple):
    """A tensor that is the same in every run.

    Attributes:
        dtype: The name of its element type in PyTorch, such as ``float32``.
        shape: Its sizes.
        data: Its elements in row-major order, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class ProgramGraph:
    """A graph whose nodes call programs.

    Attributes:
        programs: Key -> program, as text of :class:`~ort_trainer.engine.programs.Program`.
        calls: The nodes; each follows those whose results it takes.
        constants: Name of a value -> the value.
    """

    programs: Mapping[str, str]
    calls: tuple[ProgramCall, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)

    @property
    def has_loops(self) -> bool:
        """Whether any program calls compiled loops."""
        return any(f'["{LOOPS}' in program for program in self.programs.values())

    @property
    def inputs(self) -> set[str]:
        """Names of the values that the graph needs from outside."""
        taken = {name for call in self.calls for name in call.inputs}
        return taken.difference(self.constants, *(call.outputs for call in self.calls))

    def pruned(self, outputs: Iterable[str]) -> ProgramGraph:
        """Returns the part of the graph that computes some of its values."""
        needed, calls = set(outputs), []
        for call in reversed(self.calls):
            if not needed.isdisjoint(call.outputs):
                needed.update(call.inputs)
                calls.append(call)
        keys = {call.program for call in calls}
        return ProgramGraph(
            {key: program for key, program in self.programs.items() if key in keys},
            tuple(reversed(calls)),
            {name: constant for name, constant in self.constants.items() if name in needed},
        )

    def to_bytes(self) -> bytes:
        """Returns the graph as JSON, after eight bytes with the JSON's length, and the data of the constants."""
        constants = [(name, dtype, shape, len(data)) for name, (dtype, shape, data) in self.constants.items()]
        head = {"programs": dict(self.programs), "calls": self.calls, "constants": constants}
        text = json.dumps(head, separators=(",", ":")).encode()
        return b"".join([len(text).to_bytes(8, "little"), text, *(each.data for each in self.constants.values())])

    @classmethod
    def from_bytes(cls, content: bytes) -> ProgramGraph:
        """Returns the graph from :meth:`to_bytes`.

        Raises:
            ValueError: If the content is not such a graph.
        """
        end = 8 + int.from_bytes(content[:8], "little")
        try:
            head = json.loads(content[8:end])
            calls = tuple(
                ProgramCall(str(name), str(program), tuple(map(str, inputs)), tuple(map(str, outputs)))
                for name, program, inputs, outputs in head["calls"]
            )
            constants: dict[str, Constant] = {}
            for name, dtype, shape, length in head["constants"]:
                constants[str(name)] = Constant(str(dtype), tuple(map(int, shape)), content[end : end + length])
                end += length
            programs = {str(key): str(program) for key, program in head["programs"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is not a graph of programs: {error!r}") from error
        missing = {call.program for call in calls}.difference(programs)
        if missing or end != len(content):
            raise ValueError(f"this is not a graph of programs: {sorted(missing)} are missing, or bytes are left over")
        return cls(programs, calls, constants)
