"""A graph as ONNX nodes, which ONNX Runtime's kernels compute."""
