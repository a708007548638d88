"""PyTorch operators that need more than PyTorch's own ONNX export: one file per family."""
