"""Reads and writes the files of onnxruntime-training's on-device training API."""

from .checkpoint import OptimizerGroup, UpstreamCheckpoint, UpstreamParameter, read_upstream_checkpoint
from .write_checkpoint import upstream_checkpoint_bytes, write_upstream_checkpoint

__all__ = [
    "OptimizerGroup",
    "UpstreamCheckpoint",
    "UpstreamParameter",
    "read_upstream_checkpoint",
    "upstream_checkpoint_bytes",
    "write_upstream_checkpoint",
]
