"""Runs a step in eager PyTorch, on a copy of all that it changes; ``debug.verify_every`` compares with its results."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from ..core.masks import KEYS
from ..engine.devices import default_generator
from ..engine.programs.dropout import draw_unpacked
from ..outside.generators import drawing_from_copies
from ..step import RandomInput
from .borrow import BORROWED, borrowed, fast_path_disabled
from .step_module import ExportedStep, StepModule

_Held = tuple[dict[str, Any], str, torch.Tensor]
"""A buffer, and the dict and the key where it is."""


class EagerStep(NamedTuple):
    """The results of a step, as new tensors by name.

    Attributes:
        outputs: The described outputs, and the tensors that the step leaves outside, as ``left.0`` and so on.
        gradients: The gradients of the scaled loss, without those of parameters that it does not depend on.
        buffers: All buffers after the step.
        rounding: The dtype that rounds most in the step.
        has_gradients: Whether there was memory for the backward pass.
    """

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    rounding: torch.dtype = torch.float32
    has_gradients: bool = True

    def named(self) -> dict[str, torch.Tensor]:
        """Returns all tensors by what they are called in messages."""
        by_description = {f"output {name!r}": value for name, value in self.outputs.items()}
        by_description |= {gradient_of(name): value for name, value in self.gradients.items()}
        return by_description | {f"buffer {name!r}": value for name, value in self.buffers.items()}


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """A context in which autograd saves tensors for a backward pass as long as there is memory, and then nothing more.

    Args:
        memory: What saved tensors and gradients may take, in bytes; infinite for no limit.
        known: Tensors that are there anyway, such as weights.
        trained: The tensors that will have gradients.

    Attributes:
        are_complete: Whether all was saved, without which there can be no backward pass.
    """

    def __init__(self, memory: float, known: Iterable[torch.Tensor], trained: Iterable[torch.Tensor]) -> None:
        self._left = memory - sum(tensor.nbytes for tensor in trained)
        self._known = {_memory(tensor)[0] for tensor in known}
        self.are_complete = self._left >= 0
        super().__init__(self._pack, lambda saved: saved)

    def __enter__(self) -> None:
        if self._left < math.inf:  # torch.func refuses such hooks
            super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._left < math.inf:
            super().__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        key, size = _memory(tensor)
        if key not in self._known:
            self._known.add(key)
            self._left -= size
            self.are_complete &= self._left >= 0
        return tensor.detach() if self.are_complete else None


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns what tells a tensor's memory from others, and its size in bytes."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() or id(tensor), storage.nbytes()
    except (NotImplementedError, RuntimeError):  # a sparse tensor has several
        return id(tensor), tensor.numel() * tensor.element_size()


def gradient_of(name: str) -> str:
    """Returns what the gradient of a parameter is called in messages."""
    return f"the gradient of {name!r}"


def run_eagerly(
    step: ExportedStep,
    batch: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    scale: float,
    state: torch.Tensor | None,
    random: Iterable[RandomInput] = (),
    shake: int | None = None,
    memory: float = math.inf,
) -> EagerStep:
    """Runs a training step in PyTorch, with model and loss as they are now. Leaves no trace.

    Args:
        step: The step.
        batch: Inputs by name.
        tensors: The values of parameters and buffers by canonical name: the model's own tensors, or others.
        scale: The factor on the loss in the backward pass.
        state: The state of the generator that draws the step's random numbers; None for PyTorch's own.
        random: What the graph of the step draws.
        shake: A seed, to change weights and inputs by one rounding; None not to.
        memory: What gradients and activations may take, in bytes; if they need more, there are no gradients.
    """
    module, sample, rounding = _prepared(step, batch)
    device = step.device_for(sample)
    epsilon = torch.finfo(rounding).eps
    if shake is not None:
        sample = [shaken(value, epsilon, shake) for value in sample]
    trained = {name: f"model.{name}" for name in step.trainable}
    weights = dict(step.model.named_parameters())
    saved = SavedTensors(memory, weights.values(), [weights[name] for name in trained])
    with (
        BORROWED,
        random_state_kept(device, state),
        dropping_as(random, device),
        with_values(step.model, tensors, epsilon, shake) as held,
        borrowed(module, trained.values(), training=True, modes=step.modes_in(True)),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),  # the caller's
        saved,
    ):
        torch.clear_autocast_cache()  # around a step, it may hold casts of earlier weights
        with module.recorder.running():
            with step.autocast_for(sample):
                results = module.run(*sample)
            # Before the backward pass, in which a checkpoint runs its part again, and changes its buffers again.
            buffers = {name: value.detach().clone() for name, value in step.model.named_buffers()}
            put_buffers_back(held)
            left = module.recorder.leave(strict=False)
        torch.clear_autocast_cache()
        outputs = {entry.name: value for entry, value in zip(step.description.outputs, results, strict=True)}
        outputs |= {f"left.{at}": value for at, value in enumerate(left)}
        loss = outputs[step.description.loss.name]
        parameters = dict(module.named_parameters())
        gradients: dict[str, torch.Tensor] = {}
        if loss.requires_grad and saved.are_complete:
            targets = {name: parameters[inside] for name, inside in trained.items()}
            gradients = differentiate([loss], targets, [torch.full_like(loss, scale)])
        return EagerStep(
            {name: value.detach().clone() for name, value in outputs.items()},
            gradients,
            buffers,
            rounding if rounding == step.autocast else coarsest([torch.empty(0, dtype=rounding), *outputs.values()]),
            saved.are_complete,
        )


def differentiate(
    outputs: Sequence[torch.Tensor], targets: Mapping[str, torch.Tensor], tangents: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns the gradients of tensors by name, without those that the outputs do not depend on.

    Unlike backward(), it neither adds to ``p.grad`` nor calls the hooks that wait for that.
    """
    gradients = torch.autograd.grad(outputs, list(targets.values()), tangents, allow_unused=True)
    return {
        name: value.to_dense() if value.is_sparse else value
        for name, value in zip(targets, gradients, strict=True)
        if value is not None
    }


def evaluate_eagerly(
    step: ExportedStep, batch: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> tuple[Sequence[torch.Tensor], float]:
    """Runs a step in PyTorch in evaluation mode. Leaves no trace.

    Args:
        step: The step.
        batch: Inputs by name.
        tensors: The values of parameters and buffers by canonical name: the model's own tensors, or others.

    Returns:
        The described outputs, and the relative size of a rounding.
    """
    module, sample, rounding = _prepared(step, batch)
    with (
        BORROWED,
        random_state_kept(step.device_for(sample)),
        with_values(step.model, tensors),
        borrowed(module, (), training=False, modes=step.modes_in(False)),
        torch.no_grad(),
        step.autocast_for(sample),
        fast_path_disabled(),
    ):
        return module(*sample), torch.finfo(rounding).eps


def differentiated(
    step: ExportedStep, batch: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> list[str]:
    """Runs a training step in PyTorch, and returns which tensors its loss passes gradients to. Leaves no trace.

    Args:
        step: The step.
        batch: Inputs by name.
        tensors: Tensors outside the model that require grad, by name.
    """
    module, sample, _ = _prepared(step, batch)
    trained = [f"model.{name}" for name in step.trainable]
    with (
        random_state_kept(step.device_for(sample)),
        borrowed(module, trained, training=True, modes=step.modes_in(True)),
        torch.enable_grad(),
        module.recorder.running(),
    ):
        with step.autocast_for(sample):
            results = module.run(*sample)
        loss = next(value for entry, value in zip(step.description.outputs, results, strict=True) if entry.is_loss)
        gradients = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    return [name for name, gradient in zip(tensors, gradients, strict=True) if gradient is not None]


def exchanges_modules(step: ExportedStep, batch: Mapping[str, torch.Tensor], training: bool) -> bool:
    """Runs a step in PyTorch, and keeps the modules that it exchanges for others with the same parameters and buffers.

    BigBird does that for short texts. Nothing else of the run stays, except for the attributes that remember it, and
    the random numbers that the new modules have taken for their first weights.

    Returns:
        Whether there are such modules, and the run draws nothing before it makes the first of them: a graph could not
        draw as this run does.
    """
    module, sample, _ = _prepared(step, batch)
    before, state = _tensors(step.model), torch.get_rng_state()
    initial, first = state, list[torch.Tensor]()
    initialize, set_attribute = nn.Module.__init__, nn.Module.__setattr__

    def note_first(part: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not first:
            first.append(torch.get_rng_state())
        initialize(part, *args, **kwargs)

    def note_state(part: nn.Module, name: str, value: Any) -> None:
        nonlocal state
        set_attribute(part, name, value)
        if isinstance(value, nn.Module):
            state = torch.get_rng_state()

    with (
        mock.patch.object(nn.Module, "__init__", note_first),
        mock.patch.object(nn.Module, "__setattr__", note_state),
        random_state_kept(step.device_for(sample)),
        borrowed(module, (), training, step.modes_in(training)),
        torch.no_grad(),
        step.autocast_for(sample),
        module.recorder.running(),
    ):
        module.run(*sample)
        exchange, are_same = module.recorder.effects.exchange(), _tensors(step.model) == before
    if not are_same or any(not torch.equal(initial, drawn) for drawn in first):
        return False
    exchange()
    torch.set_rng_state(state)
    return True


def _tensors(model: nn.Module) -> dict[str, int]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: id(tensor) for name, tensor in named}


def _prepared(
    step: ExportedStep, batch: Mapping[str, torch.Tensor]
) -> tuple[StepModule, list[torch.Tensor], torch.dtype]:
    """Returns what runs a step, copies of its inputs, and the dtype that rounds most in it."""
    module = StepModule(step)
    module.recorder.numbers.clear()  # stand-ins are for captures
    sample = [batch[entry.name].detach().clone() for entry in step.description.inputs]
    return module, sample, step.autocast or coarsest([*step.model.parameters(), *step.model.buffers(), *sample])


@contextlib.contextmanager
def dropping_as(random: Iterable[RandomInput], device: torch.device) -> Iterator[None]:
    """Has dropout draw a graph's masks, if these are not PyTorch's. What else draws does so as in a graph.

    A graph draws a key for all its masks before anything else, and numbers its dropouts in the order of the forward
    pass, except for dropout in place. A checkpoint of activations sets back the state of PyTorch's generator, and with
    it the number.

    Args:
        random: The random inputs of the graph.
        device: Where it runs.
    """
    if all(spec.kind not in ("mask", "key") for spec in random):
        yield
        return
    key, number = torch.randint(KEYS, (), device=device), 0
    get_state, set_state = torch.get_rng_state, torch.set_rng_state
    numbers: list[tuple[torch.Tensor, int]] = []

    def numbered_state() -> torch.Tensor:
        numbers.append((get_state(), number))
        return numbers[-1][0]

    def set_numbered_state(state: torch.Tensor) -> None:
        nonlocal number
        set_state(state)
        number = next((then for other, then in numbers if other is state), number)

    def dropout(value: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        nonlocal number
        if not train or p == 0 or not value.numel():
            return value
        if p == 1:
            return value * 0.0
        number += 1
        kept = draw_unpacked(key, value.numel(), number - 1, 1.0 - p).view(value.shape)
        return value * kept.to(value.dtype).div_(1.0 - p)

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("dropout", dropout, "AutogradCPU")
    try:
        with (
            mock.patch.object(torch, "get_rng_state", numbered_state),
            mock.patch.object(torch, "set_rng_state", set_numbered_state),
        ):
            yield
    finally:
        library._destroy()


@contextlib.contextmanager
def random_state_kept(device: torch.device, state: torch.Tensor | None = None) -> Iterator[None]:
    """Restores PyTorch's generators afterwards, and leaves the global ones of Python and NumPy as they are.

    Args:
        device: Whose global generator of PyTorch is restored, beside the CPU's.
        state: What this generator begins with; None for its own state.
    """
    devices = [] if device.type in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cpu"), drawing_from_copies():
        if state is not None:
            set_random_state(device, state)
        yield


def random_state(device: torch.device) -> torch.Tensor:
    """Returns the state of a device's global generator of PyTorch."""
    return default_generator(device).get_state()


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Sets what :func:`random_state` returns."""
    default_generator(device).set_state(state)


def coarsest(tensors: Collection[torch.Tensor]) -> torch.dtype:
    """Returns the floating-point dtype of the largest rounding among tensors; float32 if there is none."""
    dtypes = {value.dtype for value in tensors if value.is_floating_point()} or {torch.float32}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def shaken(value: torch.Tensor, epsilon: float, seed: int) -> torch.Tensor:
    """Returns a tensor whose elements differ by some roundings, each in its own direction; others as they are.

    By one rounding with seed 0, and in single precision by twice as many with each further seed: kernels that add long
    sums in another order differ by several. In halves, they add in single precision.
    """
    if not value.is_floating_point():
        return value
    draw = torch.Generator().manual_seed(seed)
    size = epsilon if epsilon > 1e-4 else epsilon * 2**seed
    return value * (1 + size * torch.randint(-1, 2, value.shape, generator=draw).to(value.device, value.dtype))


@contextlib.contextmanager
def with_values(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], epsilon: float = 0.0, shake: int | None = None
) -> Iterator[list[_Held]]:
    """Gives a model copies of its buffers, and its parameters other values, in the context; yields the copies.

    Buffers become other objects, because one that a step changes and that is put back would count as changed for every
    graph of autograd that has saved it. Parameters remain the same objects, to which others may refer.

    Args:
        model: The model.
        tensors: Values of parameters and buffers, by canonical name.
        epsilon: The size of a rounding.
        shake: As for :func:`run_eagerly`; buffers are not changed.
    """
    parameters: list[tuple[torch.Tensor, torch.Tensor]] = []
    originals = {name: (buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()}
    copies = {id(buffer): tensors[name].detach().to(buffer.dtype, copy=True) for name, (buffer, _) in originals.items()}
    held = [
        (module._buffers, key, buffer)
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        for name, parameter in model.named_parameters():
            value = tensors[name].detach()
            if shake is None and value.data_ptr() == parameter.data_ptr():
                continue
            parameters.append((parameter, parameter.data))
            value = value.to(parameter.dtype)
            parameter.data = value if shake is None else shaken(value, epsilon, shake)
        for buffers, key, buffer in held:
            buffers[key] = copies[id(buffer)]
        yield [(buffers, key, copies[id(buffer)]) for buffers, key, buffer in held]
    finally:
        put_buffers_back(held)
        for tensor, data in parameters:
            tensor.data = data
        for buffer, value in originals.values():
            if not torch.equal(buffer, value):  # changed through another reference than the module's
                buffer.detach().copy_(value)


def put_buffers_back(held: Sequence[_Held]) -> None:
    """Restores buffers in place of those that a forward pass has assigned.

    Args:
        held: What :func:`with_values` has yielded.
    """
    for buffers, key, buffer in held:
        buffers[key] = buffer
