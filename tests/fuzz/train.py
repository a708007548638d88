"""How is a case trained? In PyTorch, and in every way of the package. All functions take the program of a case.

A stand-alone script contains the text of these functions.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim

__all__ = [
    *("TRAIN", "cached", "called", "in_a_loop", "in_pytorch", "loss_of", "make_trainer", "module_options", "nested"),
    *("options_of", "own_loop", "resumed", "results", "tensors_in", "train_steps", "trained", "with_compile"),
    *("with_module", "with_trainer"),
]


def in_a_loop(program: Any, module: Any) -> dict[str, Any]:
    """Trains a module in PyTorch's loop."""
    if program.SEED is not None:
        torch.manual_seed(program.SEED)
    for name in program.FROZEN:
        program.model.get_parameter(name).requires_grad_(False)
    optimizer, losses = program.optimizer(), []
    schedule = program.schedule(optimizer)
    scale, interval, backoff = program.SCALER or (1.0, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", scale, growth_interval=interval, enabled=program.SCALER is not None)
    scaler.set_backoff_factor(backoff)
    updates: list[int] = []
    optimizer.register_step_post_hook(lambda *_: updates.append(step))
    for step in range(len(program.SIZES)):
        program.change(step)
        loss = loss_of(program, module, program.batch(step), step)
        losses.append(loss.item())
        scaler.scale(loss * program.FACTORS[step]).backward()
        if step not in program.UPDATES:
            continue
        scaler.unscale_(optimizer)
        for parameter in program.model.parameters() if program.UPDATES[step] != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(program.UPDATES[step])
        if program.CLIP:
            torch.nn.utils.clip_grad_norm_(program.model.parameters(), program.CLIP)
        if program.CLIP_VALUE:
            torch.nn.utils.clip_grad_value_(program.model.parameters(), program.CLIP_VALUE)
        scaler.step(optimizer)
        scaler.update()
        if schedule is not None and updates[-1:] == [step]:
            schedule.step()
        optimizer.zero_grad()
    found = results(program, losses, program.model.state_dict())
    if program.EVALUATED:
        program.model.eval()
        with torch.no_grad():
            found["evaluation"] = loss_of(program, module, program.batch(0), 0).double()
    return found


def loss_of(program: Any, module: Any, batch: Any, step: int) -> torch.Tensor:
    """Returns the loss of a batch, and keeps the other outputs."""
    args, kwargs = called(program, step, batch)
    labels = [] if program.IN_FORWARD else [kwargs.pop(name, None) for name in program.NAMES[-program.LABELS :]]
    if args and labels:
        args, labels = args[: -len(labels)], args[-len(labels) :]
    parameters = program.parameters(step)
    with torch.autocast("cpu", program.AUTOCAST, enabled=program.AUTOCAST is not None):
        found = module(*args, **kwargs, **(parameters if program.IN_FORWARD else {}))
        outputs = tensors_in(found)
        if not program.IN_FORWARD:
            loss = program.loss_fn(found, *labels, **parameters)
        else:
            loss = found["loss"] if isinstance(found, dict) else outputs[0]
    program.outputs = [value.detach().clone() for value in outputs if value is not loss]
    return loss.sum()


def called(program: Any, step: int, batch: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the arguments of a batch, by position and by name."""
    args, kwargs = program.face(*batch), program.extra(step)
    return ((), dict(zip(program.NAMES, args, strict=True), **kwargs)) if program.KEYWORDS else (args, kwargs)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors that a model returns, until something else comes."""
    if hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    elif isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return [] if value is None else [value]
    parts = [part for entry in value for part in tensors_in(entry)]
    return list(itertools.takewhile(lambda part: isinstance(part, torch.Tensor), parts))


def results(program: Any, losses: list[float], state: dict[str, Any]) -> dict[str, Any]:
    """Returns what is compared."""
    found: dict[str, Any] = {
        f"loss {step}": torch.tensor(loss, dtype=torch.float64) for step, loss in enumerate(losses)
    }
    found.update((f"output {number}", value) for number, value in enumerate(program.outputs))
    found.update((f"state {name}", value.detach().clone()) for name, value in state.items())
    for number, value in enumerate(program.state()):
        found[f"left {number}"] = torch.as_tensor(value).detach().clone()
    if program.SEED is None:
        found["random"] = torch.rand(1)
    return found


def nested(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options by their paths as a dict of dicts."""
    found: dict[str, Any] = {}
    for path, value in options.items():
        *sections, name = path.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return found


def options_of(program: Any, kernels: str) -> Any:
    """Returns a trainer's options."""
    options = {**program.OPTIONS, **(program.ONNX if kernels == "onnxruntime" else {}), "utils.kernels": kernels}
    if program.BY_NAME:
        options["utils.frozen_weights"] = program.FROZEN
    if program.SCALER:
        options["mixed_precision.loss_scaler"] = program.own_scaler()
    return ORTTrainerOptions({**nested(options), "lr_scheduler": program.own_schedule()})


def make_trainer(program: Any, kernels: str) -> ORTTrainer:
    """Returns a case's trainer."""
    if program.SEED is not None:
        torch.manual_seed(program.SEED)
    loss_fn, config = None if program.IN_FORWARD else program.loss_fn, program.config()
    description = described(program) if program.DESCRIBED else "auto"
    return ORTTrainer(program.model, description, config, loss_fn=loss_fn, options=options_of(program, kernels))


def described(program: Any) -> dict[str, Any]:
    """Returns a description of the model as users write it: the one that another trainer derives."""
    args, kwargs = called(program, 0, program.batch(0))
    loss_fn = None if program.IN_FORWARD else program.loss_fn
    with torch.random.fork_rng([]):
        trainer = ORTTrainer(program.model, "auto", optim.SGDConfig(lr=0.1), loss_fn=loss_fn)
        trainer.loss_parameters.update(program.parameters(0))
        trainer.loop.graphs.bind(args, kwargs)
    return trainer.model_desc.to_dict()


def train_steps(program: Any, trainer: ORTTrainer, steps: Any, take: Any = None) -> list[float]:
    """Takes some of the steps."""
    losses, take = [], take or trainer.train_step
    for step in steps:
        program.change(step)
        if step in program.WINDOWS:
            trainer.gradient_accumulation_steps = program.WINDOWS[step]
        trainer.loss_parameters.update(program.parameters(step))
        weight = {"gradient_weight": program.WEIGHTS[step]} if program.WEIGHTS else {}
        if step == program.BAD:
            try:
                args, kwargs = called(program, step, program.bad(step))
                take(*args, **kwargs, **weight)
            except Exception as error:
                program.error = error
            else:
                raise AssertionError("a batch that PyTorch refuses was accepted")
        if program.FETCHES and losses:
            trainer.train_step_info.fetches = [trainer.model_desc.loss.name] * (step + 1 < len(program.SIZES))
        args, kwargs = called(program, step, program.batch(step))
        outputs = take(*args, **kwargs, **weight)
        outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        names = trainer.train_step_info.fetches or trainer.model_desc.output_names
        losses.append(outputs.pop(names.index(trainer.model_desc.loss.name)).item())
        program.outputs = outputs
        if program.BETWEEN == "evaluation":
            trainer.eval_step(*args, **kwargs)
        elif program.BETWEEN == "state":
            trainer.load_state_dict(trainer.state_dict())
    return losses


def trained(program: Any, trainer: ORTTrainer, losses: list[float]) -> dict[str, Any]:
    """Returns what is compared, of a trainer at its end."""
    if program.FLUSHED:
        trainer.optimizer_step()
    state = trainer.state_dict(pytorch_format=True)
    if program.OPTIONS.get("utils.share_weights", True):
        for name, value in program.model.state_dict().items():
            assert torch.equal(value.detach(), state[name].to(value.dtype)), f"the model has another {name}"
    found = results(program, losses, state)
    if program.BAD is not None:
        found["error"] = program.error
    if program.EVALUATED:
        args, kwargs = called(program, 0, program.batch(0))
        trainer.loss_parameters.update(program.parameters(0))
        trainer.train_step_info.fetches = [trainer.model_desc.loss.name]
        found["evaluation"] = trainer.eval_step(*args, **kwargs).double().sum()
    return found


def with_trainer(program: Any, kernels: str = "pytorch") -> dict[str, Any]:
    """Trains with the trainer."""
    trainer = make_trainer(program, kernels)
    return trained(program, trainer, train_steps(program, trainer, range(len(program.SIZES))))


def own_loop(program: Any) -> dict[str, Any]:
    """Trains in a loop around a trainer's backward pass."""
    trainer, losses = make_trainer(program, "pytorch"), []
    for step in range(len(program.SIZES)):
        losses += train_steps(program, trainer, [step], trainer.forward_backward)
        if step in program.UPDATES:
            for parameter in program.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(program.FACTORS[step] * program.UPDATES[step])
            trainer.optimizer_step()
            program.model.zero_grad()
    return trained(program, trainer, losses)


def module_options(program: Any) -> dict[str, Any]:
    """Returns the options that are not those of the loop."""
    own = ("utils.random_numbers", "debug.verify_every")
    return nested({path: value for path, value in program.OPTIONS.items() if path in own})


def with_module(program: Any, kernels: str = "auto") -> dict[str, Any]:
    """Trains an ORTModule in PyTorch's loop."""
    options = module_options(program)
    options["utils"]["kernels"] = kernels
    if program.SEED is not None:
        torch.manual_seed(program.SEED)
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
        return trained(program, trainer, losses)


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
    "own loop": lambda make: own_loop(make()),
    "compiled": lambda make: with_trainer(make(), "compiled"),
    "module compiled": lambda make: with_module(make(), "compiled"),
}
