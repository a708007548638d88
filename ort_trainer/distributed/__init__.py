"""Training in several processes, on ``torch.distributed``: what is behind the seam of ``training/strategy.py``."""

from .launch import choose_strategy

__all__ = ["choose_strategy"]
