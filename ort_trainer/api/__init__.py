"""Trains from the artifacts of an export, with nothing but NumPy, ONNX Runtime and safetensors."""
