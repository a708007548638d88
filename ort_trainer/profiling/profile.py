"""``Profile``: the figures and their report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Figures", "ModuleTime", "OperatorTime", "Profile"]

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


@dataclass(frozen=True)
class Figures:
    """The figures of a :class:`Profile`, which documents these attributes."""

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
    """The time of some training steps, by operator and by module.

    The figures are available after the last step; until then only :attr:`steps`, :attr:`trace`, :attr:`done` and
    :attr:`left` can be read.

    Args:
        steps: Number of steps.
        trace: Path of the trace; None for no trace.
    """

    def __init__(self, steps: int, trace: Path | None) -> None:
        self._steps, self._trace = steps, trace
        self._measured = 0
        self._figures: Figures | None = None

    @property
    def steps(self) -> int:
        """Number of ``train_step`` calls to measure."""
        return self._steps

    @property
    def trace(self) -> Path | None:
        """Path of the trace; None for no trace."""
        return self._trace

    @property
    def done(self) -> bool:
        """Whether all steps have been measured."""
        return self._figures is not None

    @property
    def left(self) -> int:
        """Number of steps that remain to be measured."""
        return max(self._steps - self._measured, 0)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Duration of each step without one-time work: an export, and the set-up of the measurement."""
        return self._known().seconds

    @property
    def milliseconds(self) -> float:
        """Mean time of a step, of which all other times are parts."""
        return self._known().milliseconds

    @property
    def operators(self) -> tuple[OperatorTime, ...]:
        """The operators, slowest first."""
        return self._known().operators

    @property
    def modules(self) -> tuple[ModuleTime, ...]:
        """The modules of the model, in its order; none for an ONNX model."""
        return self._known().modules

    @property
    def products(self) -> float:
        """Milliseconds per step in matrix products, convolutions, attention and recurrent layers."""
        return self._known().products

    @property
    def optimizer(self) -> float:
        """Milliseconds per step in the weight update, including clipping and the check for finite gradients."""
        return self._known().optimizer

    @property
    def overhead(self) -> float:
        """Milliseconds per step outside operators and update: Python, this package, the engine between nodes."""
        return self._known().overhead

    def measured(self, steps: int, figures: Figures | None = None) -> None:
        """Records progress, and at the end the figures."""
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
