"""Checks before each step that the graph still computes what the model computes."""
