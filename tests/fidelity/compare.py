"""Trains a case here and in PyTorch, and measures the difference."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, amp, optim

from .case import Batch, Case

STEPS = 20
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01
# The loss scale of mixed precision, which keeps small gradients from vanishing.
SCALE = 1024.0
# Relative difference of losses and weights that always passes.
NEAR = 1e-4
# Number of PyTorch runs whose initial weights differ by one rounding.
REPEATS = 3
# At the edge of a relu or a maximum, one rounding decides which path is taken, in PyTorch as here. If PyTorch's losses
# differ from each other by more than this, the comparison would be meaningless, and other batches are drawn.
STEADY = 1e-5
# Two batch sizes and two lengths alternate.
SIZES = [(4, 9), (4, 9), (3, 9), (4, 7), (3, 7)]


@dataclass
class Difference:
    """What a comparison found.

    Attributes:
        loss: Largest relative difference of a loss within 20 steps.
        weights: Largest relative difference of a parameter or buffer after them, by the norm of the difference.
        own_loss: As ``loss``, between runs of PyTorch whose initial weights differ in the last bit; None if that was
            not run.
        own_weights: As ``weights``, between these runs.
        excess: Largest difference of the weights as a multiple of the tolerance: 1e-4 of the weight's norm, or 10
            times the difference between the runs of PyTorch.
        mixed_loss: As ``loss``, fp16 here against fp32 in PyTorch; None if that was not run.
        own_mixed_loss: The same for PyTorch's own autocast; None if that was not run, or PyTorch can't.
        seconds: How long the export of the training graph took.
        exports: How many training graphs the sizes needed.
    """

    loss: float
    seconds: float
    exports: int
    weights: float = 0.0
    excess: float = 0.0
    own_loss: float | None = None
    own_weights: float = 0.0
    mixed_loss: float | None = None
    own_mixed_loss: float | None = None


def compare(case: Case, mixed: bool = False, thorough: bool = True) -> Difference:
    """Compares 20 steps of AdamW, without clipping and with dropout off.

    Args:
        case: The case.
        mixed: Whether to compare fp16 too.
        thorough: Whether to always compare PyTorch with itself; otherwise only if 1e-4 is exceeded, to see whether
            PyTorch stays within it.
    """
    torch.manual_seed(0)
    model = case.model()
    for seed in range(1, 6):
        draw = torch.Generator().manual_seed(seed)
        batches = [case.batch(draw, *SIZES[step % len(SIZES)]) for step in range(STEPS)]
        theirs, reference = train_pytorch(case, copy.deepcopy(model), batches)
        ours, trainer, seconds = _train(case, copy.deepcopy(model), batches)
        found = Difference(loss=largest(ours, theirs), seconds=seconds, exports=len(trainer.session.graphs(True)))
        _compare_weights(found, trainer.state_dict(pytorch_format=True), reference, [])
        if not thorough and found.loss <= NEAR and found.excess <= 1.0:
            break
        repeats = [train_pytorch(case, perturbed(model, number), batches) for number in range(REPEATS)]
        found.own_loss = max(largest(losses, theirs) for losses, _ in repeats)
        _compare_weights(found, trainer.state_dict(pytorch_format=True), reference, [other for _, other in repeats])
        if found.own_loss <= STEADY:
            break
    if mixed:
        found.mixed_loss = largest(_train(case, model, batches, mixed=True)[0], theirs)
        try:
            found.own_mixed_loss = largest(train_pytorch(case, copy.deepcopy(model), batches, mixed=True)[0], theirs)
        except RuntimeError:  # PyTorch has no fp16 LSTM on the CPU
            found.own_mixed_loss = None
    return found


def compare_as_onnx(case: Case) -> float:
    """Returns the largest relative difference of the losses of two steps on ONNX Runtime's kernels."""
    torch.manual_seed(0)
    model, draw = case.model(), torch.Generator().manual_seed(1)
    batches = [case.batch(draw, *sizes) for sizes in ((4, 9), (3, 7))]
    theirs, _ = train_pytorch(case, copy.deepcopy(model), batches)
    return largest(_train(case, model, batches, kernels="onnxruntime")[0], theirs)


def _compare_weights(
    found: Difference, state: dict[str, torch.Tensor], reference: nn.Module, repeats: list[nn.Module]
) -> None:
    """Records the differences of parameters and buffers, absolutely and as multiples of the tolerance."""
    expected = reference.state_dict()
    assert list(state) == list(expected)
    found.weights = found.own_weights = found.excess = 0.0
    others = [other.state_dict() for other in repeats]
    for name, value in expected.items():
        if not value.is_floating_point():
            assert torch.equal(state[name], value), name
            continue
        norm = max(value.double().norm().item(), 1e-3)
        difference, *rest = ((other[name].double() - value.double()).norm().item() for other in (state, *others))
        own = max(rest, default=0.0)
        found.weights, found.own_weights = max(found.weights, difference / norm), max(found.own_weights, own / norm)
        found.excess = max(found.excess, difference / max(NEAR * norm, 10 * own))


def largest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(ours, theirs, strict=True))


def perturbed(model: nn.Module, seed: int) -> nn.Module:
    """Returns a copy whose weights differ by at most one rounding, each in its own direction."""
    other = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            direction = torch.randint(-1, 2, parameter.shape, generator=draw)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * direction)
    return other


def train_pytorch(
    case: Case, model: nn.Module, batches: list[Batch], mixed: bool = False
) -> tuple[list[float], nn.Module]:
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    losses = []
    for batch in batches:
        with torch.autocast("cpu", torch.float16, enabled=mixed):
            loss = _loss(case, model, batch)
        scale = SCALE if mixed else 1.0
        (loss.float() * scale).backward()
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad /= scale
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def _loss(case: Case, model: nn.Module, batch: Batch) -> torch.Tensor:
    if case.loss_fn is None:
        output: Any = model(**batch)
        return output["loss"] if isinstance(output, dict) else output[0]
    *data, label = batch
    return case.loss_fn(model(**{name: batch[name] for name in data}), batch[label])


def describe(batch: Callable[[torch.Generator, int, int], Batch]) -> dict[str, Any]:
    """Returns a model description in which every size that differs between two batches is dynamic."""
    draw = torch.Generator().manual_seed(0)
    small, large = batch(draw, 3, 7), batch(draw, 4, 9)
    inputs = []
    for name, value in small.items():
        pairs = zip(value.shape, large[name].shape, strict=True)
        sizes = [f"{name}_{axis}" if a != b else a for axis, (a, b) in enumerate(pairs)]
        inputs.append((name, ["batch", *sizes[1:]]))
    return {"inputs": inputs, "outputs": [("loss", [], True)]}


def _train(
    case: Case, model: nn.Module, batches: list[Batch], mixed: bool = False, kernels: str = "auto"
) -> tuple[list[float], ORTTrainer, float]:
    # A fixed scale, as in PyTorch's run: a dynamic one would skip the first steps.
    scaler = amp.DynamicLossScaler(automatic_update=False, loss_scale=SCALE) if mixed else None
    precision = {"enabled": True, "loss_scaler": scaler} if mixed else {}
    # In full precision, each step is also compared with the same step in PyTorch: gradients and buffers, too.
    debug = {} if mixed or kernels != "auto" else {"verify_every": 1}
    utils = {"grad_norm_clip": False, "kernels": kernels}
    options = ORTTrainerOptions({"utils": utils, "mixed_precision": precision, "debug": debug})
    config = optim.AdamConfig(lr=LEARNING_RATE, lambda_coef=WEIGHT_DECAY)
    trainer = ORTTrainer(model, describe(case.batch), config, loss_fn=case.loss_fn, options=options)
    start = time.perf_counter()
    trainer.prepare(batches[0])
    seconds = time.perf_counter() - start
    return [trainer.train_step(batch).item() for batch in batches], trainer, seconds
