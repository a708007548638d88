"""The weight update of the step loop: combines gradients, applies the rule, updates the loss scale and counters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..engine import StepSession
from ..optim.parts import Named, global_norm
from ..optim.update import Again
from .joint_state import gather_state
from .strategy import Meeting
from .together import check_done
from .window import Share

if TYPE_CHECKING:
    from .loop import TrainingLoop

__all__ = ["follow", "meet", "update"]


def update(
    loop: TrainingLoop, gradients: Named | None, rates: Sequence[float] | None = None, again: Again | None = None
) -> bool:
    """Updates the weights and ends the window; see ``TrainingLoop.update``."""
    loop.config.check()
    rates = loop.rates.upcoming(loop.info, loop.info.step) if rates is None else rates
    if gradients is None:
        meeting = meet(loop, "update", rates)
    else:
        meeting = loop.strategy.meet("step", Share(float(bool(gradients))), rates, gradients)
    return _update(loop, meeting, gradients, again)


def follow(loop: TrainingLoop) -> str:
    """Joins the other processes' next operation, with the rest of a window or nothing; returns its kind.

    For ``gather``, the caller takes part itself.
    """
    meeting = meet(loop, "follow")
    if meeting.kind == "update":
        loop.rates.upcoming(loop.info, loop.info.step)  # advances the schedule
        _update(loop, meeting, None, None)
    elif meeting.kind in ("state", "model"):
        gather_state(loop, meeting, keep=False)
    elif meeting.kind == "save":
        check_done(loop.strategy, meeting)
    elif meeting.kind != "gather":
        does = "load a state" if meeting.kind == "load" else "run forward_backward() or use p.grad"
        raise RuntimeError(
            f"this process is at the end of trainer.join() and can't take part when others {does}: give all processes "
            "the same number of batches, or do that outside trainer.join(), in all of them"
        )
    return meeting.kind


def meet(loop: TrainingLoop, kind: str, rates: Sequence[float] = ()) -> Meeting:
    """Meets the other processes with the window's share, and sets ``step`` to the highest of all processes."""
    session, share, info = loop.start_session(), loop.window.share(loop.precision.loss_scale), loop.info
    present = session.present_gradients()
    meeting = loop.strategy.meet(kind, share, rates, present, session.changed_buffers, info.step)
    info.step = meeting.step
    return meeting


def _update(loop: TrainingLoop, meeting: Meeting, gradients: Named | None, again: Again | None) -> bool:
    session, optimizer, info, strategy = loop.start_session(), loop.optimizer, loop.info, loop.strategy
    if not meeting.weight:
        return False
    loop.config.set_rates(meeting.rates)
    divisor = 1.0
    if gradients is None:
        own = session.present_gradients()
        gradients, share = strategy.reduce(meeting, own)
        divisor = loop.window.divisor_of(share)
        # With ZeRO no process has the complete sums, so there are no used gradients to show.
        session.hold_gradients(None if gradients is own else {} if strategy.zero_stage else gradients)
        keeps = not strategy.zero_stage
    else:
        gradients, keeps = optimizer.parts.of(gradients), False
    run = optimizer.step
    if loop.profiler is not None:
        run = functools.partial(loop.profiler.update, run)
    # If the user may change the gradients, or they are in parts, the norm is computed now.
    asked = optimizer.asks_norm(loop.precision.checks_finite)
    norm = None if asked or keeps or not gradients else optimizer.parts.total_norm(gradients.values()) / divisor
    try:
        info.all_finite = run(
            gradients=gradients,
            learning_rates=[float(rate) for rate in meeting.rates],
            divisor=divisor,
            check_finite=loop.precision.checks_finite,
            again=again,
        )
    finally:  # the gradients were divided in place, even if the update failed
        loop.discard_gradients()
    if strategy.world_size > 1:
        updated = {name: session.parameters[name] for name in gradients} if info.all_finite else {}
        strategy.spread(meeting, updated, session.buffers)
        loop.source.memory.publish(session.buffers)
    norm = optimizer.norm if norm is None else norm
    if loop.layout.torch_config is None:
        loop.source.memory.publish(session.parameters)
    else:  # the PyTorch optimizer changed the model itself
        loop.graphs.refresh(session)
    loop.holds_gradients = False
    info.note_update(meeting.rates, functools.partial(_norm_of_used, session) if norm is None else norm)
    try:
        loop.precision.update(info)
    finally:
        info.optimization_step += int(info.all_finite)
    if info.all_finite:
        loop.rates.updated()
    return info.all_finite


def _norm_of_used(session: StepSession) -> torch.Tensor | None:
    """Returns the global norm of the gradients that the last update used; None if they are gone."""
    used = session.used_gradients()
    return global_norm(used.values()) if used else None
