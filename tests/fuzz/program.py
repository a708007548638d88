"""How does a case become a program? Source text with a model, a loss, data, and what is done between steps."""

from __future__ import annotations

import random
import re
import sys
import types
from typing import Any

from ..outside.programs import HEAD, Place, place
from .changes import CHANGES, OF_A_LAYER
from .faces import CONSTANTS, INPUTS, LABELS, OUTPUTS, RETURNED
from .layers import Shape, write
from .losses import LOSSES, Loss
from .optimizers import OPTIMIZERS, OVERWRITING, SCHEDULES
from .recipe import Recipe

__all__ = ["run", "source", "uses_layers"]

_SIDE = 5
_TOKENS = 11
_CLASSES = 3
# Names in the source text of places. Two places of one model must not have the same.
_NAMES = re.compile(r"self\.\w+|(?<=def )(?!__)\w+|(?<=class )\w+|^[A-Za-z]\w*(?= =|, | \+)", re.MULTILINE)

_STRIDES = "x = x.flip(0).transpose(0, 1).contiguous().transpose(0, 1)"
_MASKED = {
    "vectors": "h = h.masked_fill(~mask, 0.0)",
    "sequences": "h = h * mask[..., None]",
    "tokens": "h = torch.where(mask[..., None], h, 0.1)",
    "images": "h = h + mask[:, :, None, None].to(h.dtype)",
}
# What makes a batch one that PyTorch refuses.
_BAD = {
    "": "pass",
    "wider": "x = torch.cat([x, x], 1)",
    "label": "y = y + 1000",
    "rows": "y = torch.cat([y, y, y])",
    "dtype": "x = x.to(torch.int64) if x.is_floating_point() else x.double()",
    "dimension": "x = x[0, 0]",
}

# How GradScaler and the trainer scale losses in float16: scale, steps until it doubles, its factor after an overflow.
_SCALERS = {
    "": ((2.0**16, 2000, 0.5), "None"),
    "constant": ((512.0, 2000, 1.0), "LossScaler(512.0)"),
    "growing": ((2.0**12, 1, 0.5), "DynamicLossScaler(loss_scale=2.0**12, up_scale_window=1)"),
    "overflow": ((2.0**30, 2, 0.5), "DynamicLossScaler(loss_scale=2.0**30, up_scale_window=2, max_loss_scale=2.0**40)"),
}
_FROZEN = {
    "": "[]",
    "first": "[n for n, _ in model.named_parameters()][:1]",
    "head": "['head.weight']",
    "all but the head": "[n for n, _ in model.named_parameters() if not n.startswith('head')]",
}
# Options of the trainer with the values of the recipe.
_PATHS = {
    "clip": "utils.max_grad_norm",
    "clip_value": "utils.max_grad_value",
    "share_weights": "utils.share_weights",
    "accumulation": "batch.gradient_accumulation_steps",
    "reduction": "batch.gradient_reduction",
    "random_numbers": "utils.random_numbers",
    "verify_every": "debug.verify_every",
    "deterministic": "debug.deterministic_compute",
    "max_nonfinite": "debug.max_nonfinite_losses",
    "check_export": "debug.check_model_export",
    "check_indices": "debug.check_indices",
}

_PROGRAM = """{head}
import torch.utils.checkpoint
from ort_trainer import optim
from ort_trainer.amp import DynamicLossScaler, LossScaler
{before}
DTYPE, CLASSES = torch.{dtype}, {classes}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
{init}
    def forward(self, {arguments}):
{forward}
score = {score}
loss_fn = {loss}
torch.manual_seed({seed})
model = Net().to(DTYPE)
FROZEN, BY_NAME = {frozen}, {by_name}
for name in [] if BY_NAME else FROZEN: model.get_parameter(name).requires_grad_(False)
SIZES = {sizes}
def batch(step):
    size, length = SIZES[step]
    g, dtype = torch.Generator().manual_seed({seed} + step), DTYPE
    x = {x}
    shape = {shape}
    {reshaped}
    return x, {mask}{label}
def face(x, *rest):
    *mask, y = rest
    return {face}
def extra(step):
    return {extra}
def parameters(step):
    return {parameters}
def inputs(step):
    return face(*batch(step))[: None if IN_FORWARD else -LABELS]
def bad(step):
    x, *mask, y = batch(step)
    {bad}
    return x, *mask, y
BAD = {bad_step}
OPTIMIZER = None
def optimizer():
    global OPTIMIZER
    OPTIMIZER = {optimizer}
    return OPTIMIZER
def config():
    return {config}
def schedule(o):
    return {schedule}
def own_schedule():
    return {own_schedule}
def change(step):
{change}
def state():
    return [{state}]
NAMES, LABELS, KEYWORDS, IN_FORWARD = {names}, {labels}, {keywords}, {in_forward}
AUTOCAST, SCALER, EVALUATED, BETWEEN, FETCHES, SEED = {autocast}, {scaler}, {evaluated}, {between!r}, {fetches}, {own}
# New sizes of windows, factors of the gradients before each update by its step, those of the losses, and the trainer's
# weights.
WINDOWS, UPDATES, FACTORS, WEIGHTS = {windows}
CLIP, CLIP_VALUE, FLUSHED, DESCRIBED = {clip}, {clip_value}, {flushed}, {described}
OPTIONS, ONNX = {options}, {onnx}
def own_scaler():
    return {own_scaler}
"""


def source(recipe: Recipe) -> str:
    """Returns a case as source text; what does not fit is left out."""
    parts = _Parts(recipe)
    loss, options = LOSSES[recipe.loss], dict(recipe.options)
    if options.get("bad") == "label" and not loss.label.startswith("torch.randint(shape[-1]"):
        del options["bad"]  # any number is a valid label
    shape = (
        f"(size, length, {parts.classes})"
        if parts.shape.kind == "s" and recipe.data in ("sequences", "tokens")
        else (f"(size, {parts.length}, {parts.classes})" if parts.shape.kind == "s" else f"(size, {parts.classes})")
    )
    optimizer, config = OPTIMIZERS[recipe.optimizer]
    clip = options.get("clip")
    if "clip_of_config" in options and clip is None and config.startswith("optim.AdamWConfig("):
        clip = options["clip_of_config"]
        config = f"{config[:-1]}, max_norm_clip={clip})"
    schedule, own_schedule = SCHEDULES[options.get("schedule", "")]
    if own_schedule.startswith("torch.") and "Config" in config:
        schedule, own_schedule = SCHEDULES[""]
    half = recipe.dtype == "autocast16"
    scaler, own_scaler = _SCALERS[options.get("scaler", "") if half else ""]
    x = {
        "vectors": "torch.randn(size, 6, generator=g, dtype=dtype)",
        "sequences": "torch.randn(size, length, 4, generator=g, dtype=dtype)",
        "tokens": f"torch.randint({_TOKENS}, (size, length), generator=g)",
        "images": f"torch.randn(size, 2, {_SIDE}, {_SIDE}, generator=g, dtype=dtype)",
    }[recipe.data]
    return _PROGRAM.format(
        head=HEAD.strip(),
        before="\n".join(dict.fromkeys(filter(None, parts.before))),
        dtype="float32" if recipe.dtype.startswith("autocast") else recipe.dtype,
        autocast={"autocast": "torch.bfloat16", "autocast16": "torch.float16"}.get(recipe.dtype),
        scaler=scaler if half else None,
        own_scaler=own_scaler,
        evaluated="evaluated" in options,
        between=options.get("between"),
        fetches="fetches" in options,
        own=recipe.seed if "random_numbers" in options else None,
        reshaped=_STRIDES if "strides" in options and recipe.data != "tokens" else "pass",
        mask="torch.rand(x.shape[:2], generator=g) > 0.3, " if "mask" in options else "",
        face=f"{INPUTS[options.get('inputs', '')][0]}, *mask, {LABELS[options.get('labels', '')][0]}",
        extra=f"{{'scale': {CONSTANTS[options['constant']][0]}}}" if "constant" in options else "{}",
        parameters="{'beta': 0.5 ** step}" if "parameter" in options else "{}",
        bad=_BAD[options.get("bad", "")],
        bad_step=len(recipe.sizes) // 2 if "bad" in options else None,
        classes=parts.classes,
        init=_indented(parts.init, 8),
        arguments=", ".join(parts.arguments),
        forward=_indented(parts.forward, 8),
        score=parts.score,
        loss=parts.loss,
        seed=recipe.seed,
        frozen=_FROZEN[options.get("frozen", ("", False))[0]],
        by_name=options.get("frozen", ("", False))[1],
        sizes=list(recipe.sizes),
        x=x,
        shape=shape,
        label=loss.label,
        optimizer=optimizer,
        config=config,
        schedule=schedule,
        own_schedule=own_schedule,
        change=_indented(parts.change, 4),
        state=", ".join(parts.state),
        names=tuple(parts.names),
        labels=parts.labels,
        keywords="keywords" in options,
        in_forward="in_forward" in options,
        windows=_windows(options, len(recipe.sizes)),
        clip=clip,
        clip_value=options.get("clip_value"),
        flushed="flushed" in options,
        # A written description has no constants.
        described="described" in options and "constant" not in options,
        options=_options(options, recipe.dtype, clip),
        onnx=dict([options["onnx"]] if "onnx" in options else []),
    )


def _windows(options: dict[str, Any], count: int) -> tuple[Any, ...]:
    """Returns what becomes of the steps: new sizes of windows, factors of gradients and of losses, weights.

    A loop divides losses by the size of the window, and corrects the gradients of one that has other weights or ends
    early. This decides what overflows in float16.
    """
    size, reduction = options.get("accumulation", 1), options.get("reduction", "mean")
    later, updates = options.get("later", size), dict[int, float]()
    weights = [1 + 7 * step % 5 if reduction == "weighted" else 1 for step in range(count)]
    factors: list[float] = []
    sizes = {size: later} if later != size else {}
    while len(factors) < count:
        window = weights[len(factors) : len(factors) + size]
        unit = 1 if reduction == "sum" else window[0] * size
        factors += [weight / unit for weight in window]
        if len(window) == size or "flushed" in options:
            updates[len(factors) - 1] = 1.0 if reduction == "sum" else unit / sum(window)
        size = later
    return sizes, updates, factors, weights if reduction == "weighted" else []


def _options(options: dict[str, Any], dtype: str, clip: float | None) -> dict[str, Any]:
    """Returns the trainer's options, by their paths, but for kernels, schedule and loss scaler."""
    found = {"utils.random_numbers": "pytorch_global", "utils.grad_norm_clip": clip is not None}
    found.update((path, options[name]) for name, path in _PATHS.items() if name in options)
    if "recompute" in options:
        found[options["recompute"]] = True
    if dtype.startswith("autocast"):
        found["mixed_precision.enabled"] = True
        found["mixed_precision.dtype"] = "bfloat16" if dtype == "autocast" else "float16"
    return found


class _Parts:
    """The lines of a case.

    Args:
        recipe: The case.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.before: list[str] = []
        self.init: list[str] = []
        self.forward: list[str] = []
        self.state: list[str] = []
        self.kinds: list[str] = []
        options = dict(recipe.options)
        self.shape = {
            "vectors": Shape("v", 6),
            "images": Shape("i", 2, _SIDE),
        }.get(recipe.data, Shape("s", 4))
        self.length = 0
        self.classes = _TOKENS if recipe.tied else _CLASSES
        changes: dict[int, list[str]] = {}
        self._globals: set[str] = set()
        self._add_arguments(options)
        forward = self.forward
        if recipe.data == "tokens":
            self.init.append("self.tokens = nn.Embedding(11, 4)")
            forward.append("h = self.tokens(x)")
        else:
            forward.append("h = x")
        if "mask" in options:
            forward.append(_MASKED[recipe.data])
        if "constant" in options:
            forward.append(CONSTANTS[options["constant"]][1])
        written = {}
        for number, kind, seed in recipe.layers:
            layer = write(kind, seed, f"l{number}", self.shape)
            if layer is None or layer.shape.width > 24:
                continue
            if layer.shape.kind == "s" and self.shape.kind != "s":
                self.length = {"as a sequence": self.shape.width // 2, "expanded": 3}.get(kind, self.shape.side**2)
            self.before.append(layer.before)
            self.init.append(layer.init)
            forward.append(layer.forward)
            self.shape = layer.shape
            self.kinds.append(kind)
            written[number] = kind
        if self.shape.kind == "i":
            forward.append("h = h.mean((2, 3))")
            self.shape = Shape("v", self.shape.width)
        names: set[str] = set()
        places = []
        for how, kind, seed in recipe.settings:
            part = place(how, kind, random.Random(f"{how} {kind} {seed}"), "program_of_a_case")
            own = set(_NAMES.findall("\n".join((part.before, part.init, part.leave))))
            if not names & own:
                places.append((seed, part))
                names |= own
        if places:
            self._add_places(places, changes)
        self._add_head(recipe, LOSSES[recipe.loss])
        for step, (what, *rest) in recipe.changes:
            if isinstance(what, str):
                if what == "learning rate" and "Config" in OPTIMIZERS[recipe.optimizer][1]:
                    continue
                if what == "learning rate" and options.get("schedule") in OVERWRITING:  # docs/optimizers.md says so
                    continue
                if recipe.tied and "head" in CHANGES[what]:
                    continue
                # A parameter that is frozen by its name stays so, and a trainer may have random numbers of its own.
                if what == "thaw the first" and options.get("frozen", ("", False))[1]:
                    continue
                if what == "draw" and "random_numbers" in options:
                    continue
                changes.setdefault(step, []).append(CHANGES[what])
            elif what in written:
                changes.setdefault(step, []).append(OF_A_LAYER[rest[0]][rest[1]].format(n=f"l{what}"))
        self.change = sorted(self._globals)
        for step, statements in sorted(changes.items()):
            self.change += [f"if step == {step}:", *(f"    {line}" for line in statements)]

    def _add_places(self, places: list[tuple[int, Place]], changes: dict[int, list[str]]) -> None:
        width = self.shape.width
        self.init.append(f"self.fc = nn.Linear({width}, {width})")
        self.forward.append("h = self.fc(h)")
        for seed, part in places:
            self.before.append(part.before)
            self.init.append(part.init)
            self.forward.append(f"h = {part.use}")
            if part.declared:
                self.forward.insert(0, part.declared)
            self.forward.append(part.leave)
            if part.globals != "pass":
                self._globals.add(part.globals)
            if part.change != "pass":
                changes.setdefault(1 + seed % 3, []).append(part.change)
            self.state.append(part.state)

    def _add_arguments(self, options: dict[str, Any]) -> None:
        self.names = ["x", *["mask"] * ("mask" in options), "y"]
        if "names" in options:
            of = dict(zip(("x", "mask", "y"), options["names"], strict=True))
            self.names = [of[name] for name in self.names]
            self.forward += [f"{name} = {other}" for name, other in of.items() if other in self.names[:-1]]
            if "in_forward" in options:
                self.forward.append(f"y = {of['y']}")
        _, taken, _ = LABELS[options.get("labels", "")]
        self.labels = len(taken.split(", *")[0].split(", "))
        self.names += ["z"] * (self.labels - 1)
        self.arguments = self.names if "in_forward" in options else self.names[: -self.labels]
        beta = ["beta=1.0"] * ("parameter" in options and "in_forward" in options)
        self.arguments += ["*", *["scale"] * ("constant" in options), *beta] if beta or "constant" in options else []
        self.forward.append(INPUTS[options.get("inputs", "")][1])

    def _add_head(self, recipe: Recipe, loss: Loss) -> None:
        options = dict(recipe.options)
        if recipe.tied:
            self.init.append(f"self.head = nn.Linear({self.shape.width}, 4)")
            self.forward.append("h = F.linear(self.head(h), self.tokens.weight)")
        else:
            self.init.append(f"self.head = nn.Linear({self.shape.width}, {self.classes})")
            self.forward.append("h = self.head(h)")
        self.score = loss.function
        if loss.flat and self.shape.kind == "s":
            self.score = f"lambda p, y, f={loss.function}: f(p.flatten(0, 1), y.flatten(0, 1))"
        before, outputs, read = OUTPUTS[options.get("outputs", "")]
        _, taken, label = LABELS[options.get("labels", "")]
        self.before.append(before)
        self.loss = "score"
        parameter = "parameter" in options
        if (outputs, taken, label, parameter) != ("h", "y", "y", False):
            beta = (", beta=1.0" if "*" in taken else ", *, beta=1.0") if parameter else ""
            self.loss = f"lambda p, {taken}{beta}: score({read}, {label}){' * beta' * parameter}"
        if "in_forward" in options:
            labels = ", ".join(["y", "z"][: self.labels])
            self.forward += [f"o = {outputs}", f"l = loss_fn(o, {labels}{', beta=beta' * parameter})"]
            outputs = RETURNED[options["in_forward"]]
        self.forward.append(f"return {outputs}")


def _indented(lines: list[str], spaces: int) -> str:
    """Returns the lines that do something, indented."""
    kept = [line for text in lines for line in text.split("\n") if line.strip() not in ("", "pass")]
    return "\n".join(" " * spaces + line for line in kept or ["pass"])


def uses_layers(recipe: Recipe) -> tuple[str, ...]:
    """Returns the kinds of the layers that fit."""
    return tuple(_Parts(recipe).kinds)


def run(text: str) -> Any:
    """Runs source text as a module of its own."""
    name = f"fuzzed_{len(sys.modules)}"
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text.replace("program_of_a_case", name), f"<{name}>", "exec"), vars(module))
    return module
