"""Graphs whose nodes are programs of PyTorch operators, for an engine that can call PyTorch."""
