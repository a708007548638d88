"""The passes that turn an ONNX model into a training graph: one per file, chained in ``build.py``."""
