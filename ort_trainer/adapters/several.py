"""``Adapters``: several adapters over one base, of which a trainer trains one at a time."""

from __future__ import annotations

import copy
from typing import Any

from ..core.errors import shown, was_given
from ..trainer import ORTTrainer
from .lora_nodes import initial_factor

__all__ = ["Adapters"]


class Adapters:
    """Several adapters over one base, of which a trainer trains one at a time; the others wait in memory.

    An adapter is everything that the trainer trains, with its moments and counts of updates. All have the same layers
    and ranks, so that one graph serves them all, and switching exports nothing. The schedule, the loss scaler and the
    counters of the trainer are common to all.

    Args:
        trainer: A trainer of a model with an adapter, ONNX or PyTorch, before its first update.
        name: The name of the adapter that it has.

    Attributes:
        active: The name of the adapter that steps train and that evaluation uses.

    Raises:
        RuntimeError: If the trainer has updated weights: then there is no fresh state for others.
        TypeError: If it is no trainer, or the name no str.
        ValueError: If it trains all weights, so that there is no base.

    Example:
        >>> adapters = Adapters(trainer, "formal")
        >>> adapters.add("friendly")
        >>> adapters.activate("friendly")
        >>> trainer.train_step(ids, labels)
        >>> save_adapter(trainer, "friendly")  # the active one
    """

    def __init__(self, trainer: ORTTrainer, name: str = "default") -> None:
        if not isinstance(trainer, ORTTrainer):
            raise TypeError(f"trainer must be an ORTTrainer, but {was_given(trainer)}")
        if trainer.train_step_info.optimization_step:
            raise RuntimeError(
                f"the trainer has made {trainer.train_step_info.optimization_step} updates: make Adapters(trainer) "
                "before the first one, because new adapters begin with the state that it has now"
            )
        if not trainer.loop.contents.frozen:
            raise ValueError("the trainer trains all weights of its model, so there is no base: add an adapter first")
        self._trainer = trainer
        _check_name(name)
        self._first = self._current()
        self._waiting: dict[str, dict[str, Any]] = {}
        self.active = name

    @property
    def names(self) -> list[str]:
        """The names of all adapters, the active one first."""
        return [self.active, *self._waiting]

    def add(self, name: str, like: str | None = None) -> None:
        """Adds an adapter, which waits until it is activated.

        Args:
            name: Its name.
            like: The adapter to copy, with its moments; None for a fresh one, whose A is drawn anew, and whose other
                weights are those that the trainer began with.

        Raises:
            TypeError: If the name is no str.
            ValueError: If the name is taken, or ``like`` is unknown.
        """
        _check_name(name)
        if name in self.names:
            raise ValueError(f"there is an adapter {name!r} already: remove it first, or use another name")
        if like is not None:
            self._check(like)
            self._waiting[name] = self._current() if like == self.active else copy.deepcopy(self._waiting[like])
            return
        state = copy.deepcopy(self._first)
        weights = state["model"]["full_precision"]
        for key, value in weights.items():
            if "lora_A" in key.split("."):
                weights[key] = initial_factor("A", value.shape).numpy().astype(value.dtype)
        self._waiting[name] = state

    def activate(self, name: str) -> None:
        """Makes an adapter the one that steps train; the present one waits, with its moments.

        Raises:
            ValueError: If the name is unknown.
            RuntimeError: In an accumulation window, whose gradients are of the present one.
        """
        self._check(name)
        if name == self.active:
            return
        if self._trainer.loop.window.micro_batches:
            raise RuntimeError(
                "the accumulation window has gradients of the active adapter: finish it, call optimizer_step(), or "
                "drop them with lazy_reset_grad()"
            )
        present, state = self._current(), self._waiting[name]
        # Counters are common to all.
        self._trainer.load_state_dict({**state, "train_step_info": present["train_step_info"]}, strict=False)
        del self._waiting[name]
        self._waiting[self.active] = present
        self.active = name

    def remove(self, name: str) -> None:
        """Removes an adapter that waits.

        Raises:
            ValueError: If the name is unknown, or the adapter is the active one.
        """
        self._check(name)
        if name == self.active:
            raise ValueError(f"{name!r} is the active adapter: activate another one before you remove it")
        del self._waiting[name]

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise ValueError(f"there is no adapter {shown(name)}: there are {self.names}")

    def _current(self) -> dict[str, Any]:
        """Returns the part of the trainer's state that belongs to the active adapter."""
        state = self._trainer.state_dict()
        trained = {*self._trainer.loop.contents.trainable}
        canonical = self._trainer.loop.contents.canonical
        weights = state["model"]["full_precision"]
        trained_weights = {key: value for key, value in weights.items() if canonical[key] in trained}
        parts = ("optimizer", "torch_optimizer", "trainer_options", "train_step_info")
        return {"model": {"full_precision": trained_weights}, **{key: state[key] for key in parts if key in state}}


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, but {was_given(name)}")
