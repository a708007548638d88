"""Reads a graph of torch.fx: source lines of its nodes, symbolic sizes, properties of values, changes in place."""
