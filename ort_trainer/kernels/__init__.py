"""What engines run: programs of PyTorch's operators, compiled loops, ONNX nodes."""
