"""``Profile``: the figures and their report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.pages import page

# Limits of the report; the profile itself has everything.
_OPERATORS = 20
_SMALLEST_SHARE = 0.01


@dataclass(frozen=True)
class OperatorTime:
    """The time of all calls of one operator.

    Attributes:
        name: PyTorch's name, or ONNX's on ONNX Runtime's kernels.
        calls: Calls per step.
        milliseconds: Milliseconds per step.
        share: Share of the step's time, from 0 to 1.
    """

    name: str
    calls: float
    milliseconds: float
    share: float


@dataclass(frozen=True)
class ModuleTime:
    """The time of one module of the model, including its submodules.

    Attributes:
        path: As in ``model.named_modules()``, empty for the model itself; ``(loss)`` for the loss function,
            ``(fused)`` for operators that ONNX Runtime has fused and whose origin is unknown.
        kind: Name of the class; empty if there is none.
        forward: Milliseconds per step in the forward pass.
        backward: Milliseconds per step in the backward pass.
        share: Share of the step's time, from 0 to 1.
    """

    path: str
    kind: str
    forward: float
    backward: float
    share: float


class Profile:
    """The time of some training steps, by operator and by module.

    Args:
        steps: Number of steps.
        trace: Path of the trace; None for no trace.

    Attributes:
        steps, trace: As given.
        left: Number of steps that remain to be measured.
        done: Whether all steps have been measured; the attributes below are available then.
        seconds: Duration of each step without one-time work: an export, and the set-up of the measurement.
        milliseconds: Mean time of a step, of which all other times are parts.
        operators: The operators, slowest first.
        modules: The modules of the model, in its order; none for an ONNX model.
        products: Milliseconds per step in matrix products, convolutions, attention and recurrent layers.
        optimizer: Milliseconds per step in the weight update, including clipping and the check for finite gradients.
        waiting: Milliseconds between two steps: waiting for data, and what the loop does itself. Not a part of a step.
        overhead: Milliseconds per step outside operators and update: Python, this package, the engine between nodes.
        kernels: Whose kernels computed the steps.
        remarks: What to know about the figures.
    """

    seconds: tuple[float, ...]
    milliseconds: float
    operators: tuple[OperatorTime, ...]
    modules: tuple[ModuleTime, ...]
    products: float
    optimizer: float
    waiting: float
    overhead: float
    kernels: str
    remarks: tuple[str, ...]

    def __init__(self, steps: int, trace: Path | None) -> None:
        self.steps, self.trace = steps, trace
        self.left, self.done = steps, False

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in Profile.__annotations__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise RuntimeError(
                f"the profile has no results yet: {self.steps - self.left} of {self.steps} steps have been measured. "
                f"Call train_step {self.left} more times"
            )

    def __repr__(self) -> str:
        return f"<Profile: {self.steps - self.left} of {self.steps} steps>"

    def __str__(self) -> str:
        return "\n".join(_report(self)) if self.done else repr(self)


def _report(profile: Profile) -> list[str]:
    seconds = profile.seconds
    spread = f"{min(seconds) * 1000:.2f} to {max(seconds) * 1000:.2f}"
    lines = [f"{len(seconds)} training steps of {profile.milliseconds:.2f} ms ({spread}), on {profile.kernels} kernels"]
    if profile.steps > 1:
        lines.append(f"{profile.waiting:.2f} ms between two steps: waiting for data, and the loop's own code")
    lines += ["", *_table(("part of a step", "ms", "share"), _parts(profile))]
    shown = profile.operators[:_OPERATORS]
    rows = [(row.name, f"{row.calls:g}", f"{row.milliseconds:.3f}", _percent(row.share)) for row in shown]
    lines += ["", *_table(("operator", "calls", "ms", "share"), rows)]
    lines += _others(profile.operators[_OPERATORS:], "")
    if profile.modules:
        large = [row for row in profile.modules if row.share >= _SMALLEST_SHARE]
        cells = [
            (f"{row.path or '(the model)'}  {row.kind}".rstrip(), f"{row.forward:.3f}", f"{row.backward:.3f}")
            for row in large
        ]
        rows = [(*cell, _percent(row.share)) for cell, row in zip(cells, large, strict=True)]
        lines += ["", *_table(("module, with those in it", "forward ms", "backward ms", "share"), rows)]
        small = [row for row in profile.modules if row.share < _SMALLEST_SHARE]
        lines += _others(small, f" of less than {_SMALLEST_SHARE:.0%}")
    lines += ["", *profile.remarks] if profile.remarks else []
    if profile.trace is not None:
        lines += ["", f"trace: {profile.trace} (open it in chrome://tracing or https://ui.perfetto.dev)"]
    return [*lines, "", f"what makes a step faster: {page('slow_steps.md')}"]


def _parts(profile: Profile) -> list[tuple[str, str, str]]:
    operators = sum(row.milliseconds for row in profile.operators)
    parts = {
        "products, convolutions": profile.products,
        "other operators": operators - profile.products,
        "optimizer update": profile.optimizer,
        "between them": profile.overhead,
    }
    return [(name, f"{part:.3f}", _percent(part / profile.milliseconds)) for name, part in parts.items()]


def _others(rows: Sequence[object], which: str) -> list[str]:
    return [f"... and {len(rows)} more{which}"] if rows else []


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in (head, *rows)
    ]
