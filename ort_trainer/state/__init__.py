"""Checkpoint files: a state dict and the user's own dict in one safetensors file."""

from .file import PathOrFile, load_checkpoint_file, read_parts, read_user_dict, save_checkpoint_file
from .legacy import aggregate_legacy_files

__all__ = [
    "PathOrFile",
    "aggregate_legacy_files",
    "load_checkpoint_file",
    "read_parts",
    "read_user_dict",
    "save_checkpoint_file",
]
