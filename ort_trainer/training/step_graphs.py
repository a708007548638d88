"""Finds the graph for a batch, or has one built: the description, the sizes that it leaves open, and the exports."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import shown, warn
from ..graph import TrainingGraph
from ..nested import Layout, argument_of, constants_of, flatten, has_tensors
from ..options import ModelDescription
from ..runtime import Plan, StepSession
from ..runtime.memory import return_freed_memory
from ..sources import BORROWED, Builder, ModelSource
from .batch import Batch, check_batch, read_batch, to_tensor, unpack

__all__ = ["StepGraphs"]

_log = logging.getLogger(__name__)
# Each graph for other sizes costs an export; a model that fixes a dimension must not export without end.
_MAXIMUM_GRAPHS = 16
# Kinds of batches (shapes, dtypes, devices) that are known to fit the description.
_MAXIMUM_KINDS = 1024


class StepGraphs:
    """Knows the model description and builds the graphs of a trainer.

    Args:
        source: The model.
        model_desc: The description as the user gave it, or ``"auto"``.
        device: Where training runs.
        lenient: Whether fixed sizes and ranks that a batch does not have are corrected, with a warning.
        built: Is called with every new graph, after it was added to the session.

    Attributes:
        loss_parameters: Numbers that the loss reads, by name; they may be changed before any step.

    Raises:
        TypeError, ValueError: If the description is invalid or does not fit the model.
    """

    def __init__(
        self,
        source: ModelSource,
        model_desc: Mapping[str, Any] | str,
        device: torch.device,
        lenient: bool,
        built: Callable[[StepSession, TrainingGraph], None],
    ) -> None:
        self._source = source
        self._device = device
        self._lenient = lenient
        self._built = built
        self._description: ModelDescription | None = None
        self._narrower: ModelDescription | None = None
        self._input_names: tuple[str, ...] = ()
        self._arguments: tuple[str, ...] = ()
        self._layouts: dict[str, Layout] = {}
        self.loss_parameters: dict[str, float] = {}
        self._parameters: dict[str, tuple[float, torch.Tensor]] = {}
        self._output_names: tuple[str, ...] = ()
        self._fitting: set[tuple[Any, ...]] = set()
        self._sample: dict[str, tuple[torch.Size, torch.dtype]] | None = None
        if not isinstance(model_desc, str):
            self._set_description(ModelDescription(model_desc))
        elif model_desc != "auto":
            raise ValueError(f"model_desc must be a dict or 'auto', but {shown(model_desc)} was given")

    @property
    def description(self) -> ModelDescription:
        """The model description.

        Raises:
            RuntimeError: Before the first batch, where it is derived from that.
        """
        if self._description is None:
            raise RuntimeError(
                "model_desc='auto' is derived from the first batch: call prepare(), train_step() or eval_step() first"
            )
        return self._description

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the described outputs, in order; none before there is a description."""
        return self._output_names

    def possible_inputs(self) -> set[str]:
        """Returns the names that an input may have: those of the model, and of the description if there is one."""
        return {*self._source.inputs, *self._input_names}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], partly: bool = False) -> Batch:
        """Returns the arguments of a step as a checked batch; of a batch ``partly`` needed, inputs may be left out.

        Raises:
            TypeError, ValueError: If they do not fit the description.
        """
        if self._description is None:
            self._describe(args, kwargs)
        try:
            names = self._input_names
            batch = read_batch(names, args, kwargs, names if partly else (), self._arguments, self._source.inputs)
            self._add_parameters(batch)
            if partly and self._layouts:  # parts that are left out are laid out as they were
                known = {name: layout for name, layout in self._layouts.items() if has_tensors(layout)}
                batch.layouts = tuple(sorted({**known, **dict(batch.layouts)}.items()))
            kind = (*batch, *((value.shape, value.dtype, value.device) for value in batch.values()))
            if kind not in self._fitting:
                self._check(batch)
                if len(self._fitting) >= _MAXIMUM_KINDS:
                    self._fitting.clear()
                self._fitting.add(kind)
            return batch
        except (TypeError, ValueError) as error:
            if not self.description.inferred:
                raise
            raise type(error)(
                f"{error}. (The description was derived from the first batch, model_desc='auto': where batches differ "
                "more than that shows, write one. Outputs that need no label can be had with train_step_info.fetches)"
            ) from error

    @property
    def has_started(self) -> bool:
        """Whether there has been a batch with which training or evaluation began."""
        return self._sample is not None

    def started(self, batch: Batch) -> None:
        """Remembers the shapes and dtypes of the batch with which training began."""
        self._sample = {name: (value.shape, value.dtype) for name, value in batch.items()}
        self._layouts = dict(batch.layouts)
        self._fitting.clear()

    def blank_batch(self) -> Batch:
        """Returns a batch of zeros like the first: an evaluation graph depends on dtypes and fixed sizes alone.

        Raises:
            RuntimeError: If there has been none, and the model itself does not say what it takes.
        """
        if self._sample is None:
            return Batch(self._source.blank_batch(self.description))
        batch = Batch(
            {
                name: torch.zeros(shape, dtype=dtype, device=self._device)
                for name, (shape, dtype) in self._sample.items()
            }
        )
        batch.layouts = tuple(self._layouts.items())
        return batch

    def fetches(self, names: Sequence[str]) -> Sequence[str]:
        """Returns the outputs that a step returns; all of them where no name is given.

        Raises:
            RuntimeError: If a name is unknown, or there twice.
        """
        known = self._output_names
        if not names:
            return known
        if not set(names) <= set(known) or len(set(names)) < len(names):
            raise RuntimeError(
                f"The specified fetches list contains invalid output names: {list(names)}; each of {list(known)} may "
                "be in it once"
            )
        return names

    def refresh(self, session: StepSession) -> None:
        """Makes a session work on what was changed in the model itself.

        Raises:
            RuntimeError: If that can't be.
        """
        with BORROWED:
            changed = self._source.take_changes()
        if changed:
            session.rebind(changed)

    def plan(
        self, session: StepSession, batch: Batch, training: bool, names: Sequence[str], backward: bool = True
    ) -> Plan:
        """Returns the session's plan for a batch; builds a graph if none accepts the batch's sizes.

        Args:
            session: Has the graphs.
            batch: The batch.
            training: Whether in training mode.
            names: Outputs to return.
            backward: Whether a run in training mode makes gradients.

        Raises:
            RuntimeError: If there are too many graphs already, or the model has become another one.
            ExportError: If the model can't be exported.
            TypeError: If an input was left out that the outputs need.
        """
        self._choose_variant(session, batch, training)
        self.refresh(session)
        plan = session.plan(training, batch, names, backward)
        if plan is None:
            self._add_graph(session, batch, training)
            plan = session.plan(training, batch, names, backward)
            assert plan is not None
        return plan

    def portable(self, session: StepSession, training: bool) -> TrainingGraph:
        """Returns a graph of ONNX's own operators for batches like the first, whatever the session computes with.

        Args:
            session: Has the graphs; one of them, if it is such a graph.
            training: Whether in training mode.

        Raises:
            RuntimeError: If the model has become another one.
            ExportError: If the model can't be exported.
        """
        batch = self.blank_batch()
        self._choose_variant(session, batch, training)
        known = session.plan(training, batch, self._output_names)
        if known is not None and known.runner.graph.is_standard:
            return known.runner.graph
        return self._build(batch, training, portable=True)

    def check_export(self, session: StepSession, batch: Batch) -> None:
        """The option ``debug.check_model_export``.

        Raises:
            RuntimeError: If the exported graph and the model give different outputs.
        """
        plan = self.plan(session, batch, False, self._output_names)
        found = session.evaluate(plan, batch)
        with BORROWED:
            reference = self._builder(batch).reference(batch)
        for output, ours, theirs in zip(self.description.outputs, found, reference, strict=True):
            if not torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-6, equal_nan=True):
                difference = (ours.float() - theirs.float()).abs().max().item()
                raise RuntimeError(
                    f"debug.check_model_export: output {output.name!r} of the exported graph differs from PyTorch's by "
                    f"up to {difference:.3g} (allowed: relative 1e-2, absolute 1e-6)"
                )

    def _set_description(self, description: ModelDescription, parameters: Sequence[str] | None = None) -> None:
        # Which checks it; which arguments of a loss are its parameters is known with the first batch.
        self._source.builder(description, parameters=parameters)
        self._description, self._input_names = description, tuple(description.input_names)
        self._output_names = tuple(description.output_names)
        self._arguments = self._arguments or tuple(dict.fromkeys(map(argument_of, self._input_names)))
        self._fitting.clear()

    def _describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Derives the description from the first batch."""
        given = self._source.name_inputs(*unpack(args, kwargs), self.loss_parameters)
        leaves: dict[str, Any] = {}
        layouts = {argument: flatten(argument, value, leaves) for argument, value in given.items()}
        batch = {name: to_tensor(name, value) for name, value in leaves.items()}
        parameters = Batch()
        self._add_parameters(parameters)
        with BORROWED:
            self._set_description(self._source.describe(batch, layouts, parameters), tuple(parameters))
        # By position they come as they came first, but for labels, which are last.
        in_order = iter(self._arguments)
        self._arguments = tuple(next(in_order) if argument in self._arguments else argument for argument in given)
        _log.info("derived from the first batch: %s", self._description)

    def _choose_variant(self, session: StepSession, batch: Batch, training: bool) -> None:
        with BORROWED:  # by an export in another thread, whose modes are not the user's
            session.choose_variant(training, (self._source.variant(training), batch.layouts, *self._parameters))

    def _builder(self, batch: Batch, portable: bool = False) -> Builder:
        """Returns what builds graphs for arguments like those of a batch, with the loss parameters that there are."""
        description = self.description
        if self._parameters:
            known = description.to_dict()
            inputs = [*known["inputs"], *((name, []) for name in self._parameters)]
            description = ModelDescription({**known, "inputs": inputs}, description.inferred, description.corrected)
        return self._source.builder(description, batch.layouts, tuple(self._parameters), portable)

    def _add_parameters(self, batch: Batch) -> None:
        """Adds the loss parameters to a batch, as tensors that are filled anew where a number has changed."""
        if self._parameters.keys() != self.loss_parameters.keys():
            taken = [name for name in self.loss_parameters if name in self._input_names or not name.isidentifier()]
            if taken:
                raise ValueError(f"loss_parameters {taken} must be names of arguments, and none of the inputs")
            self._parameters = {name: (math.nan, torch.zeros((), device=self._device)) for name in self.loss_parameters}
        for name, value in self.loss_parameters.items():
            known, tensor = self._parameters[name]
            if known != value:
                if isinstance(value, bool) or not isinstance(value, numbers.Real):
                    raise TypeError(f"loss_parameters[{name!r}] must be a number, but {shown(value)} was given")
                self._parameters[name] = (float(value), tensor.fill_(float(value)))
            batch[name] = tensor

    def _check(self, batch: Batch) -> None:
        """Checks a batch of a new kind; a derived description is widened for it."""
        if self.description.inferred or self._lenient:
            self._widen(batch)
        dtypes = None if self._sample is None else {name: dtype for name, (_, dtype) in self._sample.items()}
        try:
            check_batch(self.description, batch, self._device, dtypes)
        except BaseException:
            self._narrow()
            raise

    def _widen(self, batch: Batch) -> None:
        known = self.description
        shapes = {name: tuple(value.shape) for name, value in batch.items()}
        wider = known.widened(shapes, correct=self._lenient and not known.inferred)
        if wider.inputs != known.inputs:
            changed = [entry for entry in wider.inputs if entry not in known.inputs]
            if known.inferred:
                sizes = ", ".join(map(str, changed))
                _log.warning("a batch has other sizes than the ones before, so the model is exported anew: %s", sizes)
            else:
                wrong = [f"{e.name!r} {list(e.shape)}" for e in known.inputs if e not in wider.inputs]
                warn(
                    f"model_desc does not fit the batch, and is corrected: inputs {', '.join(wrong)} have the shapes "
                    f"{', '.join(str(list(shapes[entry.name])) for entry in changed)}"
                )
            self._narrower = known
            self._set_description(wider)

    def _narrow(self) -> None:
        """Puts the description back: the batch was wrong, not the description."""
        narrower, self._narrower = self._narrower, None
        if narrower is not None:
            self._set_description(narrower)

    def _add_graph(self, session: StepSession, batch: Batch, training: bool) -> None:
        sizes = self.description.sizes({name: tuple(value.shape) for name, value in batch.items()})
        graphs = session.graphs(training)
        constants = {key: value for name, layout in batch.layouts for key, value in constants_of(layout, name).items()}
        if graphs and constants:
            _log.info("exported anew, with the constants %s", constants)
        if len(graphs) >= _MAXIMUM_GRAPHS:
            fixed = sorted({symbol for graph in graphs for symbol in graph.fixed})
            raise RuntimeError(
                f"the model fixes dimensions ({fixed}), and has been exported for {len(graphs)} sizes already; {sizes} "
                "would be one more. Pad the inputs to fewer different sizes"
                if fixed
                else f"modes and settings of the model (a dropout's p, a float attribute), or inputs that are no "
                f"tensors (numbers, bools), have changed so often that it has been exported {len(graphs)} times "
                "already. Make what changes all the time a tensor that is an input, or one of trainer.loss_parameters"
            )
        if self._sample is not None:
            # Inputs that were left out are not needed for the outputs asked for, but for an export.
            for entry in self.description.inputs:
                if entry.name not in batch:
                    shape = [sizes.get(size, 2) if isinstance(size, str) else size for size in entry.shape]
                    blank = torch.zeros(shape, dtype=self._sample[entry.name][1])
                    batch = batch.with_tensors({**batch, entry.name: blank})
        graph = self._build(batch, training)
        try:
            session.add_graph(graph)
        except RuntimeError:
            if graph.kept:  # no later process shall find what does not load
                Path(graph.kept).unlink(missing_ok=True)
            raise
        return_freed_memory()
        self._built(session, graph)

    def _build(self, batch: Batch, training: bool, portable: bool = False) -> TrainingGraph:
        try:
            with BORROWED, torch.enable_grad():  # in whatever mode the caller's autograd is
                graph = self._builder(batch, portable).build(_without_inference(batch), training)
        except BaseException:
            self._narrow()
            raise
        self._narrower = None
        return graph


def _without_inference(batch: Batch) -> Batch:
    """Returns a batch of ordinary tensors."""
    return batch.with_tensors({name: value.clone() if value.is_inference() else value for name, value in batch.items()})
