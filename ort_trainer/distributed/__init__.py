"""Training in several processes, on ``torch.distributed``: what is behind the seam of ``training/strategy.py``."""

from .launch import choose_strategy, find_place

__all__ = ["choose_strategy", "find_place"]
