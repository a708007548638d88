"""``Adapters``: several adapters over one base, of which a trainer trains one at a time."""

from __future__ import annotations

import copy
from typing import Any

from ..core.errors import was_given
from ..core.named_adapters import NamedAdapters
from ..trainer import ORTTrainer
from .lora_nodes import initial_factor


class Adapters(NamedAdapters[dict[str, Any]]):
    """Several adapters over one base, of which a trainer trains one at a time; the others wait in memory.

    An adapter is everything that the trainer trains, with its moments and counts of updates. All have the same layers
    and ranks, so that one graph serves them all, and switching exports nothing. The schedule, the loss scaler and the
    counters of the trainer are common to all. The A of a fresh one is drawn anew, and its other weights are those that
    the trainer began with.

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
        super().__init__(name)
        self._trainer = trainer
        self._first = self._current()

    def _fresh(self) -> dict[str, Any]:
        state = copy.deepcopy(self._first)
        weights = state["model"]["full_precision"]
        for key, value in weights.items():
            if "lora_A" in key.split("."):
                weights[key] = initial_factor("A", value.shape).numpy().astype(value.dtype)
        return state

    def _check_window(self) -> None:
        if self._trainer.loop.window.micro_batches:
            raise RuntimeError(
                "the accumulation window has gradients of the active adapter: finish it, call optimizer_step(), or "
                "drop them with lazy_reset_grad()"
            )

    def _restore(self, state: dict[str, Any], present: dict[str, Any]) -> None:
        # Counters are common to all.
        self._trainer.load_state_dict({**state, "train_step_info": present["train_step_info"]}, strict=False)

    def _current(self) -> dict[str, Any]:
        """Returns the part of the trainer's state that belongs to the active adapter."""
        state = self._trainer.state_dict()
        trained = {*self._trainer.loop.contents.trainable}
        canonical = self._trainer.loop.contents.canonical
        weights = state["model"]["full_precision"]
        trained_weights = {key: value for key, value in weights.items() if canonical[key] in trained}
        parts = ("optimizer", "torch_optimizer", "trainer_options", "train_step_info")
        return {"model": {"full_precision": trained_weights}, **{key: state[key] for key in parts if key in state}}
