"""Finds the graph for a batch, or has one built: the description, the sizes that it leaves open, and the exports."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import shown
from ..graph import TrainingGraph
from ..options import ModelDescription
from ..runtime import StepSession
from ..runtime.memory import return_freed_memory
from ..sources import BORROWED, ModelSource
from .batch import Batch, bind_batch, to_tensor, unpack

__all__ = ["StepGraphs"]

_log = logging.getLogger(__name__)
# Each graph for other sizes costs an export; a model that fixes a dimension must not export without end.
_MAXIMUM_GRAPHS = 16


class StepGraphs:
    """Knows the model description and builds the graphs of a trainer.

    Args:
        source: The model.
        model_desc: The description as the user gave it, or ``"auto"``.
        device: Where training runs.

    Raises:
        TypeError, ValueError: If the description is invalid or does not fit the model.
    """

    def __init__(self, source: ModelSource, model_desc: Mapping[str, Any] | str, device: torch.device) -> None:
        self._source = source
        self._device = device
        self._description: ModelDescription | None = None
        self._narrower: ModelDescription | None = None
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

    def possible_inputs(self) -> set[str]:
        """Returns the names that an input may have: those of the model, and of the description if there is one."""
        described = () if self._description is None else self._description.input_names
        return {*self._source.inputs, *described}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], partly: bool = False) -> Batch:
        """Returns the arguments of a step as a checked batch; of a batch ``partly`` needed, inputs may be left out."""
        if self._description is None or self._description.inferred:
            self._describe(args, kwargs)
        dtypes = None if self._sample is None else {name: dtype for name, (_, dtype) in self._sample.items()}
        optional = self.description.input_names if partly else ()
        try:
            return bind_batch(self.description, args, kwargs, self._device, dtypes, optional)
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

    def blank_batch(self) -> Batch:
        """Returns a batch of zeros like the first: an evaluation graph depends on dtypes and fixed sizes alone.

        Raises:
            RuntimeError: If there has been none, and the model itself does not say what it takes.
        """
        if self._sample is None:
            return self._source.blank_batch(self.description)
        return {
            name: torch.zeros(shape, dtype=dtype, device=self._device) for name, (shape, dtype) in self._sample.items()
        }

    def graph_for(self, session: StepSession, batch: Batch, training: bool) -> TrainingGraph:
        """Returns the session's graph for a batch; builds one if none accepts the batch's sizes.

        Raises:
            RuntimeError: If there are too many graphs already, or the model has become another one.
            ExportError: If the model can't be exported.
        """
        shapes = {name: tuple(value.shape) for name, value in batch.items()}
        with BORROWED:  # by an export in another thread, whose modes are not the user's
            session.choose_variant(training, self._source.variant(training))
        known = session.graph_for(training, shapes)
        if known is not None:
            return known
        sizes = self.description.sizes(shapes)
        graphs = session.graphs(training)
        if len(graphs) >= _MAXIMUM_GRAPHS:
            fixed = sorted({symbol for graph in graphs for symbol in graph.fixed})
            raise RuntimeError(
                f"the model fixes dimensions ({fixed}), and has been exported for {len(graphs)} sizes already; {sizes} "
                "would be one more. Pad the inputs to fewer different sizes"
                if fixed
                else f"modes and settings of the model (a dropout's p, a float attribute) have changed so often that "
                f"it has been exported {len(graphs)} times already. Make what changes all the time an input"
            )
        if self._sample is not None:
            # Inputs that were left out are not needed for the outputs asked for, but for an export.
            for entry in self.description.inputs:
                if entry.name not in batch:
                    shape = [sizes.get(size, 2) if isinstance(size, str) else size for size in entry.shape]
                    batch = {**batch, entry.name: torch.zeros(shape, dtype=self._sample[entry.name][1])}
        graph = self._build(batch, training)
        session.add_graph(graph)
        return_freed_memory()
        return graph

    def check_export(self, session: StepSession, batch: Batch) -> None:
        """The option ``debug.check_model_export``.

        Raises:
            RuntimeError: If the exported graph and the model give different outputs.
        """
        self.graph_for(session, batch, training=False)
        found = session.eval_step(list(batch.values()))
        with BORROWED:
            reference = self._source.builder(self.description).reference(batch)
        for output, ours, theirs in zip(self.description.outputs, found, reference, strict=True):
            if not torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-6, equal_nan=True):
                difference = (ours.float() - theirs.float()).abs().max().item()
                raise RuntimeError(
                    f"debug.check_model_export: output {output.name!r} of the exported graph differs from PyTorch's by "
                    f"up to {difference:.3g} (allowed: relative 1e-2, absolute 1e-6)"
                )

    def _set_description(self, description: ModelDescription) -> None:
        self._source.builder(description)  # which checks it
        self._description = description

    def _describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Derives the description from the first batch, or widens it for a batch with other sizes."""
        given = self._source.name_inputs(*unpack(args, kwargs))
        batch = {name: to_tensor(name, value) for name, value in given.items()}
        if self._description is None:
            with BORROWED:
                self._set_description(self._source.describe(batch))
            _log.info("derived from the first batch: %r", self._description)
            return
        known = self._description
        wider = known.widened({name: tuple(value.shape) for name, value in batch.items()})
        if wider.inputs != known.inputs:
            changed = [entry for entry in wider.inputs if entry not in known.inputs]
            _log.warning("a batch has other sizes than the ones before, so the model is exported anew: %s", changed)
            self._narrower = known
            self._set_description(wider)

    def _build(self, batch: Batch, training: bool) -> TrainingGraph:
        narrower, self._narrower = self._narrower, None
        try:
            with BORROWED, torch.enable_grad():  # in whatever mode the caller's autograd is
                return self._source.builder(self.description).build(_without_inference(batch), training)
        except BaseException:
            if narrower is not None:
                self._set_description(narrower)  # the batch was wrong, not the description
            raise


def _without_inference(batch: Batch) -> Batch:
    """Returns a batch of ordinary tensors."""
    return {name: value.clone() if value.is_inference() else value for name, value in batch.items()}
