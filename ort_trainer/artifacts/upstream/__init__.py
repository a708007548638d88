"""Files of onnxruntime-training's own on-device training API: read, written, and trained by it."""

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
