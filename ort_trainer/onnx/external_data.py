"""Refuses untrusted ONNX models that ask for files outside their folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
from google.protobuf.message import Message

from ..core.errors import ExportError, shown


def check_external_data(model: onnx.ModelProto, folder: Path | None, what: str) -> None:
    """Checks that a model's tensors are in the model itself or in files of its folder.

    Args:
        model: The model.
        folder: The folder of its file; None if it came without a file.
        what: Name of the model in error messages.

    Raises:
        ExportError: If a tensor is in a file elsewhere, by an absolute path, ``..`` or a symbolic link.
    """
    tensors = [(tensor, in_attribute) for tensor, in_attribute in _tensors(model) if _is_external(tensor)]
    for tensor, in_attribute in tensors:
        if in_attribute:
            raise ExportError(
                f"{what} keeps the data of {tensor.name!r}, a constant of a node, in an external file. Only "
                "initializers may be external: save the model with convert_attribute=False"
            )
    for tensor, _ in tensors:
        if folder is None:
            raise ExportError(
                f"initializer {tensor.name!r} is in an external file, but only the model itself was given: pass the "
                "path, or load the model with its external data"
            )
        locations = [entry.value for entry in tensor.external_data if entry.key == "location"]
        if len(locations) != 1:
            raise ExportError(f"{what} is damaged: the external data of {tensor.name!r} has {len(locations)} locations")
        problem = _problem(locations[0], folder)
        if problem:
            raise ExportError(
                f"{what} keeps the data of {tensor.name!r} in {shown(locations[0])}, which {problem}. For safety it is "
                "not read: copy the file into the model's folder, and make the model refer to it there"
            )


def _is_external(tensor: onnx.TensorProto) -> bool:
    """Returns whether a tensor is external: some readers check only ``data_location``, others only the entries."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL or bool(tensor.external_data)


def _problem(location: str, folder: Path) -> str:
    """Returns why a file must not be read; empty if reading it is safe."""
    if not location or "\0" in location:
        return "is not a file name"
    # Refuses what would leave the folder on any platform, because the model may be read on another one later.
    for path in (PurePosixPath(location), PureWindowsPath(location)):
        if path.is_absolute() or path.anchor:
            return "is an absolute path"
        if ".." in path.parts:
            return "leaves the model's folder through '..'"
    path_in_folder = folder / location
    try:
        if not path_in_folder.resolve().is_relative_to(folder.resolve()):
            return "leaves the model's folder through a symbolic link"
        if path_in_folder.exists() and not path_in_folder.is_file():
            return "is not a regular file"
    except (OSError, RuntimeError) as error:  # the name is too long, or links form a loop
        return f"can't be resolved ({error})"
    return ""


def _tensors(message: Message, in_attribute: bool = False) -> Iterator[tuple[onnx.TensorProto, bool]]:
    """Yields all tensors of a message, each with whether an attribute has it; the others are initializers."""
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.name == "ValueInfoProto":
            continue
        for part in [value] if isinstance(value, Message) else value:
            if isinstance(part, onnx.TensorProto):
                yield part, in_attribute
            elif isinstance(part, onnx.AttributeProto):
                yield from _tensors(part, True)
            else:
                yield from _tensors(part, in_attribute and not isinstance(part, onnx.GraphProto))
