"""Gathers the joint state of several processes, and selects each process's part when it is loaded."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.errors import DistributedError
from ..optim.parts import Named
from .read_state import Restored
from .strategy import Meeting, Strategy

if TYPE_CHECKING:
    from .loop import TrainingLoop

__all__ = ["Gathered", "gather_state", "take_own"]


@dataclass(frozen=True)
class Gathered:
    """The joint state of all processes.

    Attributes:
        random_states: The states of their random generators, by rank.
        window: The state of one window with the micro-batches of all processes.
        slots: The optimizer's state tensors of complete parameters, by name and slot.
        gradients: The gradients of that window.
    """

    random_states: list[torch.Tensor]
    window: dict[str, Any]
    slots: Mapping[str, Named]
    gradients: Named


def gather_state(loop: TrainingLoop, meeting: Meeting, keep: bool = True) -> Gathered:
    """Gathers the joint state; all processes call this after a meeting.

    Args:
        loop: A loop with a session.
        meeting: A meeting of kind ``state``, or ``model`` for a state without the optimizer.
        keep: Whether this process needs the result; if not, it takes part without memory for the tensors.
    """
    session, strategy, window = loop.session, loop.strategy, loop.window.state_dict()
    assert session is not None
    random_states = [session.generator.get_state()]
    if strategy.world_size > 1:
        own = random_states[0].numpy().tobytes()
        random_states = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in strategy.gather(own)]
        counts = [int(count) for count in strategy.gather(str(loop.window.micro_batches).encode())]
        if meeting.weight:
            leading = meeting.shares[meeting.leader]
            window |= {"weight": meeting.weight, "unit": leading.unit, "scale": leading.scale}
            window["micro_batches"] = max(counts)
    if meeting.kind == "model":
        return Gathered(random_states, window, {}, {})
    kept = loop.optimizer.slots
    slots: dict[str, dict[str, torch.Tensor]] = {name: {} for name in kept}
    for slot in loop.layout.rule.slots:
        parts = {name: own[slot] for name, own in kept.items() if slot in own}
        for name, value in strategy.whole(parts, keep).items():
            slots[name][slot] = value
    return Gathered(random_states, window, slots, strategy.total(meeting, session.present_gradients(), keep))


def take_own(restored: Restored, strategy: Strategy, device: torch.device) -> None:
    """Reduces a state, in place, to what this process restores.

    Rank 0 continues the window with its gradients; the others start with an empty contribution. If as many processes
    load the state as saved it, each gets its own random state; otherwise theirs are derived from that of rank 0.

    Args:
        restored: The state that was read.
        strategy: How the processes work together.
        device: Where training runs.

    Raises:
        DistributedError: In all processes, if their states differ.
    """
    own = _checksum(restored)
    sums = [int(found) for found in strategy.gather(str(own).encode())]
    different = [rank for rank, found in enumerate(sums) if found != sums[0]]
    if different:
        raise DistributedError(
            f"ranks {different} got a different state to load than rank 0: load the same state in all processes; "
            "nothing has changed"
        )
    rank, states = strategy.world_rank, restored.random_states
    if states is not None and len(states) == strategy.world_size:
        restored.random = states[rank]
    elif restored.random is not None and rank:
        restored.random = _derived(restored.random, rank, device)
    if rank and restored.gradients:
        assert restored.window is not None
        restored.gradients = {}
        restored.window.load_state_dict({**restored.window.state_dict(), "weight": 0.0})


def _checksum(restored: Restored) -> int:
    """Returns a checksum of the weights, counters and window, and of the names of everything else."""
    window = None if restored.window is None else restored.window.state_dict()
    others = [sorted(restored.slots), sorted(restored.gradients or ()), restored.random is None, restored.counts]
    numbers = [restored.step, restored.optimization_step, window, *others]
    found = zlib.crc32(json.dumps(numbers, sort_keys=True, default=str).encode())
    for name in sorted(restored.tensors):
        value = np.atleast_1d(restored.tensors[name].contiguous().numpy())
        found = zlib.crc32(value.view(np.uint8).data, zlib.crc32(name.encode(), found))
    return found


def _derived(state: torch.Tensor, rank: int, device: torch.device) -> torch.Tensor:
    """Returns the state of a generator seeded with a hash of a state and a rank."""
    digest = hashlib.sha256(state.numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little")).get_state()
