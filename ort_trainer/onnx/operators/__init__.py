"""ONNX's operators by PyTorch's, one file for each family; ``node_table.py`` finds them."""
