"""What the two sources of training graphs have in common: a model with its weights, and what builds its graphs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..graph import TrainingGraph
from ..nested import Layout
from ..optim import OptimizerConfig
from ..options import ModelDescription, ORTTrainerOptions
from ..ownership import own_copies

__all__ = ["BORROWED", "Builder", "Layouts", "ModelSource", "Named", "autocast_dtype", "check_names"]

Named = Mapping[str, torch.Tensor]
Layouts = Sequence[tuple[str, Layout]]
BORROWED = threading.RLock()
"""Held while a model is looked at or exported: an export changes modes and functions of PyTorch for a while."""


class Builder(Protocol):
    """Builds graphs of one model, loss and description."""

    def build(self, batch: Named, training: bool) -> TrainingGraph:
        """Returns the training or evaluation graph for a sample batch."""
        ...

    def reference(self, batch: Named) -> Sequence[torch.Tensor]:
        """Returns what the model itself computes in evaluation mode."""
        ...


class ModelSource(ABC):
    """A model with its weights.

    Attributes:
        name: What messages call it.
        fixed: Whether nobody can change its weights from outside.
        inputs: Names of its inputs.
        canonical: Every name of a parameter or buffer -> the first name of the same tensor.
        saved: What is in a state dict, tied names included, in order; of these and the following only shape and dtype
            count.
        non_persistent: What is not.
        trainable: Canonical names of the parameters to train.
    """

    name: str
    fixed: bool
    inputs: Sequence[str]
    canonical: Mapping[str, str]
    saved: Named
    non_persistent: Named
    trainable: list[str]

    @property
    @abstractmethod
    def parameters(self) -> Named:
        """All parameters by canonical name, trained or not, as the model has them now."""

    @property
    @abstractmethod
    def buffers(self) -> Named:
        """All buffers, likewise."""

    def adopt(self, device: torch.device) -> Named:
        """Returns what the trainer works on, parameters and buffers by canonical name: copies, if nothing else is said.

        Args:
            device: Where they are to be.
        """
        parameters = self.parameters
        return own_copies({**parameters, **self.buffers}, parameters, device)

    def take_changes(self) -> Named:
        """Takes over what was changed in the model itself, where the trainer works on its tensors.

        Returns:
            Those that have other memory now, by canonical name; mostly none.

        Raises:
            RuntimeError: If that can't be.
        """
        return {}

    def publish(self, names: Collection[str]) -> None:  # noqa: B027 - likewise
        """Shows the model what has become of its tensors, where it does not see that by itself.

        Args:
            names: Canonical names of those that have changed.
        """

    def put(self, values: Named) -> Named:
        """Gives the model values before :meth:`adopt`, where the trainer will work on its tensors.

        Returns:
            The values that the model can't take as they are, and that must be put into what the trainer works on.
        """
        return values

    def add_gradients(self, gradients: Named) -> None:
        """Adds gradients to those that the model's parameters hold, as a backward pass of PyTorch does.

        Args:
            gradients: By canonical name, new tensors, which the model may keep.

        Raises:
            RuntimeError: If the trainer does not work on the tensors of the model.
        """
        raise RuntimeError(
            f"gradients can't go into {self.name}, as the trainer works on copies of its weights: use train_step, or "
            "a PyTorch model without utils.share_weights=False"
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients that the parameters to train hold, by canonical name."""
        return {}

    def drop_gradients(self) -> None:  # noqa: B027 - a model that has no such gradients has none to drop
        """Removes the gradients that the parameters to train hold."""

    def check_joint(self) -> None:  # noqa: B027 - likewise
        """Checks that several processes can train it together, each with its part of the data.

        Raises:
            ValueError: If not.
        """

    def variant(self, training: bool) -> Hashable:
        """Returns what stands for all of the model and loss that graphs depend on; it differs where that has changed.

        Args:
            training: Whether for training graphs.

        Raises:
            RuntimeError: If it has become another model, or has nothing to train.
        """
        self._check_trainable(training, self.trainable)
        return None

    def _check_trainable(self, training: bool, trainable: Collection[str]) -> None:
        if training and not trainable:
            raise RuntimeError(
                f"{self.name} has no parameter to train: all have requires_grad=False or are in utils.frozen_weights; "
                "eval_step works"
            )

    def names_of_trainable(self) -> dict[str, list[str]]:
        """Returns the parameters to train, each with all its names."""
        aliases: dict[str, list[str]] = {}
        for name, canonical in self.canonical.items():
            aliases.setdefault(canonical, []).append(name)
        return {name: aliases[name] for name in self.trainable}

    @abstractmethod
    def name_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], parameters: Collection[str]
    ) -> dict[str, Any]:
        """Returns the arguments of a step by name, where there is no description yet."""

    def blank_batch(self, description: ModelDescription) -> dict[str, torch.Tensor]:
        """Returns a batch of zeros, with 2 for every size that is open, where the model says what it takes.

        Raises:
            RuntimeError: If only a real batch can tell.
        """
        raise RuntimeError(
            "what the model takes is unknown before the first batch: call prepare(), train_step() or eval_step() first"
        )

    @abstractmethod
    def describe(
        self, batch: Named, layouts: Mapping[str, Layout], parameters: Mapping[str, torch.Tensor]
    ) -> ModelDescription:
        """Returns a description that is derived from a sample batch.

        Args:
            batch: The tensors by input name.
            layouts: How they make the arguments.
            parameters: The loss parameters.
        """

    @abstractmethod
    def builder(
        self,
        description: ModelDescription,
        layouts: Layouts = (),
        parameters: Sequence[str] | None = None,
        portable: bool = False,
    ) -> Builder:
        """Returns what builds the graphs.

        Args:
            description: The model description.
            layouts: The arguments that are not one tensor, each with its layout.
            parameters: The inputs that are loss parameters; None where that is not known yet.
            portable: Whether the graphs are to run elsewhere too, so of ONNX's own operators.

        Raises:
            ValueError: If the description does not fit the model.
        """


def check_names(names: Sequence[str], optim_config: OptimizerConfig, options: ORTTrainerOptions) -> None:
    """Checks that frozen weights and parameter groups name parameters.

    Raises:
        ValueError: If one does not.
    """
    unknown = [name for name in options.utils.frozen_weights if name not in names]
    if unknown:
        raise ValueError(
            f"utils.frozen_weights names {unknown}, which are no parameters of the model; it has {sorted(names)}"
        )
    for group in optim_config.params:
        unknown = [name for name in group["params"] if name not in names]
        if unknown:
            raise ValueError(
                f"a parameter group names {unknown}, which are no parameters of the model; it has {sorted(names)}"
            )


def autocast_dtype(options: ORTTrainerOptions) -> torch.dtype | None:
    """Returns the dtype of mixed precision; None without it."""
    precision = options.mixed_precision
    return getattr(torch, precision.dtype) if precision.enabled else None
