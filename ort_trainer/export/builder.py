"""``GraphBuilder``: exports a model, again for each shape that needs its own graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..capture.answers import answers_of
from ..capture.borrow import BORROWED
from ..capture.branches import ValuesAsked
from ..capture.eager import EagerStep, evaluate_eagerly, exchanges_modules, run_eagerly
from ..capture.isolation import can_differentiate, can_isolate, run_in_child
from ..capture.step_module import ExportedStep
from ..capture.torch_versions import is_tested
from ..core.dims import fixed_dimensions
from ..core.errors import IdleOptionError, warn
from ..core.streams import redraws
from ..engine import Request
from ..engine.ort import preload
from ..kernels.kinds import PROGRAMS, kinds
from ..outside.effects import PartsExchanged
from ..outside.notes import Notes
from ..step import RandomInput, Step
from ..step.cache import Export, export_cache
from .compile_later import Compilation, objection

if TYPE_CHECKING:
    import onnx

_STANDARD = ("", "ai.onnx")
_log = logging.getLogger(__name__)
_MOST_OUTPUTS = 5
# The settings that disable an option without effect.
_IDLE: dict[str, dict[str, Any]] = {
    "graph_transformer.attn_dropout_recompute": {"attention_dropout": False},
    "graph_transformer.gelu_recompute": {"gelu": False},
    "graph_transformer.transformer_layer_recompute": {"layers": False, "layer_count": 0},
}


@functools.cache
def _warn_once(message: str) -> None:
    """Logs a warning, which every export of a process would repeat."""
    _log.warning("%s", message)


@dataclass(frozen=True)
class GraphBuilder:
    """Builds training and evaluation graphs of one step.

    Attributes:
        step: What to export.
        postprocess: The user's own pass over the ONNX model, or None.
        contrib_ops: Whether that pass may add operators that are not standard ONNX.
        cached: Whether to cache exports on disk.
        depends_on_modes: Called after an export with the modules whose mode it depends on, and whether it is one of a
            training graph.
        exchanged: Called when the model has exchanged modules in a run for an export; None if that must not happen.
        noted: Called after an export with the notes of what it reads and leaves outside, if the step carries that.
        tolerates: Called with a message about an option without effect on the model; False raises it as an error.
    """

    step: ExportedStep
    postprocess: Callable[[onnx.ModelProto], onnx.ModelProto | None] | None = None
    contrib_ops: bool = True
    cached: bool = True
    tolerates: Callable[[str], bool] | None = None
    depends_on_modes: Callable[[Collection[nn.Module], bool], None] | None = None
    exchanged: Callable[[], None] | None = None
    noted: Callable[[Notes, bool], None] | None = None

    def build(self, request: Request) -> Step:
        """Exports the step for a batch's dtypes; symbolic dimensions stay free unless the model fixes them.

        If possible, the export runs in a child process: the exporter needs more memory than many models, and all of it
        is released when the process ends.

        Args:
            request: A run that the graph is for, with a sample of every input; whether it trains decides between the
                joint forward and backward graph and the one for evaluation. A training graph has all outputs, but may
                compute those separately that are not fetched. A refused graph shows that the model has branches on
                values.

        Raises:
            ExportError: If the model can't be exported or its outputs don't match the description.
            Exception: What the model raises for the batch, if it has branches on values.
        """
        step = self.step
        if request.padded:  # for a comparison, which needs no compiled loops
            step = dataclasses.replace(step, padding_mask="", kernels=PROGRAMS.name)
        if request.training and request.fetched:
            step = _for_fetching(step, request.fetched)
        builder = dataclasses.replace(self, step=step)
        return self._finished(builder._exported(request.batch, request.training, bool(request.refused)))

    def compile_later(self, request: Request, step: Step, backward: Sequence[Step] = ()) -> Compilation | None:
        """Begins to compile a training graph for the rival of its kernels, while training goes on.

        Args:
            request: As for :meth:`build`.
            step, backward: What that, or :meth:`build_call`, has returned.

        Returns:
            None if the kernels have no rival, were chosen before, or if nothing can be compiled, which is logged.
        """
        rival = kinds(self.step.kernels)[0].rival
        if not rival or step.measured:
            return None
        reason = objection()
        if self.step.joint:
            reason = "several processes train together, and each would choose by itself"
        if step.assumptions:
            reason = "the model has branches on values"
        if reason:
            _log.info("training stays on PyTorch's kernels: %s", reason)
            return None
        other = dataclasses.replace(self.step, kernels=rival)
        if request.fetched:
            other = _for_fetching(other, request.fetched)

        def in_child() -> Export:
            from .export import export

            with torch.enable_grad():  # kept, so that a run that ends before the choice has not compiled for nothing
                return export(other, request.batch, True, export_cache() if self.cached else None, lambda stage: None)

        try:
            with BORROWED:  # in this process, so that no other thread has it at the fork
                compilation = Compilation(step, backward, in_child)
        except OSError as error:  # of the limits of the system
            _log.info("training stays on PyTorch's kernels: no process can be begun to compile loops: %s", error)
            return None
        _log.info("compiling loops while training goes on; then steps show which kernels are faster")
        return compilation

    def build_call(self, inputs: Mapping[str, torch.Tensor]) -> tuple[Step, tuple[Step, ...]]:
        """Exports a call, for inputs' dtypes, as :meth:`build` does.

        Returns:
            The forward pass, and the backward passes, the one that takes most gradients last.

        Raises:
            ExportError: If the module can't be exported.
        """
        export = self._exported(inputs, True)
        return dataclasses.replace(export.step, kept=export.kept), export.backward

    def _exported(self, batch: Mapping[str, torch.Tensor], training: bool, branching: bool = False) -> Export:
        try:
            with BORROWED, torch.enable_grad():  # the caller may be under no_grad
                if not branching:
                    with contextlib.suppress(ValuesAsked):
                        return self._build(batch, training)
                # In this process, so that what the model raises for the batch is the user's as it is.
                step = dataclasses.replace(self.step, answers=answers_of(self.step, batch, training))
                return dataclasses.replace(self, step=step)._build(batch, training)
        except PartsExchanged:
            if self.exchanged is None or not exchanges_modules(self.step, batch, training):
                raise
            self.exchanged()
            return dataclasses.replace(self, exchanged=None)._exported(batch, training, branching)
        except IdleOptionError as error:
            if self.tolerates is None or not self.tolerates(f"this option has no effect: {error}"):
                raise
            recompute = dataclasses.replace(self.step.recompute, **_IDLE[error.option])
            step = dataclasses.replace(self.step, recompute=recompute)
            return dataclasses.replace(self, step=step)._exported(batch, training, branching)

    def _build(self, batch: Mapping[str, torch.Tensor], training: bool) -> Export:
        """Loads the export from the cache, or makes it, and logs which."""
        start = time.perf_counter()
        cache = export_cache() if self.cached else None
        if not is_tested():
            from .self_check import check_torch

            check_torch(self.step.kernels, cache)
        with contextlib.closing(_Progress(self.step.model._get_name())) as progress:

            def run_export(step: ExportedStep) -> Export:
                from .export import export  # slow, and only the child needs it

                return export(step, batch, training, cache, progress.stage)

            def in_child() -> bytes | None:
                if not can_differentiate():
                    return None
                with contextlib.suppress(ValuesAsked):
                    return run_export(self.step).to_bytes()
                try:
                    answers = answers_of(self.step, batch, training)
                except Exception:  # the model raises it again in the parent process, where the user sees it
                    raise ValuesAsked from None
                return run_export(dataclasses.replace(self.step, answers=answers)).to_bytes()

            draw = progress.draw if progress.shown else None
            meanwhile = None if kinds(self.step.kernels)[0].of_pytorch else preload  # of ONNX Runtime
            answer = run_in_child(in_child, draw, meanwhile) if can_isolate() else None
            export = run_export(self.step) if answer is None else Export.from_bytes(answer)
        if self.depends_on_modes is not None:
            parts = dict(self.step.module().named_modules())
            self.depends_on_modes({parts[name] for name in export.modes_read}, training)
        if self.noted is not None and export.notes is not None:
            self.noted(Notes.from_json(export.notes), training)
        seconds = time.perf_counter() - start
        self._log_export(export, seconds)
        export = dataclasses.replace(export, step=dataclasses.replace(export.step, seconds=seconds))
        if export.step.fixed:
            places = "; ".join(dict.fromkeys(filter(None, export.reasons.values())))
            places = f". {places}" if places else ""
            sizes = fixed_dimensions(export.step.fixed)
            _log.warning("the model fixes %s: every other size needs its own export%s", sizes, places)
        return export

    def _finished(self, export: Export) -> Step:
        graph = dataclasses.replace(export.step, kept=export.kept)
        if self.postprocess is not None:
            from ..step.postprocess import postprocessed

            graph = postprocessed(graph, self.postprocess)
        if not self.contrib_ops and graph.in_onnx:
            _refuse_contrib_ops(graph)
        return graph

    def _log_export(self, export: Export, seconds: float) -> None:
        for remark in export.remarks:
            _log.info("%s", remark)
        for problem in export.problems:
            _warn_once(problem)
        for what in export.output[:_MOST_OUTPUTS]:
            warn(
                f"forward() of {self.step.model._get_name()} or the loss {what}\nThis happens only while the graph "
                "is made, not in each step: return the value, or do it in the loop or in a callback"
            )
        graph = export.step
        if graph.measured:
            _log.info("these kernels were chosen in an earlier run: %s", graph.measured)
        if not _log.isEnabledFor(logging.INFO):
            return
        kind = f"{graph.kind} and backward" if export.backward else graph.kind
        graphs = [step.programs for step in (graph, *export.backward) if step.programs]
        has_loops = any(each.has_loops for each in graphs)
        kernels = f", computed by {PROGRAMS.title}{' and compiled loops' * has_loops}" if graphs else ""
        if export.found:
            _log.info("loaded the %s graph from the cache in %.1f s%s: %s", kind, seconds, kernels, export.kept)
        else:
            where = f", cached as {export.kept}" if export.kept else ""
            _log.info("exported the %s graph in %.1f s%s%s", kind, seconds, kernels, where)

    def reference(
        self, batch: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], float]:
        """Returns PyTorch's own results in evaluation mode; see :func:`~.eager.evaluate_eagerly`."""
        return evaluate_eagerly(self.step, batch, tensors)

    def eager(
        self,
        batch: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        scale: float,
        state: torch.Tensor | None,
        random: Iterable[RandomInput] = (),
        shake: int | None = None,
        memory: float = math.inf,
    ) -> EagerStep:
        """Returns PyTorch's own results of a training step; see :func:`~.eager.run_eagerly`."""
        return run_eagerly(self.step, batch, tensors, scale, state, random, shake, memory)


def _for_fetching(step: ExportedStep, fetched: Collection[str]) -> ExportedStep:
    """Returns what to export for runs that fetch some outputs."""
    if not kinds(step.kernels)[0].of_pytorch:
        return step
    return dataclasses.replace(step, unfetched=frozenset(step.description.output_names).difference(fetched))


def _refuse_contrib_ops(graph: Step) -> None:
    """Implements the option ``_internal_use.enable_onnx_contrib_ops`` False."""
    contrib_ops = {
        f"{node.domain}::{node.op_type}" for node in graph.model.graph.all_nodes() if node.domain not in _STANDARD
    }
    if contrib_ops:
        raise ValueError(
            f"_internal_use.enable_onnx_contrib_ops is False, but the graph has {sorted(contrib_ops)}, which is not "
            "standard ONNX: don't add it in _internal_use.extra_postprocess, or set the option to True"
        )


class _Progress:
    """A line with the stages of an export, on a terminal or in a notebook, which is cleared at the end.

    It is not shown if warnings are not logged.
    Elsewhere, as in a log file, it writes only that loops are compiled, which may take half a minute. A forked child
    reports its stages through a pipe, so only one process writes to the terminal. Some terminals of Windows print
    control sequences as they are, so blanks clear the line.

    Args:
        what: The name of what is exported.
    """

    def __init__(self, what: str) -> None:
        wanted = os.environ.get("ORT_TRAINER_PROGRESS", "") not in ("0", "off") and _log.isEnabledFor(logging.WARNING)
        self.shown = wanted and redraws(sys.stderr)
        self._tells_compiling = wanted and not self.shown
        self._what = what
        self._stream = sys.stderr  # kept, because the export redirects sys.stderr for a while
        self._start = time.perf_counter()
        self._stages: list[str] = []
        self._owner = os.getpid()
        self._width = 0  # of what the line shows
        self._pipe = os.pipe() if self.shown and can_isolate() else None
        if self._pipe is not None:
            os.set_blocking(self._pipe[0], False)

    def stage(self, name: str) -> None:
        """Reports that a stage has begun; called in the process that exports."""
        if name == "compile" and self._tells_compiling and self._stream is not None:
            self._tells_compiling = False
            how_long = "up to half a minute, once per model and machine"
            self._stream.write(f"compiling the loops of {self._what}: {how_long}\n")
            self._stream.flush()
        if os.getpid() == self._owner:
            self._stages.append(name)
            self.draw()
        elif self._pipe is not None:
            os.write(self._pipe[1], f"{name}\n".encode())

    def draw(self) -> None:
        """Redraws the line; called in the process that shows it, at any time."""
        if not self.shown:
            return
        if self._pipe is not None:
            with contextlib.suppress(BlockingIOError):
                self._stages += os.read(self._pipe[0], 4096).decode().split()
        seconds = time.perf_counter() - self._start
        line = f"exporting {self._what}: {', '.join(dict.fromkeys(self._stages))}, {seconds:.1f} s"
        try:
            width = os.get_terminal_size(self._stream.fileno()).columns or 80  # some terminals report 0
        except OSError:  # a notebook
            width = 80
        self._show(line[: width - 1])

    def close(self) -> None:
        """Clears the line."""
        if self.shown:
            self.draw()  # the final state, for logs of the terminal, which keep overwritten lines
            self._show("")
            self.shown = False
        for end in self._pipe or ():
            os.close(end)
        self._pipe = None

    def _show(self, line: str) -> None:
        self._stream.write(f"\r{line.ljust(self._width)}" + ("" if line else "\r"))
        self._stream.flush()
        self._width = len(line)
