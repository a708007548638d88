"""The model description: names and shapes of inputs and outputs, symbolic dimensions, and which output is the loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import shown
from .schema import SchemaValidator, flatten_errors, load_schema
from .section import FrozenList

_EXAMPLE = (
    "an example is {'inputs': [('x', ['batch', 784]), ('label', ['batch'])], "
    "'outputs': [('loss', [], True), ('logits', ['batch', 10])]}"
)


class _Entry:
    """Makes a description work like the tuple that users write: indexed or unpacked."""

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self).values())

    def __len__(self) -> int:
        return len(vars(self))

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]


@dataclass(frozen=True)
class InputDescription(_Entry):
    """An input of the model or, in last place, the label of the loss function.

    Attributes:
        name: Name of the argument of ``forward``; a label's name is free.
        shape: One entry per dimension: a size, or the name of a dimension whose size may change from step to step.
    """

    name: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}"


@dataclass(frozen=True)
class OutputDescription(_Entry):
    """An output. Outputs are in the model's order, after the loss if there is a loss function."""

    name: str
    shape: tuple[int | str, ...]
    is_loss: bool = False


class _DescriptionValidator(SchemaValidator):
    def _check_with_input_description(self, field: Any, value: Any) -> None:
        self._check_entry(field, value, sizes=(2,))

    def _check_with_output_description(self, field: Any, value: Any) -> None:
        if not self._check_entry(field, value, sizes=(2, 3)) or len(value) == 2:
            return
        if not isinstance(value[2], bool):
            self._error(field, "the third element of the tuple (aka is_loss) must be a boolean")
        elif value[2] and any(_is_loss(self.document[earlier]) for earlier in range(field)):
            self._error(field, "only one is_loss can bet set to True")

    def _check_entry(self, field: Any, value: Any, sizes: tuple[int, ...]) -> bool:
        if not isinstance(value, tuple) or len(value) not in sizes:
            self._error(field, f"must be a tuple with size {' or '.join(map(str, sizes))}")
            return False
        name, shape = value[:2]
        if not isinstance(name, str):
            self._error(field, "the first element of the tuple (aka name) must be a string")
        elif not name:
            self._error(field, "the first element of the tuple (aka name) must not be empty")
        if not isinstance(shape, list):
            self._error(field, "the second element of the tuple (aka shape) must be a list")
            return True
        for size in shape:
            if isinstance(size, bool) or not isinstance(size, (int, str)):
                self._error(field, "each shape must be either a string or integer")
            elif isinstance(size, int) and size < 1:
                self._error(field, f"each integer of a shape must be positive, but {size} was given")
            elif size == "":
                self._error(field, "a symbolic dimension needs a name, but the empty string was given")
        return True


def _is_loss(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 3 and entry[2] is True


class ModelDescription:
    """A validated, immutable model description.

    Args:
        model_desc: ``{"inputs": [(name, shape), ...], "outputs": [(name, shape[, is_loss]), ...]}``, as documented in
            the README. It is neither changed nor stored.
        inferred: Whether it was derived from a sample, and the shapes of outputs are not known yet.
        corrected: Whether input shapes were corrected, so that output shapes may be wrong, too.

    Raises:
        TypeError: If it is not a dict.
        ValueError: If it is invalid; the message starts with ``Invalid model_desc: `` and lists all errors.
    """

    def __init__(self, model_desc: Mapping[str, Any], inferred: bool = False, corrected: bool = False) -> None:
        if not isinstance(model_desc, Mapping):
            raise TypeError(
                "model_desc must be a dict with 'inputs' and 'outputs', or 'auto', which derives it from the first "
                f"batch, but a {type(model_desc).__name__} was given: {_EXAMPLE}"
            )
        validator = _DescriptionValidator(load_schema("model_desc"))
        if not validator.validate(dict(model_desc)):
            errors = "; ".join(
                f"{'.'.join(map(str, path))}: {message}" for path, message in flatten_errors(validator.errors)
            )
            raise ValueError(f"Invalid model_desc: {errors}. {_EXAMPLE[0].upper()}{_EXAMPLE[1:]}")
        self.inputs = tuple(InputDescription(name, FrozenList(shape)) for name, shape in model_desc["inputs"])
        self.outputs = tuple(
            OutputDescription(e[0], FrozenList(e[1]), len(e) == 3 and e[2]) for e in model_desc["outputs"]
        )
        self.inferred, self.corrected = inferred, corrected
        names = [*self.input_names, *self.output_names]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"Invalid model_desc: names must be unique, but {repeated} are repeated")
        if not any(output.is_loss for output in self.outputs):
            raise ValueError(
                "Invalid model_desc: outputs: one output must be the loss, marked by a third element True: "
                f"('{self.outputs[0].name}', {list(self.outputs[0].shape)}, True)"
            )

    @property
    def loss(self) -> OutputDescription:
        """The output that is minimized."""
        return next(output for output in self.outputs if output.is_loss)

    @property
    def input_names(self) -> list[str]:
        """Names of all inputs in order."""
        return [entry.name for entry in self.inputs]

    @property
    def output_names(self) -> list[str]:
        """Names of all outputs in order."""
        return [entry.name for entry in self.outputs]

    def inference_names(self, chosen: Sequence[str] | None = None) -> list[str]:
        """Returns the names of outputs for inference, which are without the loss.

        Args:
            chosen: The names that the user passed; None for all but the loss.

        Raises:
            TypeError: If it is not a list of names.
            ValueError: If it is empty, or has an unknown name, the loss, or a repeated name; or if the loss is the only
                described output.
        """
        names = [output.name for output in self.outputs if not output.is_loss]
        if not names:
            raise ValueError(
                "model_desc describes only the loss, so there is no output for inference: describe the prediction too"
            )
        if chosen is None:
            return names
        if not isinstance(chosen, (list, tuple)) or not all(isinstance(name, str) for name in chosen):
            raise TypeError(f"output_names must be a list of names, but {shown(chosen)} was given: choose from {names}")
        if not chosen:
            raise ValueError(f"output_names is empty: name at least one of {names}, or leave it out")
        if self.loss.name in chosen:
            raise ValueError(
                f"output_names has the loss, {self.loss.name!r}, which needs the label and is not for inference: "
                f"choose from {names}, or write all outputs with save_as_onnx()"
            )
        wrong = [name for name in chosen if name not in names]
        if wrong:
            raise ValueError(f"output_names has unknown names {wrong}: choose from {names}")
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"output_names has a repeated name: {list(chosen)}")
        return list(chosen)

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Returns the size of every symbolic dimension for the shapes of a batch (input name -> shape)."""
        return {
            symbol: size
            for entry in self.inputs
            for symbol, size in zip(entry.shape, shapes.get(entry.name, ()), strict=False)
            if isinstance(symbol, str)
        }

    @property
    def has_open_outputs(self) -> bool:
        """Whether output shapes in the description may differ from those of the model."""
        return self.inferred or self.corrected

    def widened(self, shapes: Mapping[str, tuple[int, ...]], correct: bool = False) -> ModelDescription:
        """Returns a copy in which fixed input sizes that differ from the given shapes are dynamic; itself if none do.

        Args:
            shapes: Input name -> shape.
            correct: Whether to replace the shape of an input with a different number of dimensions.
        """
        description = self.to_dict()
        inputs = [(entry.name, _widened(entry, shapes.get(entry.name, entry.shape), correct)) for entry in self.inputs]
        if inputs == description["inputs"]:
            return self
        return ModelDescription({**description, "inputs": inputs}, self.inferred, self.corrected or correct)

    def to_dict(self) -> dict[str, Any]:
        """Returns the description as a dict in the form that users give."""
        return {
            "inputs": [(entry.name, list(entry.shape)) for entry in self.inputs],
            "outputs": [(entry.name, list(entry.shape), entry.is_loss) for entry in self.outputs],
        }

    def __str__(self) -> str:
        outputs = [e.name + (" (the loss)" if e.is_loss and e.name != "loss" else "") for e in self.outputs]
        return f"inputs {', '.join(map(str, self.inputs))}; outputs {', '.join(outputs)}"

    def __repr__(self) -> str:
        return f"ModelDescription(inputs={self.inputs!r}, outputs={self.outputs!r})"


def _widened(entry: InputDescription, batch_shape: tuple[int | str, ...], correct: bool) -> list[int | str]:
    """Returns an input's shape in which the sizes that differ from a batch's are dynamic."""
    described_shape = list(entry.shape)
    if len(batch_shape) == len(described_shape):
        pairs = enumerate(zip(described_shape, batch_shape, strict=True))
        return [f"{entry.name}_{axis}" if isinstance(old, int) and old != new else old for axis, (old, new) in pairs]
    if not correct:
        return described_shape
    pairs_of_both = itertools.zip_longest(described_shape[: len(batch_shape)], batch_shape)
    return [old if isinstance(old, str) else new for old, new in pairs_of_both]
