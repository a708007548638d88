"""``model_desc="auto"``: derives the model description from a sample batch and one forward pass, on copies of both."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import ExportError
from ...nested import Layout, argument_of, rebuild
from ...options import ModelDescription
from .borrow import borrowed
from .isolation import can_isolate, run_in_child
from .source_lines import differentiates_in, source_line_of_error
from .step_module import LossFunction, label_parameters, named_outputs

__all__ = ["describe", "name_sample"]

# Inputs of HuggingFace's models that go with every token of the sequence.
_ALONG_THE_SEQUENCE = ("attention_mask", "token_type_ids", "position_ids")


def name_sample(
    model: nn.Module,
    loss_fn: LossFunction | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parameters: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the arguments of a step by name; positional ones are those of ``forward`` in order, then the labels.

    The ``parameters`` are arguments of the loss function that are no labels.

    Raises:
        TypeError: If there are more than ``forward`` takes, or one is given twice.
    """
    names = _argument_names(model)
    unknown = [name for name in kwargs if name not in names]
    # With a loss_fn one of them is the label.
    if unknown and (loss_fn is None or len(args) > len(names)) and not _takes_any_name(model):
        raise TypeError(f"unexpected input {unknown[0]!r}: forward() of {type(model).__name__} takes {names}")
    labels: list[str] = []
    if loss_fn is not None and not kwargs:
        labels = [_unused(label, names) for label in _label_names(loss_fn, parameters, len(args) - len(names))]
    count = len(labels)
    names = [*names[: max(len(args) - count, 0)], *labels]
    if len(args) > len(names):
        raise TypeError(f"{len(args)} inputs were given, but forward() of {type(model).__name__} takes {names}")
    given = dict(zip(names, args, strict=False))
    twice = [name for name in kwargs if name in given]
    if twice:
        raise TypeError(f"inputs {twice} were given both by position and by name")
    return {**given, **kwargs}


def _label_names(loss_fn: LossFunction, others: Collection[str], least: int) -> list[str]:
    """Returns names of the labels that a loss function asks for: ``label``, and its own names of further ones.

    Args:
        loss_fn: The loss function.
        others: Its parameters that are no labels.
        least: How many labels there are at least.
    """
    parameters = label_parameters(loss_fn)
    if parameters is None:
        names, count = [], 1
    else:
        names = [p.name for p in parameters if p.name not in others]
        required = sum(p.default is p.empty and p.name not in others for p in parameters)
        count = max(required, 1) if parameters else 0
    count = max(count, least)
    further = [names[number] if number < len(names) else f"label_{number + 1}" for number in range(1, count)]
    return ["label", *further][:count]


def _takes_any_name(model: nn.Module) -> bool:
    return any(p.kind == p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())


def _argument_names(model: nn.Module) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def describe(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batch: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    parameters: Mapping[str, torch.Tensor],
) -> ModelDescription:
    """Returns a description of a model.

    The first dimension of every input is dynamic and called ``batch`` where all first dimensions have one size. All
    dimensions of integer inputs (tokens, masks) are dynamic. The others of floating-point inputs are as in the sample.

    Args:
        model: The model.
        loss_fn: The loss function; its labels are the arguments that ``forward`` does not take, or the last one if it
            takes any.
        batch: The tensors of the sample by input name.
        layouts: How they make the arguments.
        parameters: The loss parameters.

    Raises:
        TypeError: If the label is missing.
        ValueError: If it is not clear which input is the label or which output is the loss.
        ExportError: If the model returns no tensors.
    """
    if loss_fn is not None and len(batch) < 2 and label_parameters(loss_fn) != []:
        raise TypeError(
            f"with a loss_fn a batch has the inputs of forward() and a label, but only {len(batch)} value was given"
        )
    labels = () if loss_fn is None else _labels(model, loss_fn, layouts)
    batch = {
        **{name: value for name, value in batch.items() if argument_of(name) not in labels},
        **{name: value for name, value in batch.items() if argument_of(name) in labels},
    }
    inputs = [(name, list(shape)) for name, shape in _input_shapes(batch).items()]

    # What forward() does to Python objects, and it may do anything, stays in the child.
    def found() -> list[tuple[str, list[str], bool]]:
        return _described(dict(_outputs(model, loss_fn, batch, layouts, labels, parameters)), batch)

    answer = run_in_child(lambda: json.dumps(found()).encode()) if can_isolate() else None
    outputs = found() if answer is None else json.loads(answer)
    return ModelDescription({"inputs": inputs, "outputs": [tuple(output) for output in outputs]}, inferred=True)


def _described(outputs: Mapping[str, torch.Tensor], inputs: Iterable[str]) -> list[tuple[str, list[str], bool]]:
    """Returns the outputs as a description has them, with names that no input has."""
    loss = _find_loss(outputs)
    taken = list(inputs)
    described = []
    for name, value in outputs.items():
        unique = _unused(name, taken)
        taken.append(unique)
        shape = [] if name == loss else [f"{unique}_{axis}" for axis in range(value.dim())]
        described.append((unique, shape, name == loss))
    return described


def _unused(name: str, taken: list[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _labels(model: nn.Module, loss_fn: LossFunction, arguments: Collection[str]) -> list[str]:
    """Returns the arguments that are labels: those that ``forward`` does not take, or the last one if it takes any."""
    accepted = _argument_names(model)
    labels = [name for name in arguments if name not in accepted]
    if not labels and label_parameters(loss_fn) != []:
        labels = list(arguments)[-1:]
    try:
        inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn).bind_partial(None, *labels)
    except ValueError:  # some built-in functions have no signature
        return labels
    except TypeError as error:
        raise TypeError(
            f"model_desc='auto': forward() of {type(model).__name__} takes {accepted}, so {labels} are for loss_fn, "
            f"which does not take them: {error}"
        ) from None
    return labels


def _input_shapes(batch: Mapping[str, torch.Tensor]) -> dict[str, tuple[int | str, ...]]:
    first_sizes = {value.shape[0] for name, value in batch.items() if value.dim() and argument_of(name) == name}
    shapes: dict[str, tuple[int | str, ...]] = {}
    sequence: int | None = None
    for name, value in batch.items():
        shape: list[int | str] = list(value.shape)
        if argument_of(name) != name and len(first_sizes) == 1:
            shapes[name] = _shape_of_part(value, *first_sizes)
            continue
        if value.dim():
            shape[0] = "batch" if len(first_sizes) == 1 else f"{name}_0"
        if not value.is_floating_point():
            shape[1:] = [f"{name}_{axis}" for axis in range(1, value.dim())]
            if value.dim() == 2 and sequence is None:
                sequence = int(value.shape[1])
                shape[1] = "sequence"
            elif value.dim() == 2 and name in _ALONG_THE_SEQUENCE and value.shape[1] == sequence:
                shape[1] = "sequence"
        shapes[name] = tuple(shape)
    return shapes


def _shape_of_part(value: torch.Tensor, batch: int) -> tuple[int | str, ...]:
    """Returns the shape of a part of an argument, such as a recurrent layer's state, whose batch is in the middle."""
    places = [axis for axis, size in enumerate(value.shape) if size == batch]
    place = 1 if value.dim() == 3 and 1 in places else places[0] if places else None
    return tuple("batch" if axis == place else size for axis, size in enumerate(value.shape))


def _outputs(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batch: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    labels: Sequence[str],
    parameters: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and values of a step's outputs, of a run on copies that leaves no trace."""
    tensors = {name: value.clone() for name, value in batch.items()}
    data = {argument: rebuild(layout, tensors) for argument, layout in layouts.items()}
    given = [data.pop(label) for label in labels]
    step = nn.ModuleList(part for part in (model, loss_fn) if isinstance(part, nn.Module))
    with borrowed(step, (), training=True), torch.no_grad(), torch.random.fork_rng():
        try:
            result = model(**data, **({} if loss_fn is not None else parameters))
            loss = None if loss_fn is None else loss_fn(result, *given, **parameters)
        except ExportError:
            raise
        except Exception as error:
            if differentiates_in(error):
                from .explain import gradients_within  # which imports what an export needs

                raise ExportError(
                    f"{type(model).__name__} can't be captured: {gradients_within()}\n  {source_line_of_error(error)}"
                ) from error
            raise ExportError(
                f"model_desc='auto' runs {type(model).__name__} on the first batch to see what it returns, which "
                f"failed: {type(error).__name__}: {error}\n  {source_line_of_error(error)}"
            ) from error
        if loss is not None:
            yield "loss", loss
        # What comes behind something that is no tensor, such as a cache of keys and values, can't be described.
        for name, value in named_outputs(result):
            if not isinstance(value, torch.Tensor):
                break
            yield name, value


def _find_loss(outputs: Mapping[str, torch.Tensor]) -> str:
    if not outputs:
        raise ExportError("model_desc='auto': the model returns no tensor")
    scalars = [name for name, value in outputs.items() if value.numel() == 1 and value.is_floating_point()]
    if "loss" in scalars:
        return "loss"
    if len(scalars) == 1 or (scalars and scalars[0] == next(iter(outputs))):
        return scalars[0]
    shapes = {name: list(value.shape) for name, value in outputs.items()}
    raise ValueError(
        f"model_desc='auto': it is not clear which output is the loss. The model returns {shapes}: let it return the "
        "loss as 'loss' or in first place, give a loss_fn, or write a model_desc. (Is the label missing in the batch?)"
    )
