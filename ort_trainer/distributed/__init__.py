"""Training in several processes on ``torch.distributed``: implements the strategies of ``train/strategy.py``."""

from .launch import choose_strategy, find_place

__all__ = ["choose_strategy", "find_place"]
