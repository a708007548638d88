"""``Profile``: what was measured, and the report of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Figures", "ModuleTime", "OperatorTime", "Profile"]

# What a report shows; the profile itself has everything.
_OPERATORS = 20
_SMALLEST_SHARE = 0.01


@dataclass(frozen=True)
class OperatorTime:
    """The time of all calls of one operator.

    Attributes:
        name: As PyTorch calls it, or, on ONNX Runtime's kernels, as ONNX does.
        calls: Calls a step.
        milliseconds: Milliseconds a step.
        share: Part of the step, from 0 to 1.
    """

    name: str
    calls: float
    milliseconds: float
    share: float


@dataclass(frozen=True)
class ModuleTime:
    """The time of one module of the model, with all modules in it.

    Attributes:
        path: As in ``model.named_modules()``, empty for the model itself; ``(loss)`` for the loss function,
            ``(fused)`` for what ONNX Runtime made of several operators without saying of which.
        kind: Name of the class; empty where there is none.
        forward: Milliseconds a step in the forward pass.
        backward: Milliseconds a step in the backward pass.
        share: Part of the step, from 0 to 1.
    """

    path: str
    kind: str
    forward: float
    backward: float
    share: float


@dataclass(frozen=True)
class Figures:
    """What a profile consists of: see :class:`Profile`, whose attributes these are."""

    seconds: tuple[float, ...]
    milliseconds: float
    operators: tuple[OperatorTime, ...]
    modules: tuple[ModuleTime, ...]
    products: float
    optimizer: float
    overhead: float
    kernels: str
    remarks: tuple[str, ...]


class Profile:
    """Where the time of some training steps went.

    It is filled when the steps are done; until then only :attr:`steps`, :attr:`trace` and :attr:`done` can be read.

    Args:
        steps: How many steps.
        trace: Where the trace is written; None for nowhere.
    """

    def __init__(self, steps: int, trace: Path | None) -> None:
        self._steps, self._trace = steps, trace
        self._measured = 0
        self._figures: Figures | None = None

    @property
    def steps(self) -> int:
        """How many calls of ``train_step`` are measured."""
        return self._steps

    @property
    def trace(self) -> Path | None:
        """Where the trace is written; None for nowhere."""
        return self._trace

    @property
    def done(self) -> bool:
        """Whether all steps have been measured."""
        return self._figures is not None

    @property
    def left(self) -> int:
        """How many steps are still to be measured."""
        return max(self._steps - self._measured, 0)

    @property
    def seconds(self) -> tuple[float, ...]:
        """How long each step took, without what was done once: an export, and setting up the measurement."""
        return self._known().seconds

    @property
    def milliseconds(self) -> float:
        """Mean time of a step; the times of operators and all others are parts of it."""
        return self._known().milliseconds

    @property
    def operators(self) -> tuple[OperatorTime, ...]:
        """The operators, the slowest first."""
        return self._known().operators

    @property
    def modules(self) -> tuple[ModuleTime, ...]:
        """The modules of the model, in its order; none for a model that is no PyTorch model."""
        return self._known().modules

    @property
    def products(self) -> float:
        """Milliseconds a step in matrix products, convolutions, attention and recurrent layers."""
        return self._known().products

    @property
    def optimizer(self) -> float:
        """Milliseconds a step in the weight update, with clipping and the look for gradients that are not finite."""
        return self._known().optimizer

    @property
    def overhead(self) -> float:
        """Milliseconds a step in neither operators nor the update: Python, this package, the engine between nodes."""
        return self._known().overhead

    def measured(self, steps: int, figures: Figures | None = None) -> None:
        """Is told by who measures how many steps have been, and at the end what came out."""
        self._measured, self._figures = steps, figures

    def _known(self) -> Figures:
        if self._figures is None:
            raise RuntimeError(
                f"the profile has no results yet: {self._measured} of {self._steps} steps have been measured. Call "
                f"train_step {self.left} more times"
            )
        return self._figures

    def __repr__(self) -> str:
        return f"<Profile: {self._measured} of {self._steps} steps>"

    def __str__(self) -> str:
        return repr(self) if self._figures is None else "\n".join(_report(self, self._figures))


def _report(profile: Profile, figures: Figures) -> list[str]:
    seconds = figures.seconds
    spread = f"{min(seconds) * 1000:.2f} to {max(seconds) * 1000:.2f}"
    lines = [f"{len(seconds)} training steps of {figures.milliseconds:.2f} ms ({spread}), on {figures.kernels} kernels"]
    lines += ["", *_table(("part of a step", "ms", "share"), _parts(figures))]
    shown = figures.operators[:_OPERATORS]
    rows = [(row.name, f"{row.calls:g}", f"{row.milliseconds:.3f}", _percent(row.share)) for row in shown]
    lines += ["", *_table(("operator", "calls", "ms", "share"), rows)]
    lines += _others(figures.operators[_OPERATORS:], "")
    if figures.modules:
        large = [row for row in figures.modules if row.share >= _SMALLEST_SHARE]
        cells = [
            (f"{row.path or '(the model)'}  {row.kind}".rstrip(), f"{row.forward:.3f}", f"{row.backward:.3f}")
            for row in large
        ]
        rows = [(*cell, _percent(row.share)) for cell, row in zip(cells, large, strict=True)]
        lines += ["", *_table(("module, with those in it", "forward ms", "backward ms", "share"), rows)]
        small = [row for row in figures.modules if row.share < _SMALLEST_SHARE]
        lines += _others(small, f" of less than {_SMALLEST_SHARE:.0%}")
    lines += ["", *figures.remarks] if figures.remarks else []
    if profile.trace is not None:
        lines += ["", f"trace: {profile.trace} (open it in chrome://tracing or https://ui.perfetto.dev)"]
    return lines


def _parts(figures: Figures) -> list[tuple[str, str, str]]:
    operators = sum(row.milliseconds for row in figures.operators)
    parts = {
        "products, convolutions": figures.products,
        "other operators": operators - figures.products,
        "optimizer update": figures.optimizer,
        "between them": figures.overhead,
    }
    return [(name, f"{part:.3f}", _percent(part / figures.milliseconds)) for name, part in parts.items()]


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
