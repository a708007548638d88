"""``model_desc="auto"``: derives the model description from a sample batch and one forward pass, on copies of both."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import ExportError, shown
from ..core.signatures import signature_of
from ..engine.devices import device_of
from ..fx.explain import gradients_within, place_of_error
from ..options import ModelDescription
from ..outside.recorder import Pair, Recorder
from .borrow import borrowed
from .eager import random_state_kept
from .isolation import can_isolate, run_in_child
from .nested import Layout, argument_of, flatten, has_tensors, rebuild
from .step_module import (
    LossFunction,
    checked_loss,
    label_parameters,
    labels_beside_any_name,
    named_outputs,
    required_inputs,
    signature_of_loss,
    takes_label,
    unset_labels,
)

# Inputs of Hugging Face models with one entry per token of the sequence.
_ALONG_THE_SEQUENCE = ("attention_mask", "token_type_ids", "position_ids")


def name_sample(
    model: nn.Module,
    loss_fn: LossFunction | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parameters: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the arguments of a step by name; positional ones are first those of ``forward``, then the labels.

    The ``parameters`` are arguments of the loss function that are not labels.

    Raises:
        TypeError: If there are more arguments than ``forward`` takes, or one is given twice.
    """
    names = _argument_names(model)
    unknown = [name for name in kwargs if name not in names]
    # With a loss_fn, one of the unknown arguments is the label.
    if unknown and (loss_fn is None or len(args) > len(names)) and not _takes_any_name(model):
        raise TypeError(
            f"unexpected input {unknown[0]!r}: forward() of {type(model).__name__} takes {names}{_for_label(loss_fn)}"
        )
    tensors: dict[str, Any] = {}
    for name, value in kwargs.items():
        flatten(name, value, tensors)
    names = [name for name in _argument_names(model, keywords=False) if tensors or name not in kwargs]
    labels, extra = [], len(args) - len(names)
    if loss_fn is not None and (extra > 0 or not tensors):
        labels = [_unused(label, names) for label in _label_names(loss_fn, parameters, extra)]
        if tensors:  # the keyword arguments have the other labels
            labels = labels[:extra]
    names = [*names[: max(len(args) - len(labels), 0)], *labels]
    if len(args) > len(names):
        raise TypeError(
            f"{len(args)} inputs were given, but forward() of {type(model).__name__} takes {names}{_for_label(loss_fn)}"
        )
    by_position = dict(zip(names, args, strict=False))
    twice = [name for name in kwargs if name in by_position]
    if twice:
        raise TypeError(f"inputs {twice} were given both by position and by name")
    return {**by_position, **kwargs}


def _for_label(loss_fn: LossFunction | None) -> str:
    """Returns advice for an input that the model does not take."""
    return "; if one is the label, pass the loss function as loss_fn" if loss_fn is None else ""


def _label_names(loss_fn: LossFunction, others: Collection[str], least: int) -> list[str]:
    """Returns the names of a loss function's labels: ``label``, then the function's own names for the others.

    Args:
        loss_fn: The loss function.
        others: Its parameters that are not labels.
        least: The minimum number of labels.
    """
    parameters = [p for p in label_parameters(loss_fn) or () if p.name not in others]
    names = [p.name for p in parameters]
    count = max(sum(p.default is p.empty for p in parameters), int(takes_label(loss_fn, others)), least)
    further = [names[number] if number < len(names) else f"label_{number + 1}" for number in range(1, count)]
    return ["label", *further][:count]


def _takes_any_name(model: nn.Module) -> bool:
    return any(p.kind == p.VAR_KEYWORD for p in signature_of(model.forward).parameters.values())


def _argument_names(model: nn.Module, keywords: bool = True) -> list[str]:
    """Returns the names of the arguments of ``forward``; without ``keywords``, those that it also takes by position."""
    parameters = signature_of(model.forward).parameters.values()
    kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD, *[inspect.Parameter.KEYWORD_ONLY] * keywords]
    return [p.name for p in parameters if p.kind in kinds]


def describe(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batch: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    parameters: Mapping[str, torch.Tensor],
    padding_mask: str = "",
) -> ModelDescription:
    """Returns a description of a model.

    The first dimension of every input is dynamic, and is called ``batch`` if all first dimensions have the same size.
    All dimensions of integer inputs (tokens, masks) are dynamic. The other dimensions of floating-point inputs have the
    sizes of the sample.

    Args:
        model: The model.
        loss_fn: The loss function; its labels are the arguments that ``forward`` does not take, or the last argument if
            ``forward`` takes all of them.
        batch: The tensors of the sample by input name.
        layouts: How to build the arguments from the tensors.
        parameters: The loss parameters.
        padding_mask: The input that says which places are padded, which integer inputs of its sizes have, too.

    Raises:
        TypeError: If the label is missing, or ``loss_fn`` does not take the labels.
        ValueError: If it is unclear which output is the loss.
        ExportError: If the model returns no tensors.
    """
    if loss_fn is not None and len(batch) < 2 and takes_label(loss_fn, parameters) and required_inputs(model):
        raise TypeError(
            "with a loss_fn a batch needs the inputs of forward() and a label, but "
            + (_to_convert(layouts) or f"only {len(batch)} value was given")
        )
    labels = () if loss_fn is None else _labels(model, loss_fn, layouts, parameters)
    batch = {
        **{name: value for name, value in batch.items() if argument_of(name) not in labels},
        **{name: value for name, value in batch.items() if argument_of(name) in labels},
    }
    inputs = [(name, list(shape)) for name, shape in input_shapes(batch, padding_mask).items()]

    # forward() may do anything to Python objects; its side effects stay in the child.
    def described_outputs() -> list[tuple[str, list[str], bool]]:
        outputs: dict[str, torch.Tensor] = {}
        for name, value in _outputs(model, loss_fn, batch, layouts, labels, parameters):
            outputs[_unused(name, outputs)] = value  # {"a_b": x, "a": {"b": y}}
        return _described(outputs, batch, unset_labels(model, [*map(argument_of, batch)]))

    answer = run_in_child(lambda: json.dumps(described_outputs()).encode()) if can_isolate() else None
    outputs = described_outputs() if answer is None else json.loads(answer)
    return ModelDescription({"inputs": inputs, "outputs": [tuple(output) for output in outputs]}, inferred=True)


def _described(
    outputs: Mapping[str, torch.Tensor], inputs: Iterable[str], unset: str
) -> list[tuple[str, list[str], bool]]:
    """Returns the outputs in the form of a description, with names that differ from the inputs'."""
    loss = _find_loss(outputs, unset)
    taken = list(inputs)
    described = []
    for name, value in outputs.items():
        unique = _unused(name, taken)
        taken.append(unique)
        shape = [] if name == loss else [f"{unique}_{axis}" for axis in range(value.dim())]
        described.append((unique, shape, name == loss))
    return described


def _unused(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _labels(
    model: nn.Module, loss_fn: LossFunction, arguments: Collection[str], parameters: Collection[str]
) -> list[str]:
    """Returns the labels: the arguments that ``forward`` does not take, or the last one if it takes them all."""
    accepted = _argument_names(model)
    if _takes_any_name(model):
        labels = labels_beside_any_name(list(arguments), accepted, loss_fn, parameters)
    else:
        labels = [name for name in arguments if name not in accepted]
        if not labels and takes_label(loss_fn, parameters):
            labels = list(arguments)[-1:]
    signature = signature_of_loss(loss_fn)
    try:
        if signature is not None:
            signature.bind_partial(None, *labels)
    except TypeError as error:
        raise TypeError(
            f"model_desc='auto': forward() of {type(model).__name__} takes {accepted}, so {labels} are for loss_fn, "
            f"but loss_fn does not take them: {error}"
        ) from None
    return labels


def input_shapes(batch: Mapping[str, torch.Tensor], padding_mask: str = "") -> dict[str, tuple[int | str, ...]]:
    """Returns the sizes of inputs, and names of those that are dynamic; see :func:`describe`."""
    first_sizes = {value.shape[0] for name, value in batch.items() if value.dim() and argument_of(name) == name}
    shapes: dict[str, tuple[int | str, ...]] = {}
    sequence: int | None = None
    if padding_mask in batch and batch[padding_mask].dim() == 2:
        sequence = batch[padding_mask].shape[1]
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
            elif (padding_mask or name in _ALONG_THE_SEQUENCE) and value.dim() == 2 and value.shape[1] == sequence:
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
    """Runs a step on copies, without side effects, and yields the names and values of its outputs."""
    tensors = {name: value.clone() for name, value in batch.items()}
    data = {argument: rebuild(layout, tensors) for argument, layout in layouts.items()}
    label_values = [data.pop(label) for label in labels]
    step = Pair(model, loss_fn)
    trainable = [name for name, parameter in step.named_parameters() if parameter.requires_grad]
    # With gradients, as forward() may register hooks for them.
    with (
        borrowed(step, trainable, training=True, modes=_own_modes(model, loss_fn)),
        Recorder(step).running(),
        torch.enable_grad(),
        random_state_kept(device_of([*tensors.values(), *step.parameters()])),
    ):
        what = type(model).__name__
        try:
            result = model(**data, **({} if loss_fn is not None else parameters))
            loss, what = None, "loss_fn"
            if loss_fn is not None:
                loss = loss_fn(result, *label_values, **parameters)
                if loss is None:
                    raise ExportError(
                        f"loss_fn returned None for the prediction and the labels {list(labels)}; if it reads a loss "
                        "that forward() stores, let it take the prediction alone, so that forward() gets all inputs"
                    )
                checked_loss(loss)
        except ExportError:
            raise
        except Exception as error:
            raise ExportError(
                gradients_within(error, type(model).__name__)
                or f"model_desc='auto' runs {what} on the first batch to find its outputs, but the run failed: "
                f"{type(error).__name__}: {error}{place_of_error(error)}\n"
                f"Is this the batch that was meant? {shown(dict(batch))} {_to_convert(layouts)}".rstrip()
                + _to_classes(error, {label: batch[label] for label in labels if label in batch})
                + _to_weights(error, model, data)
            ) from error
        if loss is not None:
            yield "loss", loss
        # Outputs after a non-tensor, such as a cache of keys and values, can't be described.
        for name, value in named_outputs(result):
            if not isinstance(value, torch.Tensor):
                break
            yield name, value


def _own_modes(model: nn.Module, loss_fn: Any) -> dict[nn.Module, bool]:
    """Returns the modules that keep modes of their own; see :class:`ExportedStep`."""
    of_model = {part: part.training for part in model.modules()}
    of_loss = {part: part.training for part in loss_fn.modules()} if isinstance(loss_fn, nn.Module) else {}
    others = {part: mode for part, mode in of_loss.items() if part not in of_model}
    return others | (of_model if len(set(of_model.values())) > 1 else {})


def _to_convert(layouts: Mapping[str, Layout]) -> str:
    """Returns advice to convert arguments that are lists or numbers to tensors; empty if there are none."""
    lists = {name: layout[1] for name, layout in layouts.items() if layout[0] in ("list", "tuple")}
    stacked = [name for name, parts in lists.items() if parts and all(part[0] == "tensor" for part in parts)]
    others = [name for name in lists if not has_tensors(layouts[name])]
    others += [name for name, layout in layouts.items() if layout[:2] in (("value", int), ("value", float))]
    return " and ".join(
        f"{names} are no tensors: make them with torch.{function}(...)"
        for names, function in ((others, "tensor"), (stacked, "stack"))
        if names
    )


def _to_weights(error: Exception, model: nn.Module, data: Mapping[str, Any]) -> str:
    """Returns advice to convert inputs of another floating-point dtype than the weights, if that is the error."""
    kinds = {weight.dtype for weight in model.parameters() if weight.dtype.is_floating_point}
    if "dtype" not in str(error) or len(kinds) != 1:
        return ""
    (kind,) = kinds
    return "".join(
        f"\ninput {name!r} has dtype {value.dtype}, and the weights {kind}: use .to({kind})"
        for name, value in data.items()
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dtype != kind
    )


def _to_classes(error: Exception, labels: Mapping[str, torch.Tensor]) -> str:
    """Returns advice to convert labels, if a loss that takes numbers of classes refuses their dtype; else ""."""
    refused = [name for name, value in labels.items() if value.dtype != torch.int64]
    if "Long" not in str(error) or not refused:
        return ""
    return "".join(f"\nlabel {name!r} has dtype {labels[name].dtype}: use .to(torch.int64)" for name in refused)


def _find_loss(outputs: Mapping[str, torch.Tensor], unset: str) -> str:
    """Returns the name of the loss: ``loss``, the only scalar, or a scalar that comes first."""
    if not outputs:
        raise ExportError("model_desc='auto': the model returns no tensor")
    scalars = [name for name, value in outputs.items() if value.numel() == 1 and value.is_floating_point()]
    if "loss" in scalars:
        return "loss"
    if len(scalars) == 1 or (scalars and scalars[0] == next(iter(outputs))):
        return scalars[0]
    shapes = {name: list(value.shape) for name, value in outputs.items()}
    raise ValueError(
        f"model_desc='auto': can't tell which output is the loss. The model returns {shapes}: "
        + (unset or "return the loss as 'loss' or first (a loss only stored, as in self.last_loss, is not seen)")
        + ", or pass a loss_fn, or write a model_desc"
    )
