"""Is a case trained as in PyTorch? As far as PyTorch agrees with itself after one rounding."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ort_trainer

from . import program
from .recipe import Recipe
from .train import TRAIN, in_pytorch, loss_of, with_compile

__all__ = ["BAD", "REPORTED", "Outcome", "compare", "explodes"]

# Outcomes that are failures.
BAD = ("wrong", "raw error", "crash")
# Of a message that the package raises from an error that nobody meant.
REPORTED = "This should be reported"
# Relative differences that always pass, as in tests/fidelity: roundings of other kernels in sums and norms.
_FLOOR = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 3e-2, "autocast": 3e-2, "autocast16": 4e-3}
# What docs/limits.md says of doubles: in Fourier transforms by ONNX Runtime, and where the norm is clipped.
_FLOOR_OF_DOUBLES = 1e-5
# PyTorch itself keeps a part of NAdam's state in fp32, and no longer once the state was loaded.
_FLOOR_OF_LOADED_NADAM = 1e-6
# If PyTorch's losses differ from each other by more, the comparison would be meaningless.
_CHAOTIC = {"float32": 1e-3, "float64": 1e-6, "bfloat16": 0.3, "autocast": 0.1, "autocast16": 2e-2}
_EXPLODED = 1e6
_CHAOS = "chaotic"
_ROUNDED = {"autocast": torch.bfloat16, "autocast16": torch.float16}
# Runs of PyTorch whose weights differ by one rounding; more of them before something is called wrong.
_RUNS, _MORE_RUNS = 2, 8
_MULTIPLE = 20
_PACKAGE = str(Path(ort_trainer.__file__).parent)


@dataclass(frozen=True)
class Outcome:
    """What became of a case in one way.

    Attributes:
        kind: ``equal``, ``refused``, ``wrong``, ``raw error`` or ``crash``; of a whole case ``dropped`` (PyTorch
            refuses it), ``not finite`` or ``chaotic``; ``PyTorch's own`` if Dynamo does the same with another backend.
        text: What differs, or the error.
        place: Where the error was raised.
    """

    kind: str
    text: str = ""
    place: str = ""

    @property
    def signature(self) -> tuple[str, str]:
        """What failures of the same cause have in common: the kind, and the type and the place of an error."""
        return self.kind, f"{self.text.partition(':')[0]} {self.place}" if self.kind == "raw error" else ""


def _quietly(train: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Returns the results of a training, and its warnings."""
    torch.manual_seed(17)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train()
    return found, [str(warning.message) for warning in caught]


class _Reference:
    """Training in PyTorch, and how far it differs from itself.

    Args:
        text: The program.
        dtype: The dtype of its model.
    """

    def __init__(self, text: str, dtype: str) -> None:
        self._text, self._dtype, self._seed = text, dtype, 0
        self.results = _quietly(lambda: in_pytorch(lambda: program.run(text)))[0]
        self.own: dict[str, float] = dict.fromkeys(self.results, 0.0)
        self.error = self._error_of_a_bad_batch()

    def _error_of_a_bad_batch(self) -> Exception | None:
        made = program.run(self._text)
        if made.BAD is None:
            return None
        for step in range(made.BAD + 1):  # without dropout, say, PyTorch may accept it
            made.change(step)
        try:
            loss_of(made, made.model, made.bad(made.BAD), made.BAD).backward()
        except Exception as error:
            return error
        raise ValueError("PyTorch accepts the bad batch")

    @property
    def is_finite(self) -> bool:
        """Whether all losses and weights are finite."""
        return all(value.isfinite().all() for name, value in self.results.items() if not name.startswith("left"))

    def run_again(self, count: int) -> None:
        """Trains again, from weights and with inputs changed by at most one rounding."""
        for _ in range(count):
            self._seed += 1
            others = _quietly(lambda: in_pytorch(self._perturbed))[0]
            for name, value in others.items():
                if name in self.own and value.shape == self.results[name].shape:
                    self.own[name] = max(self.own[name], _distance(value, self.results[name]))

    def _perturbed(self) -> Any:
        made = program.run(self._text)
        draw = torch.Generator().manual_seed(self._seed)

        def rounded(value: torch.Tensor) -> torch.Tensor:
            if not value.is_floating_point():
                return value
            eps = torch.finfo(_ROUNDED.get(self._dtype, value.dtype)).eps
            return value * (1 + eps * torch.randint(-1, 2, value.shape, generator=draw).to(value.dtype))

        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.copy_(rounded(parameter))
        drawn = made.batch

        def batch(step: int) -> Any:
            x, *rest = drawn(step)
            return rounded(x), *rest

        made.batch = batch
        return made

    @property
    def is_chaotic(self) -> bool:
        """Whether one rounding changes a loss by much, or losses explode."""
        losses = [value.abs().item() for name, value in self.results.items() if name.startswith("loss")]
        return explodes(losses) or any(
            own > _CHAOTIC[self._dtype] * max(1e-2, self.results[name].abs().item())
            for name, own in self.own.items()
            if name.startswith("loss")
        )

    def differences(self, ours: dict[str, Any], floor: float) -> list[str]:
        """Returns a line for each result that differs by more than the tolerance.

        Args:
            ours: The results.
            floor: The relative difference that always passes.
        """
        if ours.keys() != self.results.keys():
            return [f"other results: {sorted(ours.keys() ^ self.results.keys())}"]
        found = []
        for name, theirs in self.results.items():
            mine = ours[name]
            if mine.shape != theirs.shape or (mine.dtype != theirs.dtype and not name.startswith("left")):
                found.append(f"{name}: {mine.dtype} {list(mine.shape)} instead of {theirs.dtype} {list(theirs.shape)}")
                continue
            size = max(theirs.double().norm().item(), 1e-2)
            tolerance = max(floor * size, _MULTIPLE * self.own[name])
            distance = _distance(mine, theirs)
            if not distance <= tolerance:
                found.append(f"{name}: {_shown(mine)} instead of {_shown(theirs)}, {distance:.2g} > {tolerance:.2g}")
        return found


def explodes(losses: Sequence[float]) -> bool:
    """Returns whether the losses of a training explode, so that gates saturate, and round to 0 or not."""
    return max(losses) > _EXPLODED * max(1.0, losses[0])


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the norm of a difference; 0 if both are NaN or infinite at the same places, and elsewhere equal."""
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    return (one - other)[~same].norm().item()


def _shown(value: torch.Tensor) -> str:
    return str([float(f"{number:.6g}") for number in value.double().flatten()[:3].tolist()]).replace("'", "")


def compare(recipe: Recipe, text: str | None = None, report: Any = None) -> dict[str, Outcome]:
    """Trains a case in PyTorch and in its ways.

    Args:
        recipe: The case.
        text: Its source text, if it is another one.
        report: Is called with each way before it begins, and with each outcome.

    Returns:
        Way -> outcome; ``case`` -> outcome if there is nothing to compare.
    """
    text = program.source(recipe) if text is None else text
    try:
        reference = _Reference(text, recipe.dtype)
    except Exception as error:
        return {"case": Outcome("dropped", f"{type(error).__name__}: {error}"[:300])}
    if not reference.is_finite:
        return {"case": Outcome("not finite")}
    reference.run_again(_RUNS)
    if reference.is_chaotic:
        return {"case": Outcome(_CHAOS)}
    outcomes = {}
    for way in recipe.ways:
        if report is not None:
            report(way)
        floor = _FLOOR[recipe.dtype]
        if recipe.dtype == "float64":
            options = dict(recipe.options)
            if recipe.optimizer == "nadam" and (way == "resumed" or options.get("between") == "state"):
                floor = _FLOOR_OF_LOADED_NADAM
            fourier = any(kind == "complex" for _, kind, _ in recipe.layers)
            if fourier or {"clip", "clip_of_config"} & {*options}:
                floor = _FLOOR_OF_DOUBLES
        outcomes[way] = _outcome(way, text, reference, floor)
    return outcomes


def _outcome(way: str, text: str, reference: _Reference, floor: float) -> Outcome:
    def train() -> Outcome:
        return _trained(lambda: TRAIN[way](lambda: program.run(text)), reference, floor)

    outcome = train()
    if way == "compile" and outcome.kind in (*BAD, "refused"):
        # TorchDynamo does not watch everything, and can't capture everything.
        other = _trained(lambda: with_compile(program.run(text), "aot_eager"), reference, floor)
        if other.kind != "equal" or other.text == _CHAOS:
            return Outcome("PyTorch's own", outcome.text, outcome.place)
        return train()  # PyTorch may have been found to differ more from itself meanwhile
    return outcome


def _trained(train: Callable[[], dict[str, Any]], reference: _Reference, floor: float) -> Outcome:
    try:
        ours, messages = _quietly(train)
    except Exception as error:
        return _of_error(error)
    bad = ours.pop("error", None)
    if bad is not None:
        outcome = _of_error(bad)
        if outcome.kind != "refused" and not isinstance(bad, type(reference.error)):
            return outcome
    differences = reference.differences(ours, floor)
    if differences:
        reference.run_again(_MORE_RUNS)
        if reference.is_chaotic:
            return Outcome("equal", _CHAOS)
        differences = reference.differences(ours, floor)
    left_out = [message for message in messages if "the state dict is without" in message]
    if differences and left_out:
        return Outcome("refused", left_out[0][:300])
    if differences:
        return Outcome("wrong", "; ".join(differences)[:600])
    in_pytorch_ = [message for message in messages if "PyTorch runs" in message or "lets PyTorch run" in message]
    return Outcome("equal", f"in PyTorch: {in_pytorch_[0]}"[:300] if in_pytorch_ else "")


def _of_error(error: Exception) -> Outcome:
    """Returns ``refused`` for an error that the package itself raised with a message."""
    inner = getattr(error, "inner_exception", None)  # of an error that TorchDynamo wraps
    if isinstance(inner, Exception):
        return _of_error(inner)
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return Outcome("raw error", f"{type(error).__name__}: {error}"[:600])
    last = frames[-1]
    text = f"{type(error).__name__}: {error}"[:600]
    place = f"{last.filename.rpartition('site-packages/')[2]}:{last.name}"
    # PyTorch's kernels have no frames of Python, so their errors end in the package, too, but where it calls them.
    is_own = last.filename.startswith(_PACKAGE) and (last.line or "").startswith("raise ")
    is_own = is_own and REPORTED not in text
    if is_own and str(error) and not isinstance(error, (AssertionError, KeyError)):
        if type(error).__name__ == "VerificationError":
            return Outcome("wrong", text, place)
        return Outcome("refused", text, place)
    in_package = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    if isinstance(error, AssertionError) and ("the model has another" in text or "was accepted" in text):
        return Outcome("wrong", text)
    where = f"{Path(in_package[-1].filename).name}:{in_package[-1].name}" if in_package else "the loop"
    return Outcome("raw error", text, f"{where} > {place}")
