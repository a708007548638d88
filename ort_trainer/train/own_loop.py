"""Steps for the user's own loops: passes that fill ``p.grad`` or change nothing, and explicit updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.interrupts import uninterrupted
from .loop import TrainingLoop
from .strategy import noted
from .window import Share

__all__ = ["forward", "forward_backward", "lazy_reset_grad", "optimizer_step"]


@noted
def forward_backward(loop: TrainingLoop, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Adds gradients to ``p.grad``; see ``ORTTrainer.forward_backward``."""
    if loop.window.micro_batches:
        raise RuntimeError(
            f"forward_backward() was called after {loop.window.micro_batches} of {loop.window.size} micro-batches of a "
            "train_step() window, whose gradients are not in p.grad: end the window with optimizer_step() first"
        )
    _check_not_joining(loop, "forward_backward")
    loop.source.memory.add_gradients({})  # raises early if the model can't hold gradients
    batch = loop.graphs.bind(args, kwargs)
    plan = loop.plan(batch, True, loop.graphs.fetches(loop.info.fetches))
    with uninterrupted():
        outputs, gradients = loop.gradients_of(plan, batch, loop.losses.check)
        session, strategy = loop.start_session(), loop.strategy
        if strategy.world_size > 1:
            meeting = strategy.meet("pass", Share(1.0), (), gradients, session.changed_buffers)
            gradients = strategy.average(meeting, gradients)
            strategy.spread(meeting, {}, session.buffers)
            loop.source.memory.publish(session.buffers)
        loop.source.memory.add_gradients(gradients)
        loop.holds_gradients = True
    return outputs


def forward(loop: TrainingLoop, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Runs the model in training mode; see ``ORTTrainer.forward``."""
    batch = loop.graphs.bind(args, kwargs)
    plan = loop.plan(batch, True, loop.graphs.fetches(loop.info.fetches), backward=False)
    assert loop.session is not None
    with uninterrupted():
        outputs = loop.session.forward(plan, batch)
        loop.source.memory.publish(plan.runner.graph.buffer_updates)
    return outputs


@noted
def optimizer_step(loop: TrainingLoop) -> bool:
    """Updates the weights with the gradients so far; see ``ORTTrainer.optimizer_step``."""
    alone = loop.strategy.world_size == 1  # otherwise others may have micro-batches, so all run the update
    in_window = bool(loop.window.micro_batches) or not (alone or loop.holds_gradients)
    if not in_window and not loop.holds_gradients:
        return False
    if loop.session is None and loop.pending is not None and alone:
        raise RuntimeError(
            "the loaded accumulation window is applied when training begins: call prepare() before optimizer_step()"
        )
    if loop.config.needs_closure:
        raise RuntimeError(
            f"{loop.config.name} computes the loss several times in an update: call optimizer.step(closure) "
            "yourself, with a closure that calls forward_backward(), or train_step()"
        )
    if not in_window:
        _check_not_joining(loop, "optimizer_step")
    with uninterrupted():
        if in_window:
            return loop.optimizer_step()
        gradients = loop.source.memory.gradients()
        return (bool(gradients) or not alone) and loop.update(gradients)


def lazy_reset_grad(loop: TrainingLoop) -> None:
    """Drops all gradients that an update would use; see ``ORTTrainer.lazy_reset_grad``."""
    with uninterrupted():
        loop.discard_gradients()
        loop.holds_gradients = False
        loop.source.memory.drop_gradients()
        waiting = loop.pending
        if waiting is not None and waiting.gradients is not None:
            waiting.gradients = {}
            loop.pending_dict = {**loop.pending_dict, "gradients": {}, "window": loop.window.state_dict()}


def _check_not_joining(loop: TrainingLoop, method: str) -> None:
    if loop.strategy.joining:
        raise RuntimeError(
            f"{method}() was called inside trainer.join() with gradients in p.grad, but a process without data can "
            "only take part in train_step(): use that, or give all processes the same number of batches and leave out "
            "trainer.join()"
        )
