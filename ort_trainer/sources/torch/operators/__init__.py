"""Operators of PyTorch that need more than PyTorch's own way to ONNX."""
