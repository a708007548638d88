"""How is a case trained? In PyTorch, and in every way of the package. All functions take the program of a case.

A stand-alone script contains the text of these functions.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions

__all__ = ["TRAIN", "cached", "in_a_loop", "in_pytorch", "resumed", "with_compile", "with_module", "with_trainer"]


def in_a_loop(program: Any, module: Any) -> dict[str, Any]:
    """Trains a module in PyTorch's loop."""
    optimizer, losses = program.optimizer(), []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, program.schedule) if program.schedule else None
    for step in range(len(program.SIZES)):
        program.change(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=program.AUTOCAST):
            loss = loss_of(program, module, program.batch(step))
        (loss / program.DIVISOR).backward()
        losses.append(loss.item())
        if (step + 1) % program.ACCUMULATION == 0:
            if program.CLIP:
                torch.nn.utils.clip_grad_norm_(program.model.parameters(), program.CLIP)
            if program.CLIP_VALUE:
                torch.nn.utils.clip_grad_value_(program.model.parameters(), program.CLIP_VALUE)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
    found = results(program, losses, program.model.state_dict())
    if program.EVALUATED:
        program.model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=program.AUTOCAST):
            found["evaluation"] = loss_of(program, module, program.batch(0)).double()
    return found


def loss_of(program: Any, module: Any, batch: Any) -> torch.Tensor:
    """Returns the loss of a batch."""
    *inputs, y = batch
    loss = module(*batch) if program.IN_FORWARD else program.loss_fn(module(*inputs), y)
    return loss["loss"] if isinstance(loss, dict) else loss[0] if isinstance(loss, tuple) else loss


def results(program: Any, losses: list[float], state: dict[str, Any]) -> dict[str, Any]:
    """Returns what is compared."""
    found: dict[str, Any] = {
        f"loss {step}": torch.tensor(loss, dtype=torch.float64) for step, loss in enumerate(losses)
    }
    found.update((f"state {name}", value.detach().clone()) for name, value in state.items())
    for number, value in enumerate(program.state()):
        found[f"left {number}"] = torch.as_tensor(value).detach().clone()
    found["random"] = torch.rand(1)
    return found


def options_of(program: Any, kernels: str) -> Any:
    """Returns a trainer's options."""
    options = copy.deepcopy(program.OPTIONS)
    options["utils"]["kernels"] = kernels
    return ORTTrainerOptions({**options, "lr_scheduler": program.schedule})


def make_trainer(program: Any, kernels: str) -> ORTTrainer:
    """Returns a case's trainer."""
    loss_fn = None if program.IN_FORWARD else program.loss_fn
    return ORTTrainer(program.model, "auto", program.config(), loss_fn=loss_fn, options=options_of(program, kernels))


def train_steps(program: Any, trainer: ORTTrainer, steps: Any) -> list[float]:
    """Takes some of the steps."""
    losses = []
    for step in steps:
        program.change(step)
        if step == program.BAD:
            try:
                trainer.train_step(*program.bad(step))
            except Exception as error:
                program.error = error
            else:
                raise AssertionError("a batch that PyTorch refuses was accepted")
        outputs = trainer.train_step(*program.batch(step))
        losses.append((outputs[0] if isinstance(outputs, (list, tuple)) else outputs).item())
        if program.BETWEEN == "evaluation":
            trainer.eval_step(*program.batch(step))
        elif program.BETWEEN == "state":
            trainer.load_state_dict(trainer.state_dict())
    return losses


def with_trainer(program: Any, kernels: str = "pytorch") -> dict[str, Any]:
    """Trains with the trainer."""
    trainer = make_trainer(program, kernels)
    losses = train_steps(program, trainer, range(len(program.SIZES)))
    state = trainer.state_dict(pytorch_format=True)
    if program.OPTIONS["utils"].get("share_weights", True):
        for name, value in program.model.state_dict().items():
            assert torch.equal(value.detach(), state[name].to(value.dtype)), f"the model has another {name}"
    found = results(program, losses, state)
    if program.BAD is not None:
        found["error"] = program.error
    if program.EVALUATED:
        outputs = trainer.eval_step(*program.batch(0))
        found["evaluation"] = (outputs[0] if isinstance(outputs, (list, tuple)) else outputs).double()
    return found


def module_options(program: Any) -> dict[str, Any]:
    """Returns the options that are not those of the loop."""
    options: dict[str, Any] = {"utils": {"random_numbers": "pytorch_global"}}
    if "verify_every" in program.OPTIONS["debug"]:
        options["debug"] = {"verify_every": program.OPTIONS["debug"]["verify_every"]}
    return options


def with_module(program: Any, kernels: str = "auto") -> dict[str, Any]:
    """Trains an ORTModule in PyTorch's loop."""
    options = module_options(program)
    options["utils"]["kernels"] = kernels
    return in_a_loop(program, ORTModule(program.model, options))


def with_compile(program: Any, backend: str = "ort_trainer") -> dict[str, Any]:
    """Trains what ``torch.compile`` makes, in PyTorch's loop."""
    torch._dynamo.reset()
    return in_a_loop(program, torch.compile(program.model, backend=backend))


def cached(make: Callable[[], Any]) -> dict[str, Any]:
    """Trains twice; the second trainer finds the exports of the first one."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", ORT_TRAINER_CACHE=folder):
        with_trainer(make())
        return with_trainer(make())


def resumed(make: Callable[[], Any]) -> dict[str, Any]:
    """Trains until half of the steps, and goes on with another trainer, of another model, from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        program, path = make(), Path(folder, "half.ortckpt")
        half = len(program.SIZES) // 2
        trainer = make_trainer(program, "pytorch")
        losses = train_steps(program, trainer, range(half))
        trainer.save_checkpoint(path)
        program = make()
        trainer = make_trainer(program, "pytorch")
        for step in range(half):
            program.change(step)
        trainer.load_checkpoint(path)
        losses += train_steps(program, trainer, range(half, len(program.SIZES)))
        found = results(program, losses, trainer.state_dict(pytorch_format=True))
        if program.EVALUATED:
            outputs = trainer.eval_step(*program.batch(0))
            found["evaluation"] = (outputs[0] if isinstance(outputs, (list, tuple)) else outputs).double()
        return found


def in_pytorch(make: Callable[[], Any]) -> dict[str, Any]:
    """Trains in PyTorch."""
    program = make()
    return in_a_loop(program, program.model)


TRAIN: dict[str, Callable[[Callable[[], Any]], dict[str, Any]]] = {
    "pytorch": lambda make: with_trainer(make()),
    "onnxruntime": lambda make: with_trainer(make(), "onnxruntime"),
    "module": lambda make: with_module(make()),
    "compile": lambda make: with_compile(make()),
    "module onnxruntime": lambda make: with_module(make(), "onnxruntime"),
    "cached": cached,
    "resumed": resumed,
}
