"""How does a case become a program? Source text with a model, a loss, data, and what is done between steps."""

from __future__ import annotations

import random
import re
import sys
import types
from typing import Any

from ..export.torch.outside.programs import HEAD, Place, place
from .changes import CHANGES, OF_A_LAYER
from .layers import Shape, write
from .losses import LOSSES
from .optimizers import OPTIMIZERS
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

_PROGRAM = """{head}
import torch.utils.checkpoint
from ort_trainer import optim
{before}
DTYPE, CLASSES = torch.{dtype}, {classes}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
{init}
    def forward(self, {arguments}):
{forward}
loss_fn = {loss}
torch.manual_seed({seed})
model = Net().to(DTYPE)
SIZES = {sizes}
def batch(step):
    size, length = SIZES[step]
    g, dtype = torch.Generator().manual_seed({seed} + step), DTYPE
    x = {x}
    shape = {shape}
    {reshaped}
    return x, {mask}{label}
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
def change(step):
{change}
def state():
    return [{state}]
IN_FORWARD, AUTOCAST, EVALUATED, BETWEEN = {in_forward}, {autocast}, {evaluated}, {between!r}
ACCUMULATION, DIVISOR, CLIP, CLIP_VALUE = {accumulation}, {divisor}, {clip}, {clip_value}
schedule = {schedule}
OPTIONS = {options}
"""


def source(recipe: Recipe) -> str:
    """Returns a case as source text; what does not fit is left out."""
    parts = _Parts(recipe)
    loss, options = LOSSES[recipe.loss], dict(recipe.options)
    if options.get("bad") == "label" and not loss.label.startswith("torch.randint(shape[-1]"):
        del options["bad"]  # any number is a valid label
    function = loss.function
    if loss.flat and parts.shape.kind == "s":
        function = f"lambda p, y, f={function}: f(p.flatten(0, 1), y.flatten(0, 1))"
    shape = (
        f"(size, length, {parts.classes})"
        if parts.shape.kind == "s" and recipe.data in ("sequences", "tokens")
        else (f"(size, {parts.length}, {parts.classes})" if parts.shape.kind == "s" else f"(size, {parts.classes})")
    )
    optimizer, config = OPTIMIZERS[recipe.optimizer]
    schedule = options.get("schedule")
    return _PROGRAM.format(
        head=HEAD.strip(),
        before="\n".join(dict.fromkeys(filter(None, parts.before))),
        dtype={"autocast": "float32"}.get(recipe.dtype, recipe.dtype),
        autocast=recipe.dtype == "autocast",
        evaluated="evaluated" in options,
        between=options.get("between"),
        reshaped=_STRIDES if "strides" in options and recipe.data != "tokens" else "pass",
        mask="torch.rand(x.shape[:2], generator=g) > 0.3, " if "mask" in options else "",
        bad=_BAD[options.get("bad", "")],
        bad_step=len(recipe.sizes) // 2 if "bad" in options else None,
        classes=parts.classes,
        init=_indented(parts.init, 8),
        arguments=", ".join(["x", *["mask"] * ("mask" in options), *["y"] * ("in_forward" in options)]),
        forward=_indented(parts.forward, 8),
        loss=function,
        seed=recipe.seed,
        sizes=list(recipe.sizes),
        x={
            "vectors": "torch.randn(size, 6, generator=g, dtype=dtype)",
            "sequences": "torch.randn(size, length, 4, generator=g, dtype=dtype)",
            "tokens": f"torch.randint({_TOKENS}, (size, length), generator=g)",
            "images": f"torch.randn(size, 2, {_SIDE}, {_SIDE}, generator=g, dtype=dtype)",
        }[recipe.data],
        shape=shape,
        label=loss.label,
        optimizer=optimizer,
        config=config,
        change=_indented(parts.change, 4),
        state=", ".join(parts.state),
        in_forward="in_forward" in options,
        accumulation=options.get("accumulation", 1),
        divisor=1 if "reduction" in options else options.get("accumulation", 1),
        clip=options.get("clip"),
        clip_value=options.get("clip_value"),
        schedule=schedule,
        options=_options(options, recipe.dtype == "autocast"),
    )


def _options(options: dict[str, Any], mixed: bool) -> dict[str, Any]:
    """Returns the trainer's options but for kernels and schedule."""
    utils: dict[str, Any] = {"random_numbers": "pytorch_global", "grad_norm_clip": "clip" in options}
    debug: dict[str, Any] = {}
    if "clip" in options:
        utils["max_grad_norm"] = options["clip"]
    if "clip_value" in options:
        utils["max_grad_value"] = options["clip_value"]
    if "share_weights" in options:
        utils["share_weights"] = False
    if "recompute" in options:
        utils["memory_efficient_gradient"] = True
    for name, key in (
        ("verify_every", "verify_every"),
        ("deterministic", "deterministic_compute"),
        ("max_nonfinite", "max_nonfinite_losses"),
    ):
        if name in options:
            debug[key] = options[name]
    return {
        "batch": {
            "gradient_accumulation_steps": options.get("accumulation", 1),
            "gradient_reduction": options.get("reduction", "mean"),
        },
        "utils": utils,
        "debug": debug,
        **({"mixed_precision": {"enabled": True, "dtype": "bfloat16"}} if mixed else {}),
    }


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
        self.shape = {
            "vectors": Shape("v", 6),
            "images": Shape("i", 2, _SIDE),
        }.get(recipe.data, Shape("s", 4))
        self.length = 0
        self.classes = _TOKENS if recipe.tied else _CLASSES
        changes: dict[int, list[str]] = {}
        self._globals: set[str] = set()
        forward = self.forward
        if recipe.data == "tokens":
            self.init.append("self.tokens = nn.Embedding(11, 4)")
            forward.append("h = self.tokens(x)")
        else:
            forward.append("h = x")
        if "mask" in dict(recipe.options):
            forward.append(_MASKED[recipe.data])
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
        self._add_head(recipe)
        for step, (what, *rest) in recipe.changes:
            if isinstance(what, str):
                if what == "learning rate" and "Config" in OPTIMIZERS[recipe.optimizer][1]:
                    continue
                if recipe.tied and "head" in CHANGES[what]:
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

    def _add_head(self, recipe: Recipe) -> None:
        if recipe.tied:
            self.init.append(f"self.head = nn.Linear({self.shape.width}, 4)")
            self.forward.append("h = F.linear(self.head(h), self.tokens.weight)")
        else:
            self.init.append(f"self.head = nn.Linear({self.shape.width}, {self.classes})")
            self.forward.append("h = self.head(h)")
        returns = dict(recipe.options).get("in_forward")
        texts = {"loss": "loss_fn(h, y)", "tuple": "loss_fn(h, y), h", "dict": "{'loss': loss_fn(h, y), 'logits': h}"}
        self.forward.append(f"return {texts.get(returns, 'h')}")


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
