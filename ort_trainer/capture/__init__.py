"""The forward pass as PyTorch's operators: what is exported, its capture, and its key in the cache."""
