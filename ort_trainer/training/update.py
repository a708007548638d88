"""The weight update of the step loop: the gradients of all processes, rates, the rule, the scaler, the counters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..optim.parts import Named
from ..optim.update import Again
from . import state
from .strategy import Meeting
from .window import Share

if TYPE_CHECKING:
    from .loop import TrainingLoop

__all__ = ["follow", "update"]


def update(
    loop: TrainingLoop, gradients: Named | None, rates: Sequence[float] | None = None, again: Again | None = None
) -> bool:
    """Updates the weights and ends the window; see ``TrainingLoop.update``."""
    session = loop.start_session() if gradients is None else loop.session
    assert session is not None
    loop.config.check()
    rates = loop.rates.upcoming(loop.info, loop.info.step) if rates is None else rates
    if gradients is None:
        share = loop.window.share(loop.precision.loss_scale)
        meeting = loop.strategy.meet("update", share, rates, session.present_gradients(), session.changed_buffers)
    else:
        meeting = loop.strategy.meet("step", Share(1.0), rates, gradients)
    return _update(loop, meeting, gradients, rates, again)


def follow(loop: TrainingLoop) -> None:
    """Takes part in what the other processes do, with no data left."""
    loop.start_session()
    rates = loop.rates.upcoming(loop.info, loop.info.step)
    meeting = loop.strategy.meet("follow", Share(0.0, scale=loop.precision.loss_scale), rates)
    if meeting.kind == "update":
        _update(loop, meeting, None, rates, None)
    elif meeting.kind in ("state", "model"):
        state.take_part(loop, meeting)
    else:
        raise RuntimeError(
            "a process ran out of data in a loop with forward_backward(), where its part can't be played by the "
            "trainer: give all processes as many batches, or use train_step"
        )


def _update(
    loop: TrainingLoop, meeting: Meeting, gradients: Named | None, rates: Sequence[float], again: Again | None
) -> bool:
    session, info, strategy = loop.start_session(), loop.info, loop.strategy
    if not meeting.weight:
        return False
    session.set_learning_rate(*rates)
    loop.config.set_rates(rates)
    divisor = 1.0
    if gradients is None:
        gradients, share = strategy.reduce(meeting, session.present_gradients())
        divisor = loop.window.divisor_of(share)
        # Of sums that are not whole anywhere, nothing can be shown afterwards.
        session.hold_gradients({} if strategy.zero_stage else gradients)
        keeps = not strategy.zero_stage
    else:
        gradients, keeps = session.optimizer.parts.of(gradients), False
    run = session.optimizer_step
    if loop.profiler is not None:
        run = functools.partial(loop.profiler.update, run)
    # Of gradients that the user may change, or that are in parts, it is computed at once.
    asked = session.optimizer.asks_norm(loop.precision.checks_finite)
    norm = None if asked or keeps or not gradients else session.optimizer.parts.total_norm(gradients.values()) / divisor
    try:
        info.all_finite = run(
            divisor=divisor, check_finite=loop.precision.checks_finite, gradients=gradients, again=again
        )
    finally:  # they are divided, whatever has become of the update
        loop.discard_gradients()
    updated = {name: session.parameters[name] for name in gradients} if info.all_finite else {}
    strategy.spread(meeting, updated, session.buffers)
    norm = session.optimizer.norm if norm is None else norm
    if loop.layout.torch_config is None:
        loop.source.publish(session.parameters)
    else:  # it has changed the model itself
        loop.graphs.refresh(session)
    if strategy.world_size > 1:
        loop.source.publish(session.buffers)
    loop.holds_gradients = False
    info.note_update(rates, session.norm_of_used if norm is None else norm)
    try:
        loop.precision.update(info)
    finally:
        info.optimization_step += int(info.all_finite)
    if info.all_finite:
        loop.rates.updated()
    return info.all_finite
