"""Adapters: a few new weights beside a base that stays as it is, for PyTorch and ONNX models."""

from .lora import LoRA
from .models import add_adapter, merge_adapter
from .onnx_adapter import export_adapter
from .peft_files import load_adapter, save_adapter

__all__ = ["LoRA", "add_adapter", "export_adapter", "load_adapter", "merge_adapter", "save_adapter"]
