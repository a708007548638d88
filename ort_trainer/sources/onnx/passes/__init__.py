"""What an ONNX model goes through on its way to a training graph: one pass a file, chained in ``build.py``."""
