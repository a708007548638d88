"""Exports a step, or finds it in the cache. The stations, in order, are files:

    capture        the forward pass as PyTorch's operators, with symbolic sizes: torch.export
    fingerprint    the look-up in the cache of exports, which ends the way if the step is known
    index_ranges   which inputs are indices, and into what
    differentiate  one flat graph of forward and backward pass: AOTAutograd
    random_inputs  random operators become inputs
    recompute      forward values that the backward pass computes again
    assemble       names, and the lowered graphs as steps

Imports that only a cache miss needs are lazy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..capture.borrow import borrowed, quiet
from ..capture.branches import ValuesAsked
from ..capture.call import ExportedCall
from ..capture.capture import Capture, capture
from ..capture.eager import differentiated, random_state_kept
from ..capture.fingerprint import NoFingerprint, fingerprint, outline
from ..capture.index_ranges import find_index_ranges, reads_values
from ..capture.step_module import ExportedStep
from ..core.errors import ExportError
from ..engine.torch_memory import in_order, order_of
from ..fx.explain import forward_line, is_meant, may_be_sizes, unforeseen
from ..fx.symbols import remembered_sizes
from ..graph.kernels import Kernels
from ..kernels.kinds import kinds
from ..outside.places import Place, read
from ..outside.recorder import Recorder
from ..step.cache import Export, ExportCache, violated

if TYPE_CHECKING:
    from ..graph.flat_graph import FlatGraph

_log = logging.getLogger(__name__)
# Replaces size 1 in symbolic dimensions of a sample; unlikely to be a size of the model itself.
_STAND_IN_SIZE = 7


def export(
    step: ExportedStep,
    batch: Mapping[str, torch.Tensor],
    training: bool,
    cache: ExportCache | None,
    stage: Callable[[str], None],
) -> Export:
    """Exports a step for a batch's dtypes; symbolic dimensions stay free unless the model fixes them.

    Args:
        step: What to export.
        batch: A sample of every input.
        training: Whether to export the joint forward and backward graph, or the one for evaluation.
        cache: The cache of exports, or None.
        stage: Called with the name of each stage when it begins.

    Raises:
        ExportError: If the model can't be exported or its outputs don't match the description.
        ValuesAsked: If the model has branches on values or refuses a number that has changed, and the step has no
            answers.
    """

    def attempt(kernels: Kernels) -> Export:
        try:
            return _Exporter(step, batch, training, cache, stage, kernels).run()
        except (ExportError, ValuesAsked):
            raise
        except Exception as error:
            if is_meant(error):
                raise
            raise ExportError(unforeseen(error, step.model._get_name())) from error

    device = step.device_for(batch.values())
    preferred, *others = _usable_kinds(step, training, device)
    with quiet(), remembered_sizes():
        try:
            return attempt(preferred)
        except ExportError as error:
            others = [kind for kind in others if not kind.objection(device)]
            if not others or step.padding_mask:
                raise
            _log.info("using %s: %s", others[0].title, " ".join(str(error).split()))
        return attempt(others[0])


def _usable_kinds(step: ExportedStep, training: bool, device: torch.device) -> list[Kernels]:
    """Returns the kinds of kernels to try in order."""
    allowed = kinds(step.kernels)
    if not training:
        allowed = [kind.for_evaluation() for kind in allowed]
    if training and device.type == "cpu":  # all that are preferred run there
        return allowed
    # A graph that is written to a file may be for another machine.
    return [kind for kind in allowed if not kind.objection(device)] or allowed[:1]


class _Exporter:
    """One export, for one kind of kernels."""

    def __init__(
        self,
        step: ExportedStep,
        batch: Mapping[str, torch.Tensor],
        training: bool,
        cache: ExportCache | None,
        stage: Callable[[str], None],
        kernels: Kernels,
    ) -> None:
        self._step, self._training, self._kernels = step, training, kernels
        self._cache, self._stage = cache, stage
        self._inputs = step.description.inputs
        self._sample = [batch[entry.name] for entry in self._inputs]
        self._sizes = step.description.sizes({entry.name: tuple(batch[entry.name].shape) for entry in self._inputs})
        self._module = step.module()
        self._module.leaves = step.carries and (training or isinstance(step, ExportedCall))
        self._held: dict[str, str] = {}  # symbolic dimension captured with the sample's size -> reason
        self._outline: Mapping[str, str] = {}
        self._key = ""  # in the cache; empty for what can't be cached
        self._remarks: list[str] = []
        self._problems: list[str] = []
        self._output: tuple[str, ...] = ()

    def run(self) -> Export:
        try:
            return self._run()
        except Exception as error:  # an operator, or its kernel, may need what a size is that values decide
            if isinstance(error, ValuesAsked) or not self._module.branches.fix_integers():
                raise
            _log.debug("with integers of this batch: %s", error)
            return self._run()

    def _run(self) -> Export:
        step, training = self._step, self._training
        trainable = {f"model.{name}" for name in step.trainable} if training else set()
        with borrowed(self._module, trainable, training, step.modes_in(training)):
            graph = self._flat_graph()
        if isinstance(graph, Export):
            return self._noted(graph)
        of_call = isinstance(step, ExportedCall)
        if training and not graph.gradients and not of_call:
            raise ExportError(
                "the loss depends on no trainable parameter, so there is nothing to train: is it computed under "
                f"torch.no_grad(), or from detached tensors?\n  {forward_line(step.model)}"
            )
        from ..graph.random_inputs import Draws, lift_random_numbers
        from ..graph.recompute import apply_recompute
        from .assemble import Assembler  # these take seconds and 100 MB; a cached graph does not need them

        on_cpu = step.device_for(self._sample).type == "cpu"
        draws = Draws(step.fast_random, self._kernels.of_pytorch, by_device=self._kernels.of_pytorch and not on_cpu)
        with graph.following():
            random = lift_random_numbers(graph.module.graph, graph.symbols, draws) if training else {}
        if not training:
            described = zip(step.description.outputs, graph.outputs, strict=True)
            graph.read_sizes_from_needed_inputs([node for entry, node in described if not entry.is_loss])
        elif not of_call:
            self._kernels.check(step, graph)
            apply_recompute(step.recompute, graph, random, step.model, keeps_order=self._kernels.of_pytorch)
        assembler = Assembler(step, graph, random, self._kernels, self._stage)
        forward, backward = assembler.call() if of_call else (assembler.step(), ())
        reasons = {symbol: self._held.get(symbol) or graph.symbols.reason(symbol) for symbol in forward.fixed}
        return self._noted(self._kept(Export(forward, reasons, backward=backward)))

    def _noted(self, export: Export) -> Export:
        """Adds what was noted during the capture: also of a cached graph, which another model may have left."""
        recorder = self._module.recorder
        self._refuse_gradients_outside(export)
        export = dataclasses.replace(export, output=self._output)
        read = tuple(name for name, part in self._module.named_modules() if id(part) in recorder.met.modes)
        if not self._step.carries:
            return dataclasses.replace(export, modes_read=read)
        notes = dataclasses.replace(recorder.notes(export.step.state), outline=self._outline)
        return dataclasses.replace(export, modes_read=read, notes=notes.to_json())

    def _refuse_gradients_outside(self, export: Export) -> None:
        outside = {name: tensor for name, (tensor, _) in self._module.recorder.outside().items()}
        read = [name for name in export.step.state if name in outside]
        trained = {name: outside[name] for name in read if outside[name].requires_grad}
        if trained and export.backward:
            raise ExportError(
                f"forward() of {type(self._step.model).__name__} reads {[*trained][:3]}, tensors outside parameters "
                "and inputs that require grad, which a graph computes for these alone: make them parameters or inputs"
            )
        if trained and self._training and not isinstance(self._step, ExportedCall):
            named = zip((entry.name for entry in self._inputs), self._sample, strict=True)
            trained_by_loss = differentiated(self._step, dict(named), trained)
            if trained_by_loss:
                raise ExportError(
                    f"the loss passes gradients to {trained_by_loss[:3]}, tensors outside the model that require grad, "
                    "but a trainer trains the model alone: make them parameters of the model, or train in your own "
                    "loop with ORTModule(model) and the optimizer that they have there; if they are constants, set "
                    "their requires_grad to False"
                )

    def _flat_graph(self) -> Export | FlatGraph:
        """Captures and differentiates the step, with another size for symbolic dimensions of size 1 in the sample.

        The exporter treats a size of 1 as a constant. If the model itself depends on such a size, the capture is
        repeated with the sample's own size. If a derived description has more symbolic dimensions than can be captured,
        the capture is repeated with only the first dimensions of inputs symbolic.

        Returns:
            The flat graph, or the export that the cache has.
        """
        enlarged = {symbol for symbol, size in self._sizes.items() if size == 1}
        failure: ExportError | None = None
        while True:
            stand_in = [_enlarge(e.shape, v, enlarged) for e, v in zip(self._inputs, self._sample, strict=True)]
            if isinstance(self._step, ExportedCall):
                stand_in = self._step.as_leaves(stand_in)
            self._stage("capture")
            try:
                captured = self._captured(stand_in)
                self._output = tuple(self._module.recorder.output)
                self._outline = outline(captured) if self._step.joint else {}
                cached = self._cached(captured)
                if cached is not None:
                    return cached
                self._stage("differentiate")
                from ..graph.differentiate import differentiate  # takes seconds; a cached graph does not need it

                # Before operators are replaced. Indices of a call may be computed; the kernels check them.
                described = None if isinstance(self._step, ExportedCall) else self._step.description
                ranges = () if described is None else find_index_ranges(captured, described)
                autocast = self._step.autocast_for(self._sample)
                flat = differentiate(captured, self._module, self._inputs, autocast, self._kernels)
                flat = dataclasses.replace(flat, index_ranges=ranges)
            except ExportError as error:
                if not enlarged:
                    if self._module.branches.fix_integers():
                        continue
                    if failure is not None:
                        raise failure from None
                    failure = error
                    why = f"With symbolic sizes, {str(error).partition(chr(10))[0]}"
                    self._held = dict.fromkeys(self._dispensable(), why) if may_be_sizes(error) else {}
                    if not self._held:
                        raise
                enlarged = set()
                continue
            conditions, _ = flat.symbols.guards()
            wrong = enlarged & (set(flat.symbols.fixed) | violated(conditions, self._sizes))
            if not wrong:
                return flat
            enlarged -= wrong

    def _captured(self, sample: Sequence[torch.Tensor]) -> Capture:
        """Captures the step; once more if it sets what it reads, to know whether the next run is the same."""
        autocast = self._step.autocast_for(self._sample)
        attempt = functools.partial(capture, self._module, self._inputs, sample, autocast, self._held)
        captured = self._captured_with_counters(attempt, sample)
        if not self._module.leaves:
            return captured
        first = self._module.recorder
        apart = first.apart()
        if apart:  # in the next run, they are several tensors
            second = Recorder(self._module, first.numbers, first.tables, apart=apart)
            captured = self._captured_again(attempt, captured, second) or captured
            first = self._module.recorder
        settings = first.settings()
        if settings:
            second = Recorder(self._module, first.numbers, first.tables, settings, first.kept_apart)
            if self._captured_again(attempt, captured, second) is not None:
                first.settle(second)
            self._module.recorder = first
        return captured

    def _captured_again(self, attempt: Callable[[], Capture], captured: Capture, second: Recorder) -> Capture | None:
        """Captures the step with another recorder, which the module keeps; None, and nothing kept, if that differs."""
        first = self._module.recorder
        with contextlib.suppress(NoFingerprint, ExportError):  # then the next step asks for another graph
            key = self._fingerprint(captured)
            self._module.recorder = second
            again = attempt()
            if self._fingerprint(again) == key:
                return again
        self._module.recorder = first
        return None

    def _fingerprint(self, captured: Capture) -> str:
        step = self._step
        # Of all kinds that may be tried: an export for another kind than the preferred one has the same key.
        device = step.device_for(self._sample)
        keys = [f"{kind.name} {kind.key(device)}" for kind in _usable_kinds(step, self._training, device)]
        return fingerprint(captured, self._module, step, self._training, keys)

    def _captured_with_counters(self, attempt: Callable[[], Capture], sample: Sequence[torch.Tensor]) -> Capture:
        """Captures the step; once more if it counts, or replaces buffers, which only the first capture shows."""
        module, recorder = self._module, self._module.recorder
        try:
            captured = attempt()
            if module.leaves:
                recorder.tables |= dict.fromkeys(self._new_tables(captured, sample))
            counters = recorder.counters() if self._step.carries else set()
            if not counters and not module.assigned.are_new:
                return captured
            recorder.numbers |= counters
            return attempt()
        except ExportError as error:
            if not recorder.numbers:
                raise
            if isinstance(error.__cause__, ValueError) and self._step.answers is None:
                raise ValuesAsked from None  # of a number that PyTorch may refuse, too, which a run of the model tells
            _log.debug("with objects in place of numbers that change: %s", error)
            recorder.numbers.clear()
            return attempt()

    def _new_tables(self, captured: Capture, sample: Sequence[torch.Tensor]) -> list[Place]:
        """Returns the places where there was None, and the run leaves a tensor that depends on sizes alone.

        To be sure, the step runs twice in PyTorch: the second run, which finds the table, must compute the same, and
        leave the same table.
        """
        recorder = self._module.recorder
        results = captured.exported.graph_signature.user_outputs
        count = len(results) - recorder.leftovers.tensors - len(captured.assumptions)
        nodes = {node.name: node for node in captured.exported.graph.nodes}
        tables = [
            place
            for place, code in recorder.leftovers.writes
            if code[0] == "tensor" and place in recorder.met.reads and recorder.met.reads[place] is None
            if not reads_values(nodes[str(results[count + code[1]])])
        ]
        if not tables:
            return []
        module, buffers = self._module, [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        outputs_by_run: list[tuple[torch.Tensor, ...]] = []
        left_by_run: list[list[torch.Tensor]] = []
        for _ in range(2):  # from the same state, except for the tables
            began = dict(zip(tables, left_by_run[0], strict=True)) if left_by_run else {}
            kept = random_state_kept(self._step.device_for(sample))
            with torch.no_grad(), kept, Recorder(module, tables=began).running():
                outputs_by_run.append(module.run(*(value.clone() for value in sample)))
                left_by_run.append([read(module, place) for place in tables])
            with torch.no_grad():
                for buffer, value in buffers:
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)
        if not all(torch.allclose(one, other, equal_nan=True) for one, other in zip(*outputs_by_run, strict=True)):
            return []
        same = zip(tables, *left_by_run, strict=True)
        return [place for place, first, second in same if first.shape == second.shape and torch.equal(first, second)]

    def _dispensable(self) -> set[str]:
        """Returns the symbolic dimensions of a derived description, except the first dimensions of inputs."""
        if not self._step.description.inferred:
            return set()
        return set(self._sizes) - {entry.shape[0] for entry in self._inputs if entry.shape}

    def _cached(self, captured: Capture) -> Export | None:
        """Returns the cached graph of a captured step that accepts the sample's sizes; None if there is none.

        A graph is valid for all sizes that its guards accept, so the first key does not depend on the sample's sizes.
        The second key does: it holds a graph that was exported because the first one rejected these sizes.
        """
        self._remarks = [
            f"the graph assumes that this condition is {assumption.value}, and each step checks it: {assumption.line}"
            for assumption in captured.assumptions
        ]
        if self._cache is None:
            return None
        try:
            key = self._fingerprint(captured)
        except NoFingerprint as reason:
            self._key = ""
            self._remarks.append(f"this export can't be cached: {reason}")
            return None
        sizes = "-".join(str(size) for _, size in sorted(self._sizes.items()))
        for self._key in (key, f"{key}-{hashlib.sha256(sizes.encode()).hexdigest()[:16]}"):
            data, problem = self._cache.load(self._key)
            self._problems += filter(None, [problem])
            if data is None:
                return None
            path = self._cache.path(self._key)
            try:
                cached = Export.from_bytes(data)
            except ValueError as error:
                self._problems.append(f"the cached export {path} is damaged, so the model is exported again: {error}")
                return None
            if cached.accepts(self._sizes):
                return self._noting(cached, kept=str(path), found=True)
        return None

    def _kept(self, export: Export) -> Export:
        kept = ""
        if self._cache is not None and self._key:
            problem = self._cache.store(self._key, export.to_bytes())
            kept = "" if problem else str(self._cache.path(self._key))
            self._problems += filter(None, [problem])
        return self._noting(export, kept=kept)

    def _noting(self, export: Export, **changes: Any) -> Export:
        return dataclasses.replace(export, remarks=tuple(self._remarks), problems=tuple(self._problems), **changes)


def _enlarge(shape: Sequence[int | str], value: torch.Tensor, symbols: Collection[str]) -> torch.Tensor:
    repeats = [_STAND_IN_SIZE if size in symbols else 1 for size in shape]
    if not any(count > 1 for count in repeats):
        return value
    larger = value.repeat(repeats)
    return larger if value.is_contiguous() else in_order(larger, order_of(value))
