"""Recognizes checkpoint files of other programs, so that an error can say what a file is and what to do with it."""

from __future__ import annotations

from .errors import CheckpointError

__all__ = ["UPSTREAM_MARK", "is_hdf5", "is_upstream_checkpoint", "refuse_upstream_checkpoint"]

UPSTREAM_MARK = b"ODTC"
"""What such a file has at its fifth byte."""
_HDF5 = b"\x89HDF\r\n\x1a\n"


def is_hdf5(head: bytes) -> bool:
    """Returns whether a file that begins with these bytes, at least 8, is HDF5, as checkpoints of legacy are."""
    return head.startswith(_HDF5)


def is_upstream_checkpoint(head: bytes) -> bool:
    """Returns whether a file that begins with these bytes, at least 8, is of onnxruntime-training's training API."""
    return head[4:8] == UPSTREAM_MARK


def refuse_upstream_checkpoint(head: bytes, name: str, way: str) -> None:
    """Raises the error for a checkpoint of onnxruntime-training's training API, where another one is expected.

    Args:
        head: The first bytes of a file, at least 8.
        name: What messages call it.
        way: How it can be used all the same.

    Raises:
        CheckpointError: If it is one.
    """
    if is_upstream_checkpoint(head):
        raise CheckpointError(f"{name} is a checkpoint of onnxruntime-training's training API (flatbuffers): {way}")
