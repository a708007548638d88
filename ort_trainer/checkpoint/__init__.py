"""Checkpoint files: a state dict and the user's own dict in one safetensors file."""

from .file import PathOrFile, load_checkpoint_file, save_checkpoint_file

__all__ = ["PathOrFile", "load_checkpoint_file", "save_checkpoint_file"]
