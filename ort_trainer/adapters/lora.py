"""``LoRA``: what low-rank adapters are added to, and of which size."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import check_count, shown, warn
from ..core.unknown import nearest

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
            models give them; ``"linear"`` for all that are not smaller than the rank; another str is a regular
            expression that matches whole paths, as ``r"encoder\\.layer\\.\\d+\\..*"``; a sequence lists paths or their
            last parts, as ``["q_proj", "v_proj"]``.
        exclude: Layers among these that get no adapter, written in the same way.
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
    exclude: str | Sequence[str] = ()

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
        for name in ("targets", "also_train", "exclude"):
            value = getattr(self, name)
            if name != "also_train" and isinstance(value, str):
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

    def chosen(
        self, sizes: Mapping[str, tuple[int, int]], aliases: Mapping[str, Sequence[str]] | None = None, remark: str = ""
    ) -> list[str]:
        """Returns the layers that get an adapter. A warning names those that ``"linear"`` skips as too small.

        Args:
            sizes: The path of each linear layer -> its numbers of input and output features.
            aliases: Other names of layers, see :func:`matching`.
            remark: What the user should know of the model if a target matches nothing.

        Raises:
            ValueError: If a target matches nothing, nothing is left, or the rank is beyond the size of a layer.
        """
        targeted = matching(self.targets, list(sizes), "targets", aliases, remark)
        excluded = matching(self.exclude, list(sizes), "exclude", aliases, remark) if self.exclude else []
        layers = [layer for layer in targeted if layer not in excluded]
        if not layers:
            raise ValueError(f"exclude={shown(self.exclude)} leaves none of the layers {shown(targeted)}")
        small = [layer for layer in layers if min(sizes[layer]) < self.rank]
        if small and (self.targets != "linear" or small == layers):
            inputs, outputs = sizes[small[0]]
            raise ValueError(
                f"rank {self.rank} is beyond the size of {small[0]!r}, a layer from {inputs} to {outputs} features: "
                f"use at most {min(inputs, outputs)}, or leave out what is smaller with exclude={small}"
            )
        if small:
            warn(f"no adapter is added to {small}, which have fewer features than the rank {self.rank}")
        return [layer for layer in layers if layer not in small]


def matching(
    targets: str | Sequence[str],
    layers: Sequence[str],
    argument: str = "targets",
    aliases: Mapping[str, Sequence[str]] | None = None,
    remark: str = "",
) -> list[str]:
    """Returns the layers that some targets name, as in :class:`LoRA`.

    Args:
        targets: What the user has given.
        layers: The paths of all linear layers.
        argument: What the user has given it as.
        aliases: The path of a layer -> other names that a target may have, those of its node and weight.
        remark: What the user should know of the model if a target matches nothing.

    Raises:
        ValueError: If a target matches nothing, or is no regular expression.
    """
    names = {layer: (layer, *(aliases or {}).get(layer, ())) for layer in layers}
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
        chosen = [layer for layer in layers if any(map(pattern.fullmatch, names[layer]))]
        missing = [] if chosen else [targets]
    else:
        chosen = [layer for layer in layers if any(_names(target, names[layer]) for target in targets)]
        missing = [target for target in targets if not any(_names(target, names[layer]) for layer in layers)]
    if missing:
        raise ValueError(
            f"{argument} names {missing}, which match no linear layer. {_nearest(missing, names)}{remark}".rstrip()
        )
    return chosen


def _names(target: str, names: Iterable[str]) -> bool:
    """Returns whether a target is one of a layer's names, or the end of its path."""
    return any(name == target or name.endswith("." + target) for name in names)


def _nearest(targets: Iterable[str], names: Mapping[str, Sequence[str]]) -> str:
    """Returns what the user can write instead: the names that are most like some targets, or all last parts."""
    if not names:
        return "The model has no linear layer (MatMul, Gemm or MatMulNBits with a weight). "
    ends = list(dict.fromkeys(layer.rpartition(".")[2] for layer in names))
    every = [*(name for of_layer in names.values() for name in of_layer), *ends]
    near = dict.fromkeys(n for target in targets for n in nearest(target, every, _NEAREST))
    names_of_layers = f"The nearest are {list(near)}" if near else f"The model has {shown(ends)}"
    return f"{names_of_layers}. Use paths or last parts of them, a regular expression, 'attention' or 'linear'. "
