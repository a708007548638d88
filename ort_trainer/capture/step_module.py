"""Wraps model and loss in one module that takes and returns flat tensors only, as the exporter requires."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import ExportError, shown
from ..core.signatures import signature_of
from ..engine.devices import device_of
from ..fx.explain import forward_line
from ..options import ModelDescription
from ..outside.numbers import TensorsAsNumbers, text_of
from ..outside.places import Place
from ..outside.recorder import Recorder
from ..outside.values import memory_of
from .borrow import AssignedBuffers
from .branches import Answers, Branches
from .nested import Layout, argument_of, rebuild

LossFunction = Callable[..., torch.Tensor]
"""(prediction, label, ...) -> scalar loss; the label is optional."""


@dataclasses.dataclass(frozen=True)
class RecomputeOptions:
    """What is recomputed in the backward pass.

    Attributes:
        attention_dropout: The dropout on attention weights.
        gelu: GELU activations.
        layers: Whole layers.
        layer_count: The number of layers, counted from the first; 0 means all but the last.
        cheap: Every value that elementwise operations can compute from saved ones.
    """

    attention_dropout: bool = False
    gelu: bool = False
    layers: bool = False
    layer_count: int = 0
    cheap: bool = False


@dataclasses.dataclass(frozen=True)
class ExportedStep:
    """What is exported.

    Attributes:
        model: The user's model; the export restores it.
        description: The model description.
        loss_fn: The loss function, or None if the model returns the loss.
        labels: The arguments of the loss function; None for the last argument, if there is a loss function.
        parameters: The inputs that are loss parameters: keyword arguments of the loss function, or of the model if
            there is no loss function.
        layouts: The arguments that are not one tensor, with their layouts.
        trainable: Canonical names of the parameters to train.
        modes: Modules that keep modes of their own -> whether each is in training mode: those of the loss, and all of a
            model in which some are in training mode and others are not.
        autocast: dtype of mixed precision, or None.
        opset: ONNX operator set.
        simplified: Whether to simplify the translated graph.
        recompute: What the backward pass recomputes.
        kernels: Whose kernels run the training step: ``onnxruntime``, ``pytorch``, or ``auto`` for PyTorch's if
            possible.
        fast_random: Whether dropout samples its masks in a faster way than PyTorch.
        loss_of_first: Whether the loss function takes the first of the outputs that the model returns.
        unfetched: Outputs that runs of a training step probably don't fetch.
        padding_mask: The input that says which places of a batch are padded, to leave them out; empty to compute all.
        carries: Whether tensors from outside are inputs of the graph, and those that a run leaves outside are results;
            otherwise they are constants, and what is left is dropped.
        numbers: Places of numbers that change from run to run.
        tables: Places of tables that depend on sizes alone, and what was there before the first run.
        answers: What a run of the step in PyTorch has read of values; None if there was none.
        joint: Whether several processes train it, and compare what they have captured.
    """

    model: nn.Module
    description: ModelDescription
    loss_fn: LossFunction | None
    trainable: frozenset[str]
    labels: tuple[str, ...] | None = None
    parameters: tuple[str, ...] = ()
    layouts: Mapping[str, Layout] = dataclasses.field(default_factory=dict)
    modes: Mapping[nn.Module, bool] = dataclasses.field(default_factory=dict)
    autocast: torch.dtype | None = None
    opset: int = 18
    simplified: bool = True
    recompute: RecomputeOptions = RecomputeOptions()
    kernels: str = "onnxruntime"
    fast_random: bool = False
    loss_of_first: bool = False
    unfetched: frozenset[str] = frozenset()
    padding_mask: str = ""
    carries: bool = False
    numbers: frozenset[Place] = frozenset()
    tables: Mapping[Place, Any] = dataclasses.field(default_factory=dict)
    answers: Answers | None = None
    joint: bool = False

    def autocast_for(self, sample: Sequence[torch.Tensor]) -> torch.autocast:
        """Returns PyTorch's autocast context for a sample's device, disabled without mixed precision."""
        kind = self.device_for(sample).type
        return torch.autocast(kind, self.autocast or torch.float16, enabled=self.autocast is not None)

    def device_for(self, sample: Iterable[torch.Tensor]) -> torch.device:
        """Returns the device of a sample, or of the model if there is no input."""
        return device_of([*sample, *self.model.parameters()])

    def modes_in(self, training: bool) -> Mapping[nn.Module, bool]:
        """Returns the modules that keep their modes in a training step, or in evaluation: those of the loss alone."""
        of_model = () if training else set(self.model.modules())
        return {part: mode for part, mode in self.modes.items() if part not in of_model}

    def module(self) -> StepModule:
        """Returns the step as a function of flat tensors."""
        return StepModule(self)


def canonical_names(model: nn.Module, within: nn.Module | None = None) -> dict[str, str]:
    """Maps every name of a parameter or buffer to the first name of the same tensor: tied weights share a name.

    Args:
        model: The model.
        within: A module around it, whose names of the model's tensors are mapped; None for the model itself.

    Raises:
        ExportError: If the model makes other tensors whenever it is asked for them.
    """
    of_model, named = (
        [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for module in (model, within or model)
    )
    first: dict[int, str] = {}
    for name, tensor in of_model:
        first.setdefault(id(tensor), name)
    if within is None:
        others = [name for name, tensor in named if id(tensor) not in first]
        if others:
            raise ExportError(
                f"{type(model).__name__} replaces {others[0]!r} whenever it runs or its parameters are listed, as "
                "peft's LoRA of nn.MultiheadAttention does, which a graph can't do: adapt Linear layers instead "
                "(target_modules), or train with ORTModule, which runs this model in PyTorch"
            )
    return {name: first[id(tensor)] for name, tensor in named if id(tensor) in first}


def check_signature(
    model: nn.Module,
    description: ModelDescription,
    loss_fn: LossFunction | None,
    layouts: Mapping[str, Layout],
    parameters: Sequence[str] | None,
) -> tuple[str, ...]:
    """Checks that model, loss function and description fit together, without running anything.

    Args:
        model: The model.
        description: Its description.
        loss_fn: The loss function, or None.
        layouts: The arguments that are not one tensor, with their layouts.
        parameters: The inputs that are loss parameters; None if that is not known yet.

    Returns:
        The arguments that are the labels of ``loss_fn``: the last one, and those directly before it that ``forward``
        does not take; none if ``loss_fn`` takes only the prediction.

    Raises:
        TypeError: If ``loss_fn`` can't be called with a prediction and the labels.
        ValueError: If an input is not an argument of ``forward``, a required argument is not an input, there are too
            few inputs for a label, the loss is not the first output, or ``loss_fn`` has trainable parameters.
    """
    arguments = [name for name in map(argument_of, description.input_names) if name not in (parameters or ())]
    names = list(dict.fromkeys([*arguments, *layouts, *(parameters or () if loss_fn is None else ())]))
    taken = signature_of(model.forward).parameters.values()
    keywords = [p.name for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    anything = any(p.kind == p.VAR_KEYWORD for p in taken)
    required = required_inputs(model)
    labels: tuple[str, ...] = ()
    if loss_fn is not None:
        needs_label = takes_label(loss_fn, parameters or ())
        argument_names = list(dict.fromkeys(arguments))
        choose = labels_beside_any_name if anything else _last_labels
        labels = tuple(choose(argument_names, keywords, loss_fn, parameters or ()))
        signature = signature_of_loss(loss_fn)
        try:
            if signature is not None:
                if parameters is None:
                    signature.bind_partial(None, *labels)
                else:
                    signature.bind(None, *labels, **dict.fromkeys(parameters))
        except TypeError as error:
            raise TypeError(
                f"loss_fn must take {'two' if len(labels) == 1 else 1 + len(labels)} arguments, "
                f"({', '.join(['prediction', *labels])})"
                + (f", and the loss parameters {list(parameters)} by name" if parameters else "")
                + f", but {shown(loss_fn)} does not: {error}. (Pass numbers that are not inputs as "
                "trainer.loss_parameters)"
            ) from None
        if isinstance(loss_fn, nn.Module):
            models = {id(parameter) for parameter in model.parameters()}
            extra = [n for n, p in loss_fn.named_parameters() if p.requires_grad and id(p) not in models]
            if extra:
                raise ValueError(
                    f"loss_fn has its own trainable parameters, {extra}, but only the model is trained: make the "
                    "loss a part of the model, or set their requires_grad to False"
                )
        if needs_label and len(names) < 2 and (required or anything):
            raise ValueError(
                f"with a loss_fn the last input is its label, so model_desc needs at least two inputs; it has {names}. "
                "(A loss_fn without a label takes only the prediction, and loss parameters as keyword-only arguments)"
            )
        if not description.outputs[0].is_loss:
            raise ValueError(
                "with a loss_fn the first output must be the loss: put the output with is_loss=True first in "
                f"model_desc['outputs'], which has {description.output_names}"
            )
        names = [name for name in names if name not in labels]
    unknown = [name for name in names if name not in keywords]
    if unknown and not anything:
        raise ValueError(
            f"model_desc has inputs {unknown}, but forward() of {type(model).__name__} takes {keywords}: the names "
            "must match its arguments; "
            + (
                "if one is the label, pass the loss function as loss_fn"
                if loss_fn is None
                else "only the label, last, may have any name"
            )
        )
    absent = [name for name in required if name not in names]
    if absent:
        raise ValueError(f"forward() of {type(model).__name__} requires {absent}, which the inputs of model_desc lack")
    return labels


def required_inputs(model: nn.Module) -> list[str]:
    """Returns the arguments without which ``forward`` can't be called; none if a model has only its weights."""
    taken = signature_of(model.forward).parameters.values()
    return [p.name for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty]


def signature_of_loss(loss_fn: LossFunction) -> inspect.Signature | None:
    """Returns the signature of a loss function, or of a loss module's ``forward``; None if it has none."""
    try:
        return signature_of(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    except (TypeError, ValueError):  # some built-in functions
        return None


def takes_label(loss_fn: LossFunction, others: Collection[str] = ()) -> bool:
    """Returns whether a loss function takes a label, judging by its signature.

    Args:
        loss_fn: The loss function.
        others: Its parameters that are not labels, such as loss parameters.
    """
    parameters = label_parameters(loss_fn)
    return parameters is None or any(p.name not in others for p in parameters)


def content_of(tensor: torch.Tensor) -> bytes:
    """Returns the values of a tensor as contiguous bytes."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def label_parameters(loss_fn: LossFunction) -> list[inspect.Parameter] | None:
    """Returns the parameters of a loss function that can take labels; None if its signature does not tell."""
    signature = signature_of_loss(loss_fn)
    parameters = [] if signature is None else list(signature.parameters.values())
    if signature is None or any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return None
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]


def unset_labels(model: nn.Module, names: Collection[str]) -> str:
    """Returns advice to pass a label that ``forward`` takes but was not given; "" if there is none."""
    parameters = signature_of(model.forward).parameters.values()
    unset = [p.name for p in parameters if p.default is None and p.name not in names]
    unset = [name for name in unset if "label" in name or "target" in name] or unset[: len(unset) == 1]
    if not unset:
        return ""
    return f"pass {unset[0]!r} as well, because forward() of {type(model).__name__} computes no loss without it"


def _last_labels(
    arguments: Sequence[str], keywords: Sequence[str], loss_fn: LossFunction, others: Collection[str]
) -> Sequence[str]:
    """Returns the last argument, if the loss takes a label, and those directly before it that ``forward`` lacks."""
    count = int(takes_label(loss_fn, others))
    while count < len(arguments) - 1 and arguments[-count - 1] not in keywords:
        count += 1
    return arguments[len(arguments) - count :]


def labels_beside_any_name(
    arguments: Sequence[str], keywords: Collection[str], loss_fn: LossFunction, others: Collection[str]
) -> list[str]:
    """Returns the labels if ``forward`` takes arguments of any name, so that its signature does not tell them.

    These are ``label`` and what has the name of a parameter of the loss function; then the last arguments, until the
    loss function has all that it requires.

    Args:
        arguments: The arguments of a step, in order.
        keywords: Those that ``forward`` names.
        loss_fn: The loss function.
        others: Its parameters that are not labels.

    Raises:
        TypeError: If an argument may be for either function.
    """
    declared = label_parameters(loss_fn)
    parameters = [p for p in declared or () if p.name not in others]
    names = ["label", *(p.name for p in parameters)]
    free = [name for name in arguments if name not in keywords]
    labels = [name for name in free if name in names]
    required = max(int(takes_label(loss_fn, others)), sum(p.default is p.empty for p in parameters))
    rest = [name for name in arguments if name not in labels]
    labels += rest[max(len(rest) - max(required - len(labels), 0), 0) :]
    unclear = [name for name in free if name not in labels]
    if unclear and keywords and (declared is None or len(parameters) > len(labels)):
        raise TypeError(
            f"inputs {unclear} may be for forward(), which takes any name, or for loss_fn: name labels as loss_fn's "
            f"parameters{'' if declared is None else f', {names[1:]}'}, or pass them as one tuple, label=(y, ...)"
        )
    return [name for name in arguments if name in labels]


def named_outputs(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the parts of a model's return value in order, each with a name; skips None, as Hugging Face does.

    Also yields parts that are not tensors: after the described outputs they do no harm.
    """
    if value is None:
        return
    if isinstance(value, torch.Tensor):
        yield name or "output", value
        return
    if isinstance(value, Mapping):
        parts: Iterator[tuple[Any, Any]] = iter(value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = zip(value._fields, value, strict=True)
    elif isinstance(value, (tuple, list)):
        parts = ((index if name else f"output_{index}", entry) for index, entry in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((entry.name, getattr(value, entry.name)) for entry in dataclasses.fields(value))
    else:
        yield name or "output", value
        return
    for key, entry in parts:
        yield from named_outputs(entry, f"{name}_{key}" if name else str(key))


def _tensors(value: Any, model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields the tensors in a model's return value; raises an error at a part that is not a tensor."""
    for name, part in named_outputs(value):
        if not isinstance(part, torch.Tensor):
            raise ExportError(
                f"the model must return tensors, or tuples, lists, dicts or dataclasses of them, but {name!r} is a "
                f"{type(part).__name__}: {shown(part)}\n  {forward_line(model)}"
            )
        yield part


class StepModule(nn.Module):
    """The step as a function: batch tensors in, described outputs out; only the loss requires grad.

    While it is captured, the conditions on values that it meets come after the described outputs.

    Because the loss is the only differentiable output, the joint graph has one extra input, its tangent, which takes
    the loss scale.

    Attributes:
        hooks_of_parameters: Whether autograd runs the hooks of parameters, because it gets their gradients.
        recorder: Takes notes of what a run reads and leaves outside tensors.
        assigned: The buffers that a run replaces.
        branches: Answers the conditions on values.
        carries: As in :class:`ExportedStep`.
        leaves: Whether the tensors that a run leaves outside are further results.
        arguments: Numbers among the arguments that change from call to call, by name.
    """

    hooks_of_parameters = False

    def __init__(self, step: ExportedStep) -> None:
        super().__init__()
        self.model = step.model
        self.loss_fn = step.loss_fn
        self._names = step.description.input_names
        self._layouts, self._loss_parameters = step.layouts, step.parameters
        last = () if step.loss_fn is None else (argument_of(self._names[-1]),)
        self._labels = last if step.labels is None else step.labels
        self._outputs, self._loss_of_first = step.description.outputs, step.loss_of_first
        self.recorder, self.assigned = Recorder(self, step.numbers, step.tables), AssignedBuffers(self)
        self.branches = Branches(step.answers, lambda tensor: self.recorder.value_read(tensor))
        self.carries, self.leaves = step.carries, False
        self.arguments: dict[str, Any] = {}

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the model and the loss function: outputs, what is left outside, conditions."""
        with self.recorder.running(), self.branches.forward_pass(inputs) as conditions:
            with self.assigned.as_updates():
                outputs = self.run(*inputs)
            left = self.recorder.leave(strict=self.leaves)
            self.branches.assume_decisions()
            return (*outputs, *(self.results(left) if self.leaves else ()), *conditions)

    def outside(self) -> dict[str, torch.Tensor]:
        """Returns the tensors from outside that become inputs of the graph if it reads them, by name."""
        if not self.carries:
            return {}
        by_name = {name: tensor for name, (tensor, _) in self.recorder.outside().items()}
        by_name |= {text_of(expression): tensor for expression, tensor in self.recorder.uses.scalars}
        return {name: tensor for name, tensor in by_name.items() if memory_of(tensor) is not None}

    def results(self, values: Iterable[Any]) -> tuple[torch.Tensor, ...]:
        """Returns tensors and numbers that the run computes as results."""
        tensors = (v if isinstance(v, torch.Tensor) else self.branches.as_tensor(v) for v in values)
        return tuple(map(self.result, tensors))

    @staticmethod
    def result(tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that was left outside as a result: a copy, which is dropped from the graph if needless."""
        return tensor.detach().clone()

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs model and loss function, without handling assignments to attributes."""
        tensors = dict(zip(self._names, inputs, strict=True))
        arguments = {argument_of(name): ("tensor", name) for name in self._names} | dict(self._layouts)
        values = {name: rebuild(layout, tensors) for name, layout in arguments.items()}
        labels = [values.pop(name) for name in self._labels]
        parameters = {name: values.pop(name) for name in self._loss_parameters}
        with TensorsAsNumbers(parameters.values()) if parameters else contextlib.nullcontext():
            return self._outputs_for(values, labels, parameters)

    def _outputs_for(
        self, values: Mapping[str, Any], labels: Sequence[Any], parameters: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Returns the described outputs of model and loss function for arguments, labels and loss parameters."""
        if self.loss_fn is None:
            returned = _tensors(self.model(**values, **parameters), self.model)
        else:
            prediction = self.model(**values)
            predicted = prediction[0] if self._loss_of_first else prediction
            loss = self.loss_fn(predicted, *labels, **parameters)
            returned = itertools.chain([checked_loss(loss)], _tensors(prediction, self.model))
        outputs = list(itertools.islice(returned, len(self._outputs)))
        if len(outputs) < len(self._outputs):
            unset = unset_labels(self.model, [*map(argument_of, self._names)])
            raise ExportError(
                f"model_desc has {len(self._outputs)} outputs, {[o.name for o in self._outputs]}, but model and loss "
                f"return only {len(outputs)} tensors" + (f": {unset}" if unset else "")
            )
        described = zip(self._outputs, outputs, strict=True)
        with_fn = self.loss_fn is not None
        return tuple(
            checked_loss(tensor, with_fn) if output.is_loss else tensor.detach() for output, tensor in described
        )


def checked_loss(loss: Any, has_loss_fn: bool = True) -> torch.Tensor:
    """Returns the loss, in fp32 instead of half precision.

    Args:
        loss: What a loss function has returned, or an output of the model.
        has_loss_fn: Whether it is of a loss function.

    Raises:
        ExportError: If it is not a floating-point tensor of one element.
    """
    if not isinstance(loss, torch.Tensor):
        kind = "a number" if isinstance(loss, (torch.SymInt, torch.SymFloat)) else f"a {type(loss).__name__}"
        raise ExportError(f"loss_fn must return a tensor, but it returned {kind}: return the loss alone, no .item()")
    if any(size != 1 for size in loss.shape):
        raise ExportError(
            f"the loss must be a scalar, but its shape is {list(loss.shape)}: "
            + (
                "reduce it, for example with .mean()"
                if has_loss_fn
                else "if it is the prediction, pass the loss function as loss_fn"
            )
        )
    if not loss.is_floating_point():
        raise ExportError(f"the loss must be a floating-point tensor, but its dtype is {loss.dtype}")
    # fp16 can't represent a scale of 65536, so the loss and its scale are fp32 even in mixed precision.
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
