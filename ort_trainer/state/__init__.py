"""State: what training keeps, as one class, and its file formats, each a module that reads and writes it."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
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

# Lazy, because the training API must not require torch.
__getattr__, __dir__ = lazily(
    __name__, {name: "legacy" if name == "aggregate_legacy_files" else "file" for name in __all__}
)
