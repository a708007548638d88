"""The option ``_internal_use.onnx_opset_version``: files in an older operator set than that of the graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..options import ORTTrainerOptions
from ..options.trainer_options import MINIMUM_OPSET

if TYPE_CHECKING:
    import onnx_ir as ir


def in_requested_opset(model: ir.Model, options: ORTTrainerOptions) -> ir.Model:
    """Returns a model in the operator set that the options name, if that is older than the model's.

    Raises:
        ValueError: If the model has operators that are newer, unless the options tolerate it.
    """
    from ..step.opset import older  # a slow import, which few files need

    name = "_internal_use.onnx_opset_version"
    if not options.is_given(name):
        return model
    try:
        return older(model, options._internal_use.onnx_opset_version)
    except ValueError as error:
        options.refuse(
            f"{name} {options._internal_use.onnx_opset_version}: {error}. Files have operator set {MINIMUM_OPSET} "
            "without the option; save a checkpoint, and load it into a trainer without it"
        )
        return model
