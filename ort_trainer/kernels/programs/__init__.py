"""Graphs whose nodes are programs of PyTorch's operators."""
