"""ONNX's operators by PyTorch's, one file for each family; ``registry.py`` finds them."""
