"""Writes artifacts that onnxruntime-training's own runtime trains."""
