"""Reads ONNX models as PyTorch modules, from which training graphs are exported as from any other."""
