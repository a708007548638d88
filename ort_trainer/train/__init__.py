"""The training loop, its counters and its state."""
