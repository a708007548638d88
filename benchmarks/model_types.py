"""How is a type of model made small and called? By the names of its settings and arguments, without a list of types."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.fuzz.train import tensors_in

__all__ = ["SIZES", "Drawn", "drawn", "loss_outside", "types", "without_dropout"]

Arguments = Callable[[int, int, torch.Generator], dict[str, torch.Tensor]]

SIZES = ((3, 9), (3, 9), (2, 7), (3, 9), (3, 9))
"""Batch size and length of each step."""
PARAMETERS = 20_000_000
"""Larger models are not drawn."""
_TOKENS, _SPECIAL, _IMAGE, _WIDTH = 88, 90, 64, 32

# Names of settings -> what numbers become, in the order in which they are tried. Lists are shrunk element by element.
_RULES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"vocab_size|num_embeddings$", lambda v: min(v, 101)),
    (r"(token|_id|_index|idx)(_id|_index)?$", lambda v: _SPECIAL + v % 11 if v >= _SPECIAL else v),
    (r"rotary_dim", lambda v: 8),
    (r"head_dim|d_kv|dim_head|head_size", lambda v: 16),
    (r"(kv|key_value|key|value)_heads", lambda v: min(v, 2)),
    (r"heads?(_per_stage)?$", lambda v: min(v, 2)),
    (r"per_tok|top_?k$|mask_(time|feature)_length", lambda v: min(v, 2)),
    (r"group$|n_groups?$", lambda v: 1),
    (r"experts$", lambda v: min(v, 4)),
    (r"(layers?|depths?|blocks(_per_stage)?)$", lambda v: min(v, 2)),
    (r"ind(ic|ex)es$", lambda v: min(v, 1)),
    (r"image_size|img_size|input_size", lambda v: _IMAGE if v > 100 else v),
    (r"patch_size", lambda v: 16 if v > 8 else v),
    (r"window|local_attention|text_length", lambda v: min(v, 4)),
    (r"position|context_length", lambda v: min(v, 64)),
    (r"mel_bins", lambda v: 16),
)
_WIDTHS = r"size|dim|hidden|channels|width|features|d_model|d_ff|inner|n_embd|units|rank|filters"
_NO_WIDTHS = r"kernel|chunk|block|ratio|layer_id|batch|num_feat"


def shrunk(name: str, value: Any, widths: bool) -> Any:
    """Returns a setting as a small model has it.

    Args:
        name: Its name.
        value: Its default.
        widths: Whether to shrink widths and numbers of heads, too, which must fit each other.
    """
    if isinstance(value, (list, tuple)):
        return [shrunk(name, entry, widths) for entry in (value[:2] if name.endswith("_types") else value)]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, rule in _RULES:
        if re.search(pattern, name):
            return rule(value) if widths or "head" not in pattern else value
    if widths and value >= 48 and re.search(_WIDTHS, name) and not re.search(_NO_WIDTHS, name):
        return _WIDTH * (2 if re.search(r"intermediate|ff|mlp|inner", name) else 1)
    return value


def loss_outside(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Returns a loss of any outputs, whose gradient is not zero behind a norm."""
    values = [value for value in tensors_in(outputs) if value.is_floating_point()]
    return sum((value.float() - target).tanh().mean() for value in values)  # type: ignore[return-value]


def without_dropout(model: nn.Module) -> int:
    """Sets every kind of dropout to 0, and returns how many there were."""
    changed = 0
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in vars(holder).items() if holder is not None else ():
                is_rate = "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
                if is_rate and isinstance(value, float) and value:
                    setattr(holder, name, 0.0)
                    changed += 1
    return changed


@dataclass(frozen=True)
class Drawn:
    """A way to make and call a type.

    Attributes:
        make: Makes the model.
        arguments: Makes the arguments by name from a batch size, a length and a generator.
        has_loss: Whether the model returns its loss.
    """

    make: Callable[[], nn.Module]
    arguments: Arguments
    has_loss: bool = False

    def trains(self, model: nn.Module) -> bool:
        """Runs a step in PyTorch, and returns whether its gradients are finite and not all zero."""
        outputs = model.train()(**self.arguments(*SIZES[0], torch.Generator().manual_seed(1)))
        loss = outputs["loss"] if self.has_loss else loss_outside(outputs, torch.tensor(0.5))
        model.zero_grad()
        loss.sum().backward()
        norms = [parameter.grad.norm().item() for parameter in model.parameters() if parameter.grad is not None]
        return math.isfinite(sum(norms)) and max(norms, default=0.0) > 0


@functools.cache
def drawn(name: str) -> Drawn:
    """Returns the first way to make and call a type in which PyTorch trains it.

    Args:
        name: Its library and its name there, such as ``torch:Linear``.

    Raises:
        TypeError: If there is none.
    """
    library, _, kind = name.partition(":")
    reasons, models = ["there is no way to call it"], dict[Any, nn.Module]()
    for way in _WAYS[library](kind):
        try:
            if way.make not in models:
                with torch.device("meta"):
                    count = sum(parameter.numel() for parameter in way.make().parameters())
                if count > PARAMETERS:
                    raise MemoryError(f"{count / 1e6:.0f} million parameters")
                models[way.make] = way.make()
            if way.trains(models[way.make]):
                return way
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}".strip()[:150])
    raise TypeError(f"PyTorch can't train it: {reasons[:2][-1]}")


@functools.cache
def types() -> dict[str, list[str]]:
    """Returns the names of all types of each library that is installed."""
    names = {"torch": _layers(nn)}
    try:
        import transformers
        from transformers.models.auto import modeling_auto
    except ImportError:
        pass
    else:
        mappings = [value for name, value in vars(modeling_auto).items() if re.fullmatch(r"MODEL_.*MAPPING", name)]
        entries = itertools.chain(*(mapping._model_mapping.values() for mapping in mappings))
        flat = itertools.chain(*((entry,) if isinstance(entry, str) else entry for entry in entries))
        names["transformers"] = sorted(name for name in set(flat) if hasattr(transformers, name))
    try:
        import torch_geometric.nn as geometric

        names["geometric"] = _layers(geometric)
    except ImportError:
        pass
    try:
        import timm

        names["timm"] = timm.list_models()
    except ImportError:
        pass
    return names


# ---- Layers --------------------------------------------------------------------------------------------------------

# Names of a layer's required settings -> values.
_SETTINGS: tuple[tuple[str, Callable[[], Any]], ...] = (
    (r"kernel_size", lambda: 3),
    (r"heads?$|factor|groups|num_layers|stride|^K$|segments|num_relations|norm_type", lambda: 2),
    (r"num_embeddings", lambda: 101),
    (r"padding$", lambda: 1),
    (r"output_size", lambda: 4),
    (r"encoder_layer", lambda: nn.TransformerEncoderLayer(8, 2, 16)),
    (r"decoder_layer", lambda: nn.TransformerDecoderLayer(8, 2, 16)),
    (r"cutoffs", lambda: [4]),
    (r"threshold|value|lower|upper|^p$|alpha|temperature", lambda: 0.1),
    (r"^(nn|mlp|.*_nn|net)$", lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))),
    (r"^dim$|pos_dim", lambda: 3),
    (r"channels|features|size|dim|d_model|shape|n_classes", lambda: 8),
)


class Layer(nn.Module):
    """A layer behind a linear one, so that something is trained."""

    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        required = {
            name: next((value() for pattern, value in _SETTINGS if re.search(pattern, name)), None)
            for name, setting in inspect.signature(cls).parameters.items()
            if setting.default is setting.empty and setting.kind is setting.POSITIONAL_OR_KEYWORD
        }
        self.first, self.layer = nn.Linear(8, 8), cls(**required)

    def forward(self, x: torch.Tensor, a: Any = None, b: Any = None, c: Any = None, d: Any = None) -> Any:
        """Returns what the layer returns."""
        rest = [value for value in (a, b, c, d) if value is not None]
        return self.layer(self.first(x) if x.is_floating_point() else x, *rest)


def _layers(library: Any) -> list[str]:
    return [name for name, cls in vars(library).items() if isinstance(cls, type) and issubclass(cls, nn.Module)]


def _required(cls: type[nn.Module]) -> list[str]:
    parameters = inspect.signature(cls.forward).parameters.items()
    return [name for name, parameter in parameters if parameter.default is parameter.empty][1:]


def _of_torch(name: str) -> Iterator[Drawn]:
    cls = getattr(nn, name)
    make, count = functools.partial(Layer, cls), len(_required(cls))
    shapes, others = ((8,), (9, 8), (8, 9, 8), (8, 4, 4, 8)), (torch.float32, torch.int64)
    for settings in itertools.product(shapes, others, (False, True)):
        yield Drawn(make, functools.partial(_of_a_layer, count, *settings))
    yield Drawn(make, lambda size, length, draw: {"x": torch.randint(8, (size, length), generator=draw)})


def _of_a_layer(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, short: bool, size: int, length: int, draw: torch.Generator
) -> dict[str, torch.Tensor]:
    values = {"x": torch.randn(size, *shape, generator=draw)}
    for other in "abcd"[: count - 1]:
        value = torch.rand((size,) if short else (size, *shape), generator=draw)
        values[other] = value if dtype == torch.float32 else (8 * value).to(dtype)
    return values


def _of_geometric(name: str) -> Iterator[Drawn]:
    import torch_geometric.nn as geometric

    cls = getattr(geometric, name)
    yield Drawn(functools.partial(Layer, cls), functools.partial(_of_a_graph, _required(cls)))


def _of_a_graph(names: list[str], size: int, length: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    nodes, edges = 4 * size, 3 * length
    values = {
        "edge_index": torch.randint(nodes, (2, edges), generator=draw),
        "edge_attr": torch.randn(edges, 8, generator=draw),
        "edge_weight": torch.rand(edges, generator=draw),
        "edge_type": torch.randint(2, (edges,), generator=draw),
        "batch": torch.arange(nodes) // 4,
        "pos": torch.randn(nodes, 3, generator=draw),
        "pseudo": torch.rand(edges, 3, generator=draw),
        "z": torch.randint(8, (nodes,), generator=draw),
    }
    return dict(zip("xabcd", (values.get(n, torch.randn(nodes, 8, generator=draw)) for n in names), strict=False))


# ---- Models --------------------------------------------------------------------------------------------------------


def _of_timm(name: str) -> Iterator[Drawn]:
    import timm

    for settings, side in (({"img_size": _IMAGE}, _IMAGE), ({}, _IMAGE), ({}, 224)):
        make = functools.partial(timm.create_model, name, num_classes=5, **settings)
        yield Drawn(make, functools.partial(_image, side))


def _image(side: int, size: int, length: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(size, 3, side, side, generator=draw)}


def _of_transformers(name: str) -> Iterator[Drawn]:
    import transformers

    cls = getattr(transformers, name)
    names = {*inspect.signature(cls.forward).parameters}
    first: list[str] = [name for name in ("input_ids", "attention_mask") if name in names]
    first = first if cls.main_input_name == "input_ids" else [cls.main_input_name]
    more = [name for name in _INPUTS if name in names and name not in first]
    inputs = [first, [*first, "decoder_input_ids"], [*first, *more]]
    for widths in (True, False):
        try:
            config = cls.config_class(**_small(cls.config_class(), widths))
        except Exception:  # settings that don't fit each other
            continue
        make = functools.partial(_with_config, cls, config)
        for labels, rank, taken in itertools.product((*_LABELS, None), (0, 1), inputs):
            of_labels = {*labels(1, 1, torch.Generator())} - {"choices"} if labels else set()
            if {*taken} | of_labels <= names:
                yield Drawn(make, functools.partial(_batch, config, tuple(taken), labels, rank), bool(labels))


def _with_config(cls: Any, config: Any) -> nn.Module:
    return cls(copy.deepcopy(config))


def _small(config: Any, widths: bool) -> dict[str, Any]:
    """Returns the settings of a small model. What is derived from others while it isn't set stays unset."""
    settings: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(config)).parameters.items():
        value: Any = getattr(config, name, None)
        if hasattr(value, "to_dict") and name in config.sub_configs:
            settings[name] = {**_small(value, widths), "model_type": value.model_type}
        elif value is None and name in ("pad_token_id", "vocab_size"):
            settings[name] = 0 if name == "pad_token_id" else 101
        elif parameter.default not in (None, parameter.empty):
            small = shrunk(name, value, widths)
            if small != value:
                settings[name] = small
    return settings


# Labels to try, before none; "choices" makes two texts of each one.
_LABELS: tuple[Arguments, ...] = (
    lambda size, length, draw: {"labels": torch.randint(2, (size,), generator=draw)},
    lambda size, length, draw: {"labels": torch.randint(2, (size, length), generator=draw)},
    lambda size, length, draw: {"labels": torch.randint(2, (size,), generator=draw), "choices": torch.ones(())},
    lambda size, length, draw: {"labels": torch.randint(2, (size, _IMAGE, _IMAGE), generator=draw)},
    lambda size, length, draw: {
        f"{end}_positions": torch.randint(length, (size,), generator=draw) for end in ("start", "end")
    },
)


def _ids(config: Any, size: int, length: int, draw: torch.Generator) -> torch.Tensor:
    """Returns texts that end with what ends a text, before two places that are padded in the first one."""
    ids = torch.randint(3, _TOKENS, (size, length), generator=draw)
    if isinstance(getattr(config, "eos_token_id", None), int):
        ids[:, -3] = config.eos_token_id
    return ids


def _mask(size: int, length: int) -> torch.Tensor:
    mask = torch.ones(size, length, dtype=torch.int64)
    mask[0, length - 2 :] = 0
    return mask


def _number(config: Any, otherwise: int, *names: str) -> int:
    """Returns the first setting with one of the names that is a number, in a config or one that it holds."""
    for holder, name in itertools.product((config, *(vars(config).values())), names):
        value = getattr(holder, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    return otherwise


def _pixels(config: Any) -> tuple[int, int, int]:
    side = _number(config, _IMAGE, "image_size")
    return _number(config, 3, "num_channels"), side, side


def _mels(config: Any) -> int:
    return _number(config, 16, "num_mel_bins", "feature_size", "input_feat_per_channel", "num_mels")


# Names of arguments -> their values, of two ranks or orders of dimensions.
_INPUTS: Mapping[str, Callable[[Any, int, int, torch.Generator, int], torch.Tensor]] = {
    "input_ids": lambda config, size, length, draw, rank: _ids(config, size, length, draw),
    "attention_mask": lambda config, size, length, draw, rank: _mask(size, length),
    "decoder_input_ids": lambda config, size, length, draw, rank: _ids(config, size, length, draw),
    "pixel_values": lambda config, size, length, draw, rank: torch.randn(
        size, *[_number(config, 2, "num_frames")] * rank, *_pixels(config), generator=draw
    ),
    "input_features": lambda config, size, length, draw, rank: torch.randn(
        (size, 40, _mels(config)) if rank else (size, _mels(config), 2 * _number(config, 20, "max_source_positions")),
        generator=draw,
    ),
    "input_values": lambda config, size, length, draw, rank: torch.randn(size, *[1] * rank, 1600, generator=draw),
    "bbox": lambda config, size, length, draw, rank: torch.arange(1, 5).expand(size, length, 4),
}


def _batch(
    config: Any, inputs: tuple[str, ...], labels: Any, rank: int, size: int, length: int, draw: torch.Generator
) -> dict[str, torch.Tensor]:
    values = {name: _INPUTS[name](config, size, length, draw, rank) for name in inputs}
    values |= labels(size, length, draw) if labels else {}
    if values.pop("choices", None) is not None:
        values |= {name: torch.stack([values[name], values[name].flip(0)], 1) for name in inputs}
    return values


_WAYS: Mapping[str, Callable[[str], Iterator[Drawn]]] = {
    "transformers": _of_transformers,
    "timm": _of_timm,
    "geometric": _of_geometric,
    "torch": _of_torch,
}
"""Library -> the ways to make and call a type, to be tried in order."""
