"""What is a case? A list of decisions, each of which can be left out."""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from dataclasses import dataclass
from typing import Any

from ..outside.programs import KINDS
from .changes import CHANGES, OF_A_LAYER
from .faces import ARGUMENTS, CONSTANTS, INPUTS, LABELS, OUTPUTS, RETURNED
from .layers import LAYERS
from .losses import LOSSES
from .optimizers import OPTIMIZERS, SCHEDULES

__all__ = ["OPTIONS", "WAYS", "Recipe", "draw"]

# How a case is trained here: a trainer on each kind of kernels, a module, Dynamo's backend, a module on ONNX Runtime's
# kernels, a trainer whose exports come from the cache, one that goes on from a checkpoint, a loop of one's own around a
# trainer's backward pass, and, as their compilation takes seconds, compiled loops of a trainer and of a module.
WAYS = (
    *("pytorch", "onnxruntime", "module", "compile", "module onnxruntime", "cached", "resumed", "own loop"),
    *("compiled", "module compiled"),
)
_RARELY = {"compiled": 0.02, "module compiled": 0.01}
# What has the layers that an option computes again.
_RECOMPUTED = {"gelu": "gelu", "attn_dropout": "stack of layers", "transformer_layer": "stack of layers"}
OPTIONS: dict[str, tuple[Any, ...]] = {
    "accumulation": (2, 3),
    "clip": (0.5, 0.05),
    "clip_value": (0.01,),
    "clip_of_config": (0.05,),
    "later": (1, 2, 3),
    "flushed": (True,),
    "schedule": tuple(SCHEDULES)[1:],
    "scaler": ("constant", "growing", "overflow"),
    "share_weights": (False,),
    "described": (True,),
    "verify_every": (1, 2),
    "in_forward": tuple(RETURNED),
    "outputs": tuple(OUTPUTS)[1:],
    "inputs": tuple(INPUTS)[1:],
    "labels": tuple(LABELS)[1:],
    "constant": tuple(CONSTANTS),
    "parameter": (True,),
    "names": ARGUMENTS,
    "keywords": (True,),
    "fetches": (True,),
    "frozen": tuple((which, by_name) for which in ("first", "head", "all but the head") for by_name in (False, True)),
    "random_numbers": ("pytorch",),
    "recompute": (
        "utils.memory_efficient_gradient",
        *(f"graph_transformer.{kind}_recompute" for kind in _RECOMPUTED),
    ),
    "check_export": (True,),
    "check_indices": (False,),
    "onnx": (
        ("_internal_use.onnx_opset_version", 20),
        ("_internal_use.enable_internal_postprocess", False),
        ("_internal_use.enable_onnx_contrib_ops", False),
        ("debug.graph_save_paths.model_with_training_graph_path", f"{tempfile.gettempdir()}/fuzzed.onnx"),
    ),
    "deterministic": (True,),
    "max_nonfinite": (1,),
    "evaluated": (True,),
    "bad": ("wider", "label", "rows", "dtype", "dimension"),
    "between": ("evaluation", "state"),
    "mask": (True,),
    "strides": (True,),
    "reduction": ("sum", "weighted"),
}


@dataclass(frozen=True)
class Recipe:
    """The decisions of a case.

    Attributes:
        seed: Seed of weights and data.
        data: ``vectors``, ``sequences``, ``tokens`` or ``images``.
        layers: Of each layer a number that is its own, a key of ``LAYERS``, and a seed. A layer that does not take
            the shape before it is left out.
        loss: A key of ``LOSSES``.
        optimizer: A key of ``OPTIMIZERS``.
        options: Name -> value; what is not there has PyTorch's default.
        settings: Kinds of places outside tensors: how, kind and seed.
        changes: Step before which something is changed, and what: a key of ``CHANGES``, or the number of a layer, a key
            of ``OF_A_LAYER`` and an index.
        sizes: Batch size and length of each step.
        dtype: Dtype of the model; ``autocast`` for a float32 model in mixed precision with bfloat16, ``autocast16``
            with float16.
        ways: How it is trained here.
        tied: Whether the head of a model of tokens has the weights of the embedding.
    """

    seed: int
    data: str = "vectors"
    layers: tuple[tuple[int, str, int], ...] = ()
    loss: str = "mse"
    optimizer: str = "sgd"
    options: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, str, int], ...] = ()
    changes: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    sizes: tuple[tuple[int, int], ...] = ((2, 3),)
    dtype: str = "float32"
    ways: tuple[str, ...] = WAYS[:1]
    tied: bool = False

    def to_text(self) -> str:
        """Returns this recipe as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Recipe:
        """Reads what :meth:`to_text` has written."""
        return cls(**{name: _as_tuples(value) for name, value in json.loads(text).items()})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def draw(seed: int) -> Recipe:
    """Returns the case with a seed."""
    random_ = random.Random(f"case {seed}")
    data = random_.choice(("vectors", "vectors", "sequences", "tokens", "images"))
    letter = {"vectors": "v", "images": "i"}.get(data, "s")
    # Layers for the data's own shape come first; those for vectors fit once a layer has made one.
    first = [kind for kind, layer in LAYERS.items() if letter in layer.kinds]
    own = [kind for kind in first if "v" not in LAYERS[kind].kinds] or first
    kinds = [random_.choice(random_.choice((first, own))) for _ in range(random_.randint(1, 4))]
    kinds += [random_.choice(list(LAYERS)) for _ in range(random_.randint(0, 4))]
    options = {name: random_.choice(values) for name, values in OPTIONS.items() if random_.random() < 0.1}
    recomputed = _RECOMPUTED.get(options.get("recompute", "").removesuffix("_recompute").rpartition(".")[2])
    if recomputed and letter in LAYERS[recomputed].kinds:
        kinds.insert(0, recomputed)
    elif recomputed:
        del options["recompute"]
    layers = tuple((number, kind, random_.randrange(1000)) for number, kind in enumerate(kinds))
    count = random_.choice((3, 4, 5, 6))
    sizes = random_.choices([(1, 5), (2, 5), (3, 5), (7, 5), (3, 4), (2, 8), (4, 1), (3, 6)], k=2)
    steps = tuple(random_.choice(sizes) for _ in range(count))
    dtypes = ("float32", "float64", "bfloat16", "autocast", "autocast16")
    dtype = random_.choices(dtypes, (12, 3, 1, 1, 1))[0]
    optimizer = random_.choice(list(OPTIMIZERS))
    # A trainer with copies of the weights leaves the model's buffers as they are.
    places = [place for place in KINDS if "share_weights" not in options or place[1] != "buffer"]
    settings = tuple(
        (how, kind, random_.randrange(1000)) for how, kind in random_.sample(places, random_.choice((0, 0, 1, 1, 2)))
    )
    if OPTIMIZERS[optimizer][1].startswith("optim.from") or "Config" not in OPTIMIZERS[optimizer][1]:
        options.pop("share_weights", None)
    chosen = random_.sample(WAYS[:4], 2)
    if options.get("reduction") != "weighted" and "share_weights" not in options:
        chosen += ["own loop"] * (random_.random() < 0.15)
    rare = [way for way in WAYS[4:] if way != "own loop" and random_.random() < _RARELY.get(way, 0.08)]
    ways = tuple(way for way in WAYS if way in chosen or way in rare)
    on_onnxruntime = "complex" in kinds or any("onnxruntime" in way for way in ways)
    if dtype == "autocast16" and (on_onnxruntime or "own loop" in ways):
        # These kernels overflow later than PyTorch's (docs/limits.md), and run modules with complex constants, too; the
        # own loop divides after the backward pass.
        options["scaler"] = "constant"
    changes = []
    # A trainer with copies of the weights does not see what is changed in the model.
    for _ in range(0 if "share_weights" in options else random_.choice((0, 0, 1, 1, 2, 3))):
        what: tuple[Any, ...] = (random_.choice(list(CHANGES)),)
        fitting = [
            (number, text, index)
            for number, kind, _ in layers
            for text, statements in OF_A_LAYER.items()
            if text in LAYERS[kind].init
            for index in range(len(statements))
        ]
        if fitting and random_.random() < 0.6:
            what = random_.choice(fitting)
        changes.append((random_.randint(1, count - 1), what))
    # What a checkpoint has of places outside tensors is put there by the first step, over what has come there since.
    if (count // 2, ("evaluate",)) in changes and any(how == "left" for how, *_ in settings):
        ways = tuple(way for way in ways if way != "resumed")
    return Recipe(
        seed,
        data,
        layers,
        random_.choice(list(LOSSES)),
        optimizer,
        tuple(options.items()),
        settings,
        tuple(sorted(changes, key=lambda change: change[0])),
        steps,
        dtype,
        ways,
        data == "tokens" and random_.random() < 0.3,
    )
