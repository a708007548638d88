"""Finds the graph for a batch or builds one: the model description, its symbolic sizes, and the exports."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from ..capture.eager import EagerStep
from ..capture.nested import Layout, argument_of, constants_of, flatten, has_tensors
from ..core.errors import shown
from ..engine import Executor, Plan, Request
from ..engine.memory import return_freed_memory
from ..engine.ort import require_engine, require_onnx
from ..export.builder import GraphBuilder
from ..export.compile_later import Compilation, Compilations
from ..export.model import ModelSource
from ..options import ModelDescription
from ..step import RandomInput, Step
from .batch import Batch, InputTypeError, check_batch, read_batch, to_tensor, unpack

_log = logging.getLogger(__name__)
# Each graph costs an export; a model that fixes a dimension must not be exported again and again.
_MAXIMUM_GRAPHS = 16
# Limit for remembered kinds of batches (shapes, dtypes, devices) that match the description.
_MAXIMUM_KINDS = 1024
_kind = attrgetter("shape", "dtype", "device")


class StepGraphs:
    """Holds the model description and builds the graphs of a trainer.

    Args:
        source: The model.
        model_desc: The description as the user gave it, or ``"auto"``.
        device: Where training runs.
        tolerates: Called with a message if fixed sizes or ranks contradict a batch; True corrects them.
        built: Called with every new graph and the batch that it was made for, after it was added to the executor.
        rebound: Called with the tensors that replaced others in the executor, by name.
        keeps_orders: Whether training graphs depend on the order of inputs in memory, as PyTorch's random numbers do.

    Attributes:
        has_started: Whether training or evaluation has begun.
        loss_parameters: Numbers that the loss reads, by name; they may be changed before any step.
        leaves: Id of a graph -> what its runs leave outside. Graphs live as long as the executor, so ids stay unique.

    Raises:
        TypeError, ValueError: If the description is invalid or does not match the model.
    """

    def __init__(
        self,
        source: ModelSource,
        model_desc: Mapping[str, Any] | str,
        device: torch.device,
        tolerates: Callable[[str], bool],
        built: Callable[[Executor, Step, Batch], None],
        rebound: Callable[[Mapping[str, torch.Tensor]], None],
        keeps_orders: bool,
    ) -> None:
        self._source, self._keeps_orders = source, keeps_orders
        self._device = device
        self._tolerates = tolerates
        self._built, self._rebound = built, rebound
        self._derives = model_desc == "auto"
        self._description: ModelDescription | None = None
        self._narrower: ModelDescription | None = None
        self._input_names: tuple[str, ...] = ()
        self._arguments: tuple[str, ...] = ()
        self._layouts: dict[str, Layout] = {}
        self.loss_parameters: dict[str, float] = {}
        self._parameters: dict[str, tuple[float, torch.Tensor]] = {}
        self._output_names: tuple[str, ...] = ()
        self._fitting: set[tuple[Any, ...]] = set()
        self._branching: dict[str, torch.Tensor] = {}
        self._sample: dict[str, tuple[torch.Size, torch.dtype]] | None = None
        self.leaves: dict[int, Any] = {}
        self.has_started = False
        self._renewals = 0
        self._compilations = Compilations()
        if not isinstance(model_desc, str):
            self._set_description(ModelDescription(model_desc))
        elif model_desc != "auto":
            raise ValueError(f"model_desc must be a dict or 'auto', but {shown(model_desc)} was given")

    @property
    def description(self) -> ModelDescription:
        """The model description.

        Raises:
            RuntimeError: With ``"auto"``, before the first batch.
        """
        if self._description is None:
            raise RuntimeError(
                "model_desc='auto' is derived from the first batch: call prepare(), train_step() or eval_step() first; "
                "or call the model itself, which has the weights of a loaded checkpoint"
            )
        return self._description

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the described outputs, in order; empty while there is no description."""
        return self._output_names

    def possible_inputs(self) -> set[str]:
        """Returns all valid input names: the model's, and the description's if there is one."""
        return {*self._source.inputs, *self._input_names}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], partly: bool = False) -> Batch:
        """Returns the arguments of a step as a checked batch; with ``partly``, inputs may be left out.

        Raises:
            TypeError, ValueError: If they do not match the description.
        """
        # Until there is a graph, each batch is described anew: one that was refused must not decide the description.
        if self._description is None or (self._derives and not self.has_started):
            self._describe(args, kwargs)
        try:
            names = self._input_names
            optional = names if partly else ()
            batch = read_batch(names, args, kwargs, optional, self._arguments, self._source.inputs, self._keeps_orders)
            if self._device.type != "cpu":
                batch.move(self._device)
            if self._parameters or self.loss_parameters:
                self._add_parameters(batch)
            if partly and self._layouts:  # arguments that are left out keep their earlier layouts
                earlier = {name: layout for name, layout in self._layouts.items() if has_tensors(layout)}
                batch.layouts = tuple(sorted({**earlier, **dict(batch.layouts)}.items()))
            kind = (*batch, *map(_kind, batch.values()))
            if kind not in self._fitting:
                self._check(batch)
                if len(self._fitting) >= _MAXIMUM_KINDS:
                    self._fitting.clear()
                self._fitting.add(kind)
            return batch
        except (TypeError, ValueError) as error:
            if not self.description.inferred or isinstance(error, InputTypeError):
                raise
            raise type(error)(f"{error} (the first batch gave this description, as model_desc is 'auto')") from error

    def started(self, executor: Executor, batch: Batch) -> None:
        """Records the shapes and dtypes of the first batch, for which the executor has a graph."""
        self._sample = {name: (value.shape, value.dtype) for name, value in batch.items()}
        if any(step.assumptions for mode in (True, False) for step in executor.graphs(mode)):
            self._branching = {name: value.clone() for name, value in batch.items()}
        self.has_started = True
        self._layouts = dict(batch.layouts)
        self._fitting.clear()

    def blank_batch(self) -> Batch:
        """Returns a batch like the first: zeros, because an evaluation graph depends only on dtypes and fixed sizes.

        If the model has branches on values, the batch has the values of the first one.

        Raises:
            RuntimeError: If there was no batch yet, and the model does not define its inputs itself.
        """
        if self._sample is None:
            return Batch(self._source.blank_batch(self.description))
        blank = {
            name: torch.zeros(shape, dtype=dtype, device=self._device) for name, (shape, dtype) in self._sample.items()
        }
        batch = Batch({name: self._branching[name].clone() for name in self._sample} if self._branching else blank)
        batch.layouts = tuple(self._layouts.items())
        return batch

    def fetches(self, names: Sequence[str]) -> Sequence[str]:
        """Returns the names of a step's outputs: the given ones, or all if none is given.

        Raises:
            RuntimeError: If a name is unknown or repeated.
        """
        output_names = self._output_names
        if not names:
            return output_names
        if not set(names) <= set(output_names) or len(set(names)) < len(names):
            raise RuntimeError(
                f"The specified fetches list contains invalid output names: {list(names)}; it may contain each of "
                f"{list(output_names)} once"
            )
        return names

    def refresh(self, executor: Executor) -> None:
        """Makes the executor use tensors that the user replaced in the model.

        Raises:
            RuntimeError: If the executor can't use one of them.
        """
        changed = self._source.memory.take_changes()
        if changed:
            self._rebind(executor, changed)

    def plan(self, executor: Executor, request: Request) -> Plan:
        """Returns the executor's plan for a run; builds a graph if none accepts the batch's sizes and branches.

        Args:
            executor: Has the graphs.
            request: What to run, on a :class:`Batch`.

        Raises:
            RuntimeError: If there are too many graphs already, or the model has changed incompatibly.
            ExportError: If the model can't be exported.
            TypeError: If an input that the outputs need was left out.
        """
        self._guard(executor, request)
        if self._compilations.running:
            self._compilations.take()
        plan = executor.plan(request)
        while plan is None:
            self._add_graph(executor, request)
            if self._source.guard.carried.put():  # a checkpoint's values, for places that only this export has shown
                self._guard(executor, request)
            plan = executor.plan(request)
        return plan

    def portable(self, executor: Executor, training: bool, batch: Batch | None = None) -> Step:
        """Returns a graph of standard ONNX operators, whatever kernels the executor uses.

        Args:
            executor: Has the graphs; a suitable one is reused.
            training: Whether in training mode.
            batch: What it takes is like this one, or like the first one that was given.

        Raises:
            ModuleNotFoundError: If ONNX Runtime, whose kernels the graph is fitted to, or ONNX is not installed.
            RuntimeError: If the model has changed incompatibly.
            ExportError: If the model can't be exported.
        """
        require_engine()
        require_onnx()
        request = Request(self.blank_batch() if batch is None else batch, training, self._output_names)
        self._guard(executor, request)
        plan = executor.plan(request)
        tensors = {**self._source.parameters, **self._source.buffers}
        if plan is not None and plan.runner.step.is_standard and plan.runner.step.state.keys() <= tensors.keys():
            return plan.runner.step
        return self._build(request, portable=True)

    def leave(self, step: Step, tensors: Sequence[torch.Tensor]) -> None:
        """Writes what a run of a graph leaves outside tensors.

        Args:
            step: The graph.
            tensors: The values of its outputs ``Step.left``.
        """
        notes = self.leaves.get(id(step))
        if notes is not None:
            self._source.guard.leave(notes, tensors)

    def numbers_left(self, step: Step) -> set[int]:
        """Returns which of the tensors that a graph leaves are numbers that it has computed."""
        notes = self.leaves.get(id(step))
        return set() if notes is None else notes.leftovers.numbers

    def padded(self, batch: Batch) -> Step:
        """Returns a training graph that computes padded places, whatever ``utils.remove_padding`` says.

        Raises:
            ExportError: If the model can't be exported.
        """
        return self._builder(batch).build(Request(batch.as_given(), True, self._output_names[:1], padded=True))

    def eager(
        self,
        executor: Executor,
        batch: Batch,
        scale: float,
        state: Any,
        random: Iterable[RandomInput],
        shake: int | None = None,
        memory: float = math.inf,
    ) -> EagerStep:
        """Returns PyTorch's own results of a training step; see ``capture/eager.py``."""
        tensors = {**executor.parameters, **executor.buffers}
        return self._builder(batch).eager(batch.as_given(), tensors, scale, state, random, shake, memory)

    def renew(self) -> None:
        """Has all training graphs made anew, from the model as it is, not from the cache."""
        self._renewals += 1

    def check_export(self, executor: Executor, batch: Batch) -> None:
        """Compares the exported graph with the model: the option ``debug.check_model_export``.

        Raises:
            RuntimeError: If their outputs differ.
        """
        plan = self.plan(executor, Request(batch, False, self._output_names))
        outputs = executor.evaluate(plan, batch)
        tensors = {**executor.parameters, **executor.buffers}
        reference, epsilon = self._builder(batch).reference(batch, tensors)
        for output, ours, theirs in zip(self.description.outputs, outputs, reference, strict=True):
            ours, theirs = ours.double(), theirs.double()
            # Elements near zero may be differences of large ones, which were rounded.
            finite = theirs[theirs.isfinite()].abs()
            absolute = max(1e-6, 4 * epsilon * finite.max().item()) if finite.numel() else 1e-6
            if not torch.allclose(ours, theirs, rtol=1e-2, atol=absolute, equal_nan=True):
                difference = (ours - theirs).abs().max().item()
                raise RuntimeError(
                    f"debug.check_model_export: output {output.name!r} of the exported graph differs from PyTorch's by "
                    f"up to {difference:.3g} (allowed: relative 1e-2, absolute {absolute:.1g})"
                )

    def _set_description(self, description: ModelDescription, parameters: Sequence[str] | None = None) -> None:
        """Checks a description and makes it the current one."""
        # Making a builder checks the description. Before the first batch, the parameters of the loss are unknown.
        self._source.builder(description, tuple(self._layouts.items()), parameters)
        self._description, self._input_names = description, tuple(description.input_names)
        self._output_names = tuple(description.output_names)
        self._arguments = self._arguments or tuple(dict.fromkeys(map(argument_of, self._input_names)))
        self._fitting.clear()

    def _describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Derives the description from the first batch."""
        self._description, self._input_names, self._arguments, self._output_names = None, (), (), ()
        args, kwargs = unpack(args, kwargs)
        arguments = self._source.name_inputs(args, kwargs, self.loss_parameters)
        leaves: dict[str, Any] = {}
        layouts = {argument: flatten(argument, value, leaves) for argument, value in arguments.items()}
        batch = {name: to_tensor(name, value) for name, value in leaves.items()}
        self._layouts = {name: layout for name, layout in layouts.items() if layout[0] != "tensor"}
        parameters = Batch()
        self._add_parameters(parameters)
        self._set_description(self._source.describe(batch, layouts, parameters), tuple(parameters))
        # Positional arguments keep the order of the first batch; of those given by name, the labels are last.
        order: tuple[str, ...] = self._arguments
        first = [*arguments][: len(args)]
        named = iter([argument for argument in order if argument not in first])
        self._arguments = tuple(
            next(named) if argument in order and argument not in first else argument for argument in arguments
        )
        _log.info("derived from the first batch: %s", self._description)

    def _guard(self, executor: Executor, request: Request) -> None:
        """Makes the executor use the graphs and tensors of the model as it is now."""
        batch, training = request.batch, request.training
        variant, changed = self._source.guard.check(training)
        executor.variants[training] = (
            (variant, self._renewals),
            batch.layouts,
            training and batch.orders,
            *self._parameters,
        )
        if changed:
            self._rebind(executor, changed)

    def _rebind(self, executor: Executor, changed: Mapping[str, torch.Tensor]) -> None:
        """Replaces tensors in the executor, and reports it."""
        executor.rebind(changed)
        self._rebound(changed)

    def _builder(self, batch: Batch, portable: bool = False) -> GraphBuilder:
        """Returns a builder of graphs for arguments like a batch's, with the current loss parameters."""
        description = self.description
        if self._parameters:
            fields = description.to_dict()
            inputs = [*fields["inputs"], *((name, []) for name in self._parameters)]
            description = ModelDescription({**fields, "inputs": inputs}, description.inferred, description.corrected)
        return self._source.builder(description, batch.layouts, tuple(self._parameters), portable)

    def _add_parameters(self, batch: Batch) -> None:
        """Adds the loss parameters to a batch, as tensors that are refilled when a number has changed."""
        if self._parameters.keys() != self.loss_parameters.keys():
            taken = [name for name in self.loss_parameters if name in self._input_names or not name.isidentifier()]
            if taken:
                raise ValueError(f"loss_parameters {taken} must be valid argument names and differ from the inputs")
            # NaN differs from every number, so the first value is written.
            self._parameters = {name: (math.nan, torch.zeros((), device=self._device)) for name in self.loss_parameters}
        for name, value in self.loss_parameters.items():
            current, tensor = self._parameters[name]
            if current != value:
                if isinstance(value, bool) or not isinstance(value, numbers.Real):
                    raise TypeError(f"loss_parameters[{name!r}] must be a number, but {shown(value)} was given")
                self._parameters[name] = (float(value), tensor.fill_(float(value)))
            batch[name] = tensor

    def _check(self, batch: Batch) -> None:
        """Checks a batch of a new kind, after widening the description for it if that is allowed."""
        self._widen(batch)
        dtypes = None if self._sample is None else {name: dtype for name, (_, dtype) in self._sample.items()}
        try:
            check_batch(self.description, batch, self._device, dtypes)
        except BaseException:
            self._narrow()
            raise

    def _widen(self, batch: Batch) -> None:
        """Makes dynamic the dimensions in which a batch differs, if the description is derived or may be corrected."""
        description = self.description
        shapes = {name: tuple(value.shape) for name, value in batch.items()}
        wider = description.widened(shapes, correct=not description.inferred)
        if wider is not description:
            changed = [entry for entry in wider.inputs if entry not in description.inputs]
            if description.inferred:
                sizes = ", ".join(map(str, changed))
                _log.warning("a batch has other sizes than earlier ones, so the model is exported again: %s", sizes)
            else:
                wrong = [f"{e.name!r} {list(e.shape)}" for e in description.inputs if e not in wider.inputs]
                message = (
                    f"model_desc contradicts the batch and is corrected: inputs {', '.join(wrong)} have the shapes "
                    f"{', '.join(str(list(shapes[entry.name])) for entry in changed)}"
                )
                if not self._tolerates(message):
                    return  # the check of the batch raises, and says what is wrong
            self._narrower = description
            self._set_description(wider)

    def _narrow(self) -> None:
        """Restores the description from before :meth:`_widen`: the batch was wrong, not the description."""
        narrower, self._narrower = self._narrower, None
        if narrower is not None:
            self._set_description(narrower)

    def _add_graph(self, executor: Executor, request: Request) -> None:
        """Exports the model for a run and adds the graph to the executor."""
        batch: Batch = request.batch
        training = request.training
        sizes = self.description.sizes({name: tuple(value.shape) for name, value in batch.items()})
        graphs = executor.graphs(training)
        if graphs:
            _log.info("exporting again: %s", self._why_again(executor, batch, training))
        if len(graphs) >= _MAXIMUM_GRAPHS:
            fixed = sorted({symbol for step in graphs for symbol in step.fixed})
            raise RuntimeError(
                f"the model fixes dimensions ({fixed}) and has been exported for {len(graphs)} sizes already; "
                f"{sizes} would be one more. Pad the inputs to fewer different sizes"
                if fixed
                else "modes and settings of the model (a norm's momentum, a size), inputs that are not tensors "
                f"(numbers, bools) or branches on values have changed so often that it has been exported {len(graphs)} "
                "times already. Pass values that change often as tensor inputs or in trainer.loss_parameters"
            )
        if self._sample is not None:
            # An export needs all inputs, also those that the requested outputs do not depend on. Their sizes follow
            # the dimensions that they were equal to in the first batch.
            first = self.description.sizes({name: tuple(shape) for name, (shape, _) in self._sample.items()})
            like = {first[name]: size for name, size in sizes.items()}
            sizes = {name: like.get(size, size) for name, size in first.items()} | sizes
            for entry in self.description.inputs:
                if entry.name not in batch:
                    shape = [sizes[size] if isinstance(size, str) else size for size in entry.shape]
                    blank = torch.zeros(shape, dtype=self._sample[entry.name][1])
                    batch = batch.with_tensors({**batch, entry.name: blank})
        request = request._replace(batch=batch)
        step = self._build(request)
        notes = self._source.guard.notes
        if training and notes is not None:
            self.leaves[id(step)] = notes
        self._guard(executor, request)  # again: the export has shown which tensors from outside the graph takes
        try:
            executor.add_graph(step)
        except RuntimeError:
            if step.kept:  # a later process must not find a cached graph that fails to load
                Path(step.kept).unlink(missing_ok=True)
            raise
        return_freed_memory()
        self._built(executor, step, batch)
        if training:
            given = request._replace(batch=batch.as_given())
            begin = functools.partial(self._builder(batch).compile_later, given, step)
            self._compilations.begin(begin, functools.partial(self._add_rival, executor))

    def _add_rival(self, executor: Executor, compilation: Compilation, rival: Step, _: Sequence[Step]) -> None:
        """Lets a graph that was compiled meanwhile take turns with the one that trains."""
        step = compilation.step
        executor.add_rival(step, rival, compilation.chosen)
        if id(step) in self.leaves:
            self.leaves[id(rival)] = self.leaves[id(step)]

    def _why_again(self, executor: Executor, batch: Batch, training: bool) -> str:
        """Returns why no graph can be used for a batch."""
        shapes = {name: tuple(value.shape) for name, value in batch.items()}
        graphs = executor.graphs_of_variant(training)
        if graphs:
            return next(graphs[-1].objections(shapes), "the batch takes other branches of the model")
        constants = {key: value for name, layout in batch.layouts for key, value in constants_of(layout, name).items()}
        if change := self._source.guard.last_change:
            return f"the model has changed: {change}"
        return f"an input that is a constant has changed: {constants}" if constants else "the loss function has changed"

    def _build(self, request: Request, portable: bool = False) -> Step:
        """Exports the model; if that fails, the description is what it was before it was widened for this batch."""
        batch: Batch = request.batch
        try:
            self._check_sizes(batch)
            # Masks are drawn in the order of the input in memory, so only training depends on it.
            sample = batch.as_given() if request.training else batch
            builder = self._builder(batch, portable)
            if self._renewals:
                builder = dataclasses.replace(builder, cached=False)
            step = builder.build(request._replace(batch=sample))
        except BaseException:
            self._narrow()
            raise
        self._narrower = None
        return step

    def _check_sizes(self, batch: Batch) -> None:
        """Checks that PyTorch can run the model on a batch whose sizes have widened the description.

        An export that fails takes longer, and PyTorch keeps a thousand objects of each.
        """
        narrower = self._narrower
        if narrower is None or not narrower.inferred:
            return
        error = self._error_of(batch)
        if error is None or self._error_of(self.blank_batch()) is not None:  # it can't be run in evaluation mode at all
            return
        pairs = zip(narrower.inputs, self.description.inputs, strict=True)
        earlier = [f"{entry.name!r} {list(entry.shape)}" for entry, now in pairs if entry != now]
        shapes = [f"{name!r} {list(value.shape)}" for name, value in batch.items()]
        raise ValueError(
            f"{self._source.name} does not take a batch of these sizes, {', '.join(shapes)}; earlier batches had "
            f"{', '.join(earlier)}: {error}"
        )

    def _error_of(self, batch: Batch) -> Exception | None:
        """Returns the error of the model itself, in evaluation mode, for a batch."""
        try:
            self._builder(batch).reference(batch, {**self._source.parameters, **self._source.buffers})
        except Exception as error:
            return error
        return None
