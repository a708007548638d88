"""Adapters: a few new weights beside a base that stays as it is, for PyTorch and ONNX models."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .lora import LoRA
    from .models import add_adapter, merge_adapter
    from .onnx_adapter import export_adapter
    from .peft_files import load_adapter, save_adapter
    from .several import Adapters

__all__ = ["Adapters", "LoRA", "add_adapter", "export_adapter", "load_adapter", "merge_adapter", "save_adapter"]

_PLACES = {
    "Adapters": "several",
    "LoRA": "lora",
    "add_adapter": "models",
    "export_adapter": "onnx_adapter",
    "load_adapter": "peft_files",
    "merge_adapter": "models",
    "save_adapter": "peft_files",
}
__getattr__, __dir__ = lazily(__name__, _PLACES)
