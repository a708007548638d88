"""An ONNX model as a source of training graphs, by way of a PyTorch module."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch

from ....optim import OptimizerConfig
from ....options import ModelDescription, ORTTrainerOptions
from ...model_source import Builder, Layouts, Named
from ...nested import Layout
from ...torch import GraphBuilder, LossFunction, takes_label
from ...torch.borrow import BORROWED
from ...torch.model import TorchSource
from ..describe import check_description, describe_onnx
from ..load import OnnxModel, load_onnx_model
from ..nodes import dtype_of
from .module import OnnxModule

__all__ = ["ImportedSource"]


class ImportedSource(TorchSource):
    """An ONNX model as it was loaded, whose module nobody else can change."""

    _model: OnnxModule

    def __init__(
        self,
        model: OnnxModel | onnx.ModelProto | str | os.PathLike[str],
        loss_fn: LossFunction | None,
        optim_config: OptimizerConfig,
        options: ORTTrainerOptions,
    ) -> None:
        if loss_fn is not None and not takes_label(loss_fn):
            raise ValueError(
                "loss_fn takes no label, which only works for PyTorch models: make the loss an output of the ONNX model"
            )
        self._loaded = model if isinstance(model, OnnxModel) else load_onnx_model(model, as_it_is=True)
        super().__init__(OnnxModule(self._loaded), loss_fn, optim_config, options)
        self.name, self.fixed, self.inputs = "the ONNX model", True, self._loaded.inputs
        types = {str(value.name): dtype_of(value) for value in self._loaded.model.graph.inputs}
        self._dtypes = {name: ir.tensor_adapters.to_torch_dtype(types[name]) for name in self.inputs}

    def name_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], parameters: Collection[str]
    ) -> dict[str, Any]:
        """Returns the arguments of a step by name."""
        names = [*self.inputs, *([] if self._loss_fn is None else ["label"])]
        if len(args) > len(names):
            raise TypeError(f"{len(args)} inputs were given, but the ONNX model takes {names}")
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def describe(
        self, batch: Named, layouts: Mapping[str, Layout], parameters: Mapping[str, torch.Tensor]
    ) -> ModelDescription:
        """Returns a description derived from the model, and for the label from a sample batch."""
        _refuse_for_arguments([entry for entry in layouts.items() if entry[1][0] != "tensor"], list(parameters))
        with BORROWED:
            return describe_onnx(self._loaded, self._loss_fn, batch)

    def blank_batch(self, description: ModelDescription) -> dict[str, torch.Tensor]:
        """Returns a batch of zeros; see the base class."""
        if self._loss_fn is not None:  # its label can be anything
            return super().blank_batch(description)
        sizes = {e.name: [size if isinstance(size, int) else 2 for size in e.shape] for e in description.inputs}
        return {name: torch.zeros(shape, dtype=self._dtypes[name]) for name, shape in sizes.items()}

    def builder(
        self,
        description: ModelDescription,
        layouts: Layouts = (),
        parameters: Sequence[str] | None = None,
        portable: bool = False,
    ) -> Builder:
        """Returns a builder of graphs; see the base class."""
        _refuse_for_arguments(layouts, parameters)
        check_description(self._loaded, description, self._loss_fn)
        names = description.output_names if self._loss_fn is None else description.output_names[1:]
        self._model.wanted = tuple(names) or self._loaded.outputs[:1]
        built = super().builder(description, layouts, parameters, portable)
        assert isinstance(built, GraphBuilder)
        step = dataclasses.replace(built.step, loss_of_first=True)
        return _ImportedBuilder(dataclasses.replace(built, step=step), self._dtypes)


@dataclasses.dataclass(frozen=True)
class _ImportedBuilder:
    """Checks the dtypes of a batch, which the nodes of an ONNX model do not convert.

    Attributes:
        builder: The builder for the model's module.
        dtypes: The dtypes of the model's inputs by name.
    """

    builder: GraphBuilder
    dtypes: Mapping[str, torch.dtype]

    def build(self, batch: Named, training: bool) -> Any:
        """Returns the training or evaluation graph for a sample batch.

        Raises:
            TypeError: If an input has another dtype than the model takes.
            ExportError: If the model can't be exported.
        """
        for name, value in batch.items():
            wanted = self.dtypes.get(name, value.dtype)
            if value.dtype != wanted:
                raise TypeError(
                    f"input {name!r} has dtype {value.dtype}, but the ONNX model takes {wanted}: use .to({wanted})"
                )
        return self.builder.build(batch, training)

    def reference(self, batch: Named) -> Sequence[torch.Tensor]:
        """Returns the outputs of the model's module in evaluation mode."""
        return self.builder.reference(batch)


def _refuse_for_arguments(layouts: Layouts, parameters: Sequence[str] | None) -> None:
    if layouts:
        names = [name for name, _ in layouts]
        raise TypeError(f"an ONNX model takes only tensors, but the inputs {names} are not tensors")
    if parameters:
        raise ValueError(
            f"loss_parameters {list(parameters)} are for loss functions of PyTorch models only: make them inputs of "
            "the ONNX model"
        )
