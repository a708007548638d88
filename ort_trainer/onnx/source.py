"""An ONNX model as a source of training graphs: it becomes a module, which is exported as any other."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir
import torch

from ..capture.nested import Layout
from ..capture.step_module import LossFunction
from ..core.errors import ExportError
from ..engine import Request
from ..export.builder import GraphBuilder
from ..export.model import Layouts, ModelSource
from ..guard.memory import Named
from ..optim import OptimizerConfig
from ..options import ModelDescription, ORTTrainerOptions
from ..step import Step
from .describe import check_inputs, describe_onnx, input_dtypes
from .load import OnnxModel, load_onnx_model
from .module import OnnxModule
from .write import with_weights


def is_onnx_model(model: object) -> bool:
    """Returns whether a value is an ONNX model, or a possible path of one."""
    return isinstance(model, (OnnxModel, onnx.ModelProto, str, os.PathLike))


class OnnxSource(ModelSource):
    """An ONNX model. Its module is private, so nothing else can change it between steps."""

    _model: OnnxModule
    fixed = True

    def __init__(
        self,
        model: OnnxModel | onnx.ModelProto | str | os.PathLike[str],
        loss_fn: LossFunction | None,
        optim_config: OptimizerConfig,
        options: ORTTrainerOptions,
    ) -> None:
        self._loaded = model if isinstance(model, OnnxModel) else load_onnx_model(model)
        module = OnnxModule(self._loaded, copy=self._loaded is model)
        super().__init__(module, loss_fn, optim_config, options, name="the ONNX model")
        self.inputs = [*module.inputs, *module.optional]

    def describe(
        self, batch: Named, layouts: Mapping[str, Layout], parameters: Mapping[str, torch.Tensor]
    ) -> ModelDescription:
        """Returns a description derived from the model, with the labels of a sample batch."""
        self._refuse_layouts([entry for entry in layouts.items() if entry[1][0] != "tensor"])
        return describe_onnx(self._loaded, self._loss_fn, batch, outputs=self._model.outputs)

    def blank_batch(self, description: ModelDescription) -> dict[str, torch.Tensor]:
        """Returns a batch of zeros; see the base class."""
        if self._loss_fn is not None:  # the model does not determine the dtype of its label
            return super().blank_batch(description)
        dtypes = input_dtypes(self._loaded)
        sizes = {e.name: [size if isinstance(size, int) else 2 for size in e.shape] for e in description.inputs}
        return {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in sizes.items()}

    def builder(
        self,
        description: ModelDescription,
        layouts: Layouts = (),
        parameters: Sequence[str] | None = None,
        portable: bool = False,
    ) -> GraphBuilder:
        """Returns a builder of graphs; see the base class."""
        self._refuse_layouts(layouts)
        check_inputs(self._loaded, description.input_names)
        names = description.output_names if self._loss_fn is None else description.output_names[1:]
        for name in names:
            if name in self._model.refused:
                raise ExportError(f"the output {name!r} in model_desc can't be computed: {self._model.refused[name]}")
        unknown = [name for name in names if name not in self._model.outputs]
        if unknown:
            raise ValueError(f"unknown outputs {unknown} in model_desc: the ONNX model has {list(self._model.outputs)}")
        self._model.wanted = tuple(names) or self._model.outputs[:1]
        built = super().builder(description, layouts, parameters, portable)
        step = dataclasses.replace(built.step, loss_of_first=True)
        return _Builder(**{**vars(built), "step": step}, dtypes=input_dtypes(self._loaded))

    def large_constants(self) -> Named:
        """Returns the constants of the file with at least two dimensions; see the base class."""
        return self._model.large_constants

    def own_model(self, tensors: Named, outputs: Sequence[str] | None) -> ir.Model:
        """Returns the model of the file, node for node, with other weights; see the base class."""
        in_file = self._model.names
        values = {in_file[name]: tensor for name, tensor in tensors.items()}
        return with_weights(self._loaded, values, [in_file[name] for name in self.trainable], outputs)

    def _refuse_layouts(self, layouts: Layouts) -> None:
        names = [name for name, _ in layouts if name in self.inputs]
        if names:
            raise TypeError(f"an ONNX model takes only tensors, but the inputs {names} are not tensors")


@dataclasses.dataclass(frozen=True)
class _Builder(GraphBuilder):
    """Checks the dtypes of a batch before it builds graphs: nodes of ONNX do not convert between dtypes.

    Attributes:
        dtypes: The dtypes of the model's inputs by name.
    """

    dtypes: Mapping[str, torch.dtype] = dataclasses.field(default_factory=dict)

    def build(self, request: Request) -> Step:
        """Returns the training or evaluation graph for a sample batch; see the base class.

        Raises:
            TypeError: If an input has another dtype than the model takes.
            ExportError: If the model can't be exported.
        """
        for name, value in request.batch.items():
            dtype = self.dtypes.get(name, value.dtype)
            if value.dtype != dtype:
                raise TypeError(
                    f"input {name!r} has dtype {value.dtype}, but the ONNX model takes {dtype}: use .to({dtype})"
                )
        return super().build(request)
