"""Recognizes checkpoint files of other programs, so that errors can name the format and the way out."""

from __future__ import annotations

from .errors import CheckpointError

UPSTREAM = "onnxruntime-training"
"""The name of the export in the state of all upstream artifacts, which do not identify their export."""
UPSTREAM_MARK = b"ODTC"
"""Bytes 4 to 7 of such a file."""
_HDF5 = b"\x89HDF\r\n\x1a\n"


def is_hdf5(head: bytes) -> bool:
    """Returns whether a file with these first bytes (at least 8) is HDF5, the format of legacy checkpoints."""
    return head.startswith(_HDF5)


def is_upstream_checkpoint(head: bytes) -> bool:
    """Returns whether a file with these first bytes (at least 8) comes from onnxruntime-training's training API."""
    return head[4:8] == UPSTREAM_MARK


def refuse_upstream_checkpoint(head: bytes, name: str, way: str) -> None:
    """Refuses a checkpoint of onnxruntime-training's training API where another kind is expected.

    Args:
        head: The first bytes of a file, at least 8.
        name: The file's name for messages.
        way: What to do with such a checkpoint instead.

    Raises:
        CheckpointError: If the file is such a checkpoint.
    """
    if is_upstream_checkpoint(head):
        raise CheckpointError(f"{name} is a checkpoint of onnxruntime-training's training API (flatbuffers): {way}")
