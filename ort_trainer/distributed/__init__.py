"""Training in several processes on ``torch.distributed``: implements the strategies of ``train/strategy.py``."""

from .launch import launch

__all__ = ["launch"]
