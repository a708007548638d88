"""``LoRA``: what low-rank adapters are added to, and of which size."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.errors import check_count, shown

__all__ = ["LoRA", "matching"]

# The last parts of the paths of layers that make queries, keys and values, in the model families of transformers.
_ATTENTION = {
    *("q_proj", "k_proj", "v_proj", "query_proj", "key_proj", "value_proj", "qkv_proj", "in_proj"),
    *("query", "key", "value", "q", "k", "v", "q_lin", "k_lin", "v_lin", "to_q", "to_k", "to_v"),
    *("c_attn", "q_attn", "qkv", "Wqkv", "query_key_value"),
}
_NEAREST = 5


@dataclass(frozen=True)
class LoRA:
    """A low-rank adapter: a linear layer ``x W`` becomes ``x W + alpha / rank * dropout(x) A^T B^T``.

    W does not change; A, of shape (rank, in), and B, of shape (out, rank), are trained. B begins with zeros, so the
    adapted model begins as the base (Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models").

    Args:
        rank: The rank of the product, at most the smaller side of each weight.
        alpha: The numerator of the scale.
        dropout: The probability of dropping an element of x before A, in training.
        targets: The layers: ``"attention"`` for those that make queries, keys and values, by the names that common
            models give them; ``"linear"`` for all; another str is a regular expression that matches whole paths, as
            ``r"encoder\\.layer\\.\\d+\\..*"``; a sequence lists paths or their last parts, as ``["q_proj", "v_proj"]``.
        also_train: Names of weights of the base to train as well and to store with the adapter, such as those of a
            new classifier.

    Raises:
        TypeError, ValueError: If a value has the wrong type or is out of range.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: str | Sequence[str] = "attention"
    also_train: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        for name in ("rank", "alpha", "dropout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, but {shown(value)} was given")
            if not abs(value) <= sys.float_info.max:
                raise ValueError(f"{name} must be finite, but {shown(value)} was given")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and less than 1, but {self.dropout} was given")
        for name in ("targets", "also_train"):
            value = getattr(self, name)
            if name == "targets" and isinstance(value, str):
                continue
            names = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (None,)
            if not all(isinstance(entry, str) for entry in names):
                raise TypeError(f"{name} must be a list of names, but {shown(value)} was given")
            object.__setattr__(self, name, names)
        if not self.targets:
            raise ValueError("targets must not be empty: name layers, or use 'attention' or 'linear'")

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return self.alpha / self.rank

    def chosen(self, layers: Sequence[str]) -> list[str]:
        """Returns the layers among some that get an adapter; see :func:`matching`."""
        return matching(self.targets, layers)


def matching(targets: str | Sequence[str], layers: Sequence[str], argument: str = "targets") -> list[str]:
    """Returns the layers that some targets name, as in :class:`LoRA`.

    Args:
        targets: What the user has given.
        layers: The paths of all linear layers.
        argument: What the user has given it as.

    Raises:
        ValueError: If a target matches nothing, or is no regular expression.
    """
    if targets == "linear":
        chosen, missing = list(layers), [] if layers else ["linear"]
    elif targets == "attention":
        chosen = [layer for layer in layers if layer.rpartition(".")[2] in _ATTENTION]
        missing = [] if chosen else ["attention"]
    elif isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise ValueError(f"{argument} {targets!r} is no regular expression: {error}") from None
        chosen = [layer for layer in layers if pattern.fullmatch(layer)]
        missing = [] if chosen else [targets]
    else:
        chosen = [layer for layer in layers if any(_names(target, layer) for target in targets)]
        missing = [target for target in targets if not any(_names(target, layer) for layer in layers)]
    if missing:
        raise ValueError(
            f"{argument} names {missing}, which match no linear layer. {_nearest(missing, layers)}Use paths or last "
            "parts of them, a regular expression, 'attention' or 'linear'"
        )
    return chosen


def _names(target: str, layer: str) -> bool:
    """Returns whether a target names a layer: it is its path, or the end of it."""
    return layer == target or layer.endswith("." + target)


def _nearest(targets: Iterable[str], layers: Sequence[str]) -> str:
    """Returns a sentence with the names that are most like some targets; of the last parts, if there are many."""
    if not layers:
        return "The model has no linear layer (MatMul, Gemm or MatMulNBits with a weight). "
    names = [*layers, *dict.fromkeys(layer.rpartition(".")[2] for layer in layers)]
    near = dict.fromkeys(n for target in targets for n in difflib.get_close_matches(target, names, _NEAREST))
    return f"The nearest are {list(near)}. " if near else f"The model has {shown(list(layers))}. "
