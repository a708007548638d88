"""``save_adapter`` and ``load_adapter``: adapters as folders in peft's format."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from ..core.atomic import explained, replace_all, temporary_folder
from ..core.errors import CheckpointError, check_file, shown
from ..core.sealed import DTYPES, Header, digest, read_header, read_tensors, write
from ..step.onnx_file import to_proto
from .linear_layers import linear_layers
from .lora import LoRA
from .lora_nodes import adapted_layers, adapter_of, add_lora, products
from .models import Source, stored_model
from .onnx_models import editable, read_model

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Keys of the file's metadata: digests of the adapted matrices by layer; earlier, of all initializers.
_MATRICES, _BASE = "ort_trainer.matrices", "ort_trainer.base"
_DTYPES = ("F64", "F32", "F16", "BF16")
# Settings of peft's LoraConfig that an ONNX model can have, or that say nothing about what is computed.
_KNOWN = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save"),
    *("use_rslora", "init_lora_weights", "fan_in_fan_out", "layers_to_transform", "layers_pattern"),
    *("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"),
    *("megatron_core", "qalora_group_size", "ensure_weight_tying"),
}
# Values of other settings that mean nothing.
_NOTHING: tuple[Any, ...] = (None, False, {}, [], "none")
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


def save_adapter(source: Source, folder: str | os.PathLike[str]) -> None:
    """Writes an adapter of an ONNX model alone, as a folder in peft's format, with digests of its base's matrices.

    ``peft.PeftModel.from_pretrained(model, folder)`` loads it for the PyTorch model that the ONNX model was exported
    from, if the layers have the same paths. A peft model in PyTorch has ``save_pretrained`` for this.

    Args:
        source: A trainer of a model from :func:`add_adapter`, or an ONNX model that ``save_as_onnx`` has written.
        folder: The folder, created if it does not exist; files in it are replaced, both or none.

    Raises:
        ValueError: If the model has no adapter, or is of PyTorch.
        NotADirectoryError: If the folder is a file.
    """
    model = stored_model(source)
    adapter = adapter_of(model)
    lora = adapter.lora
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _as_targets(adapter.layers, [layer.name for layer in linear_layers(model)]),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in adapter.trained}) or None,
        "bias": "none",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
    }
    layers = adapted_layers(model, adapter, products(model, adapter))
    matrices = {name: of_name[0].fingerprint(model.graph) for name, of_name in layers.items()}
    tensors = {}
    for name in adapter.tensors:
        value = model.graph.initializers.get(name)
        if value is None or value.const_value is None:
            raise ValueError(f"the model's metadata name a weight {shown(name)} of its adapter, which it lacks")
        constant = value.const_value
        array = np.ascontiguousarray(constant.numpy())
        tensors[_PREFIX + name] = (array.dtype.name, array.shape, array.reshape(-1).view(np.uint8))
    path = Path(folder)
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)
    with explained(path), temporary_folder(path.parent, path.name) as temporary:
        (temporary / _CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        with (temporary / _WEIGHTS).open("w+b") as file:
            write(file, tensors, {"format": "pt", _MATRICES: json.dumps(matrices)})
        replace_all([(temporary / name, path / name) for name in (_WEIGHTS, _CONFIG)])


def _as_targets(layers: Sequence[str], all_layers: Sequence[str]) -> list[str] | str:
    """Returns layers as peft's ``target_modules``: paths, or a regular expression where one is the end of another's."""
    is_clear = not any(other.endswith(f".{layer}") for layer in layers for other in all_layers)
    return list(layers) if is_clear else "|".join(map(re.escape, layers))


def load_adapter(model: onnx.ModelProto | str | os.PathLike[str], folder: str | os.PathLike[str]) -> onnx.ModelProto:
    """Returns an ONNX model with a stored adapter, to train it further, to merge or to export it.

    The model may be another export of the base, or an optimized one: layers are found by their matrices, then by name.

    Args:
        model: The base, or its path.
        folder: What :func:`save_adapter` or peft's ``save_pretrained`` has written.

    Raises:
        FileNotFoundError: If a file is missing.
        CheckpointError: If a file is damaged, or the adapter is none that ONNX models can have.
        ValueError: If the adapter is of another base.
    """
    loaded = read_model(model)
    path = Path(folder)
    config = _read_config(path / _CONFIG)
    header, tensors = _read_tensors(path / _WEIGHTS)
    base = editable(loaded)
    pairs = [name for name in tensors if name.endswith((".lora_A.weight", ".lora_B.weight"))]
    layers = list(dict.fromkeys(name.rpartition(".lora_")[0] for name in pairs))
    if not layers:
        raise CheckpointError(
            f"{path / _WEIGHTS} has no tensors such as '{_PREFIX}<layer>.lora_A.weight', but {shown(list(tensors))}"
        )
    paths = _paths(base, layers, header.metadata, path)
    renamed = {f"{layer}.lora_{part}.weight": f"{paths[layer]}.lora_{part}.weight" for layer in layers for part in "AB"}
    rank, alpha = config["r"], config["lora_alpha"]
    try:
        lora = LoRA(
            rank,
            alpha * rank**0.5 if config.get("use_rslora") else alpha,
            config.get("lora_dropout") or 0.0,
            list(paths.values()),
            [name for name in tensors if name not in pairs],
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path / _CONFIG} is damaged, or not of peft: {error}") from error
    absent = [name for name in lora.also_train if name not in loaded.parameters]
    if absent:
        raise ValueError(
            f"{str(path)!r} also has the weights {absent}, which the model has not, or under other names: load it with "
            "the model that it was trained on, or another export that keeps these names"
        )
    is_earlier = _BASE in header.metadata and _MATRICES not in header.metadata
    if is_earlier and header.metadata[_BASE] != _digest(base, lora):
        raise ValueError(
            f"{str(path)!r} is an adapter of another base, or of another export of it: an earlier version of "
            "ort_trainer has saved it, with a digest of all weights of the file that add_adapter was called with. Load "
            "it with that file, and save it again: then it fits other exports"
        )
    tensors = {renamed.get(name, name): tensor for name, tensor in tensors.items()}
    return to_proto(add_lora(loaded, lora, tensors, exactly=lora.targets))


def _paths(base: ir.Model, layers: Sequence[str], metadata: Mapping[str, str], path: Path) -> dict[str, str]:
    """Returns the path of each layer of a stored adapter in a model: of the same matrix, or of the same name.

    Raises:
        CheckpointError: If the metadata are damaged.
        ValueError: If a layer is missing, or several are possible.
    """
    matrices = metadata.get(_MATRICES, "{}")
    try:
        digests: dict[str, str] = {str(layer): str(value) for layer, value in json.loads(matrices).items()}
    except (AttributeError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: its {_MATRICES} are {shown(matrices)}") from error
    present = {layer.name: layer for layer in linear_layers(base)}
    digest_of = functools.cache(lambda name: present[name].fingerprint(base.graph))
    paths: dict[str, str] = {}
    for layer in layers:
        if layer in present and digests.get(layer) in (None, digest_of(layer)):
            same = [layer]
        elif layer in digests:
            same = [name for name in present if digest_of(name) == digests[layer]]
        else:  # an earlier version may have called it as its weight
            same = [name for name, other in present.items() if layer == other.weight]
        if not same:
            raise ValueError(
                f"{str(path)!r} is an adapter of another base: it adapts {layer!r}, and the model has no linear layer "
                f"{'with this matrix' if layer in digests else 'of this name'}, but {shown([*present])}. Load it with "
                "the model that it was trained on, or another export of it in which this matrix is neither fused with "
                "others, nor quantized, nor of another type"
            )
        if len(same) > 1 or same[0] in paths.values():
            raise ValueError(
                f"{str(path)!r} adapts {layer!r}, which can't be told from other layers, because their matrices are "
                f"equal: {shown(same)} in the model. Load it with the model that it was trained on"
            )
        paths[layer] = same[0]
    return paths


def _digest(base: ir.Model, lora: LoRA) -> str:
    """Returns the digest of a model's initializers, except those that are trained, as earlier versions stored it."""
    tensors = ((name, value.const_value) for name, value in sorted(base.graph.initializers.items()))
    return digest(
        (name, (tensor.dtype.name, tuple(tensor.shape.numpy()), np.frombuffer(tensor.tobytes(), np.uint8)))
        for name, tensor in tensors
        if tensor is not None and name not in lora.also_train
    )


def _read_tensors(path: Path) -> tuple[Header, dict[str, torch.Tensor]]:
    """Returns the header of an adapter's weights, and the tensors by their names in the model.

    Raises:
        CheckpointError: If they are damaged, or no weights.
    """
    check_file(path, "file of weights")
    with path.open("rb") as file:
        header = read_header(file, str(path))
        for name, entry in header.tensors.items():
            if entry.dtype not in _DTYPES or 0 in entry.shape:
                raise CheckpointError(
                    f"{path} is damaged: {shown(name)} is {list(entry.shape)} of {entry.dtype}, but weights are "
                    f"tensors of {', '.join(_DTYPES)} that are not empty"
                )
        stored = read_tensors(file, header, str(path), header.tensors)
    tensors = {
        name.removeprefix(_PREFIX): torch.from_numpy(data)
        .view(getattr(torch, DTYPES[header.tensors[name].dtype]))
        .reshape(header.tensors[name].shape)
        for name, data in stored.items()
    }
    if len(tensors) < len(stored):
        raise CheckpointError(f"{path} has a tensor twice, with and without {_PREFIX!r}: save the adapter again")
    return header, tensors


def _read_config(path: Path) -> dict[str, Any]:
    """Returns the settings in a file of peft.

    Raises:
        CheckpointError: If they are damaged, or ask for what ONNX models can't have.
    """
    check_file(path, "file of settings")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if config["peft_type"] != "LORA":
            raise CheckpointError(f"{path} is an adapter of type {shown(config['peft_type'])}: only LORA is supported")
        if not isinstance(config["r"], int) or not isinstance(config["lora_alpha"], (int, float)):
            raise TypeError("r or lora_alpha is no number")
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or not of peft: {error!r}") from error
    for name, value in config.items():
        if name not in _KNOWN and value not in _NOTHING:
            raise CheckpointError(f"{path} sets {name} to {shown(value)}, which ONNX models can't have")
    start = config.get("init_lora_weights")
    if start not in _BEGINNINGS:
        raise CheckpointError(
            f"{path} sets init_lora_weights to {shown(start)}, which may change the base: merge the adapter with peft"
        )
    return config
