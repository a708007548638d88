"""The common base of the two sources of training graphs: a model with its weights, and a builder of its graphs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..capture.nested import Layout
from ..core.errors import shown, warn
from ..guard.guard import nothing_to_train
from ..guard.memory import ModelMemory, Named
from ..optim import OptimizerConfig
from ..options import ModelDescription, ORTTrainerOptions
from ..step import RandomInput, Step

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..capture.eager import EagerStep
    from .compile_later import Compilation

Layouts = Sequence[tuple[str, Layout]]


class Builder(Protocol):
    """Builds graphs of one model, loss and description."""

    def build(
        self,
        batch: Named,
        training: bool,
        fetched: Sequence[str] | None = None,
        padded: bool = False,
        branching: bool = False,
        anew: bool = False,
    ) -> Step:
        """Returns the training or evaluation graph for a sample batch, best for runs that fetch some outputs.

        If ``padded``, it computes padded places, whatever the options say. ``branching`` says that the model has
        branches on values, and ``anew`` that a kept export does not serve.
        """
        ...

    def compile_later(self, batch: Named, fetched: Sequence[str], step: Step) -> Compilation | None:
        """Begins to compile a training graph for other kernels; see ``export/builder.py``."""
        ...

    def reference(self, batch: Named, tensors: Named) -> tuple[Sequence[torch.Tensor], float]:
        """Returns the outputs of the model itself in evaluation mode, and the relative size of a rounding.

        ``tensors`` are the values of parameters and buffers, by canonical name.
        """
        ...

    def eager(
        self,
        batch: Named,
        tensors: Named,
        scale: float,
        state: torch.Tensor | None,
        random: Iterable[RandomInput] = (),
        shake: int | None = None,
        memory: float = math.inf,
    ) -> EagerStep:
        """Returns the results of a training step of the model itself; see ``capture/eager.py``."""
        ...


class ModelSource(ABC):
    """A model with its weights.

    Attributes:
        name: Name of the model in error messages.
        fixed: Whether its weights can't be changed from outside.
        inputs: Names of its inputs.
        canonical: Every name of a parameter or buffer -> the first name of the same tensor.
        saved: Tensors in a state dict, including tied names, in order; only their shapes and dtypes are used.
        non_persistent: Tensors not in a state dict; only their shapes and dtypes are used.
        trainable: Canonical names of the parameters to train.
        memory: The tensors that the trainer works on.
    """

    name: str
    fixed: bool
    inputs: Sequence[str]
    canonical: Mapping[str, str]
    saved: Named
    non_persistent: Named
    trainable: list[str]
    memory: ModelMemory

    @property
    @abstractmethod
    def parameters(self) -> Named:
        """The model's current parameters by canonical name, trained or not."""

    @property
    @abstractmethod
    def buffers(self) -> Named:
        """The model's current buffers by canonical name."""

    def check_joint(self) -> None:  # noqa: B027 - optional to override
        """Checks that several processes can train it together, each on its part of the data.

        Raises:
            ValueError: If they can't.
        """

    def check(self, training: bool) -> tuple[Hashable, Named]:
        """Asks before a step whether the graphs still mean what the model means.

        Args:
            training: Whether before a training step.

        Returns:
            A key for everything in the model and loss that graphs depend on, which changes with them; and the tensors
            whose memory has changed, by canonical name, usually none.

        Raises:
            RuntimeError: If the model has changed into another one, or has nothing to train.
        """
        if training and not self.trainable:
            raise nothing_to_train(self.name)
        return None, {}

    @property
    def last_change(self) -> str:
        """What has changed in the model since the call of :meth:`check` before the last; empty if unknown."""
        return ""

    @property
    def notes(self) -> Any:
        """The notes of the last export, for :meth:`leave`; None if its runs leave nothing outside."""
        return None

    def compared(self) -> dict[str, Any]:
        """Returns what the first training graph computes and depends on, for several processes to compare.

        These are texts: ``conditions`` on sizes and values, ``operators`` by name, and ``values`` outside tensors by
        place. It is empty for an ONNX model, and where processes may differ by purpose.
        """
        return {}

    def leave(self, notes: Any, tensors: Sequence[torch.Tensor]) -> None:  # noqa: B027 - optional to override
        """Leaves outside, in attributes, containers or variables, what a training step of the model leaves there.

        Args:
            notes: The notes of the graph that has run.
            tensors: Its outputs ``Step.left``.
        """

    def carried(self) -> dict[str, dict[str, Any]]:
        """Returns the state that the model leaves outside tensors and reads again, by path: values and tensors."""
        return {}

    def load_carried(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`carried` has returned, perhaps in another process.

        Raises:
            CheckpointError: If an entry is damaged. Nothing has changed then.
        """
        if state:
            warn(f"the state of {shown(list(state))} outside tensors is ignored, because the model has no such place")

    def put_carried(self) -> bool:
        """Puts the loaded state where it belongs, as far as exports have shown that; returns whether there was any."""
        return False

    def large_constants(self) -> Named:
        """Returns what the model computes with beside parameters and buffers, such as quantized weights in a file."""
        return {}

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
        """Returns the arguments of a step by name, before there is a description."""

    def blank_batch(self, description: ModelDescription) -> dict[str, torch.Tensor]:
        """Returns a batch of zeros, with size 2 for every symbolic dimension, if the model declares its inputs.

        Raises:
            RuntimeError: If only a real batch determines the inputs.
        """
        raise RuntimeError(
            "the model's inputs are unknown before the first batch: call prepare(), train_step() or eval_step() first"
        )

    @abstractmethod
    def describe(
        self, batch: Named, layouts: Mapping[str, Layout], parameters: Mapping[str, torch.Tensor]
    ) -> ModelDescription:
        """Returns a description derived from a sample batch.

        Args:
            batch: The tensors by input name.
            layouts: How the tensors form the arguments.
            parameters: The loss parameters.
        """

    def own_model(self, tensors: Named, outputs: Sequence[str] | None) -> ir.Model | None:
        """Returns the user's own ONNX model with other weights; None if the user's model is not in ONNX.

        Args:
            tensors: Parameters and buffers by canonical name.
            outputs: Names of outputs, for a model in inference form that has only these. None for the whole model.
        """
        return None

    @abstractmethod
    def builder(
        self,
        description: ModelDescription,
        layouts: Layouts = (),
        parameters: Sequence[str] | None = None,
        portable: bool = False,
    ) -> Builder:
        """Returns a builder of graphs.

        Args:
            description: The model description.
            layouts: The arguments that are not one tensor, each with its layout.
            parameters: The inputs that are loss parameters; None if not known yet.
            portable: Whether the graphs must run on other engines too, so have only standard ONNX operators.

        Raises:
            ValueError: If the description does not fit the model.
        """


def check_names(names: Sequence[str], optim_config: OptimizerConfig, options: ORTTrainerOptions) -> None:
    """Checks that frozen weights and parameter groups name known parameters.

    Raises:
        ValueError: If a name is unknown.
    """
    unknown = [name for name in options.utils.frozen_weights if name not in names]
    if unknown:
        raise ValueError(f"unknown parameters {unknown} in utils.frozen_weights: the model has {sorted(names)}")
    for group in optim_config.params:
        unknown = [name for name in group["params"] if name not in names]
        if unknown:
            raise ValueError(f"unknown parameters {unknown} in a parameter group: the model has {sorted(names)}")


def autocast_dtype(options: ORTTrainerOptions) -> torch.dtype | None:
    """Returns the dtype of mixed precision; None without it."""
    precision = options.mixed_precision
    return getattr(torch, precision.dtype) if precision.enabled else None
