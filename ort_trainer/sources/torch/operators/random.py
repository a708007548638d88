"""Operators that draw random numbers stay whole: ``random_inputs`` makes inputs of the graph of them."""

from __future__ import annotations

import torch

from ..random_inputs import RANDOM_OPERATORS
from .registry import keep

keep(*RANDOM_OPERATORS, torch.ops.aten.native_dropout_backward.default)
