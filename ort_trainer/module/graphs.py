"""Finds the graphs for a call of a module, or exports them."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

import torch
from torch import nn

from ..core.errors import ExportError
from ..core.signatures import signature_of
from ..engine.ort import providers_for, session_options
from ..engine.programs.runner import ProgramRunner
from ..engine.runner import GraphRunner, SessionRunner
from ..engine.torch_memory import TorchMemory, readable
from ..export.nested import Layout, flatten, rebuild
from ..export.torch import GraphBuilder
from ..export.torch.borrow import BORROWED, borrowed
from ..export.torch.call import CallDescription, ExportedCall
from ..export.torch.describe import input_shapes
from ..export.torch.guard import ModelChangedError, ModelWatch
from ..export.torch.guard.reads import Reads, Root
from ..export.torch.model import recompute_options
from ..export.torch.outside.leftovers import decode
from ..export.torch.outside.notes import Notes
from ..export.torch.outside.recorder import Recorder
from ..export.torch.step_module import canonical_names
from ..options import ORTTrainerOptions
from ..step import Step
from .passes import Call, Passes

__all__ = ["CallGraphs"]

_log = logging.getLogger(__name__)
# Each costs an export; a module that fixes a size, or gets another constant in every call, must not export without end.
_MAXIMUM_GRAPHS = 16
# Limit for remembered shapes.
_MAXIMUM_CALLS = 1024


@dataclasses.dataclass
class _Found:
    """Graphs that were exported.

    Attributes:
        description: The inputs that they were exported for.
        passes: The graphs.
        state: The dict and the key of every parameter, buffer and tensor from outside that they take, in order.
        results: How the module's result is made from their outputs.
        root: Where places begin.
        notes: What the module leaves outside, and more.
    """

    description: CallDescription
    passes: Passes
    state: list[tuple[dict[str, Any], str]]
    results: Callable[[Sequence[torch.Tensor]], Any]
    root: Root
    notes: Notes

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns what the module returns, from the results of a call, and leaves outside what the module leaves."""
        left = self.notes.leftovers
        if left.writes:
            own = len(tensors) - left.tensors
            left.leave(self.root, tensors[own:])
            tensors = tensors[:own]
        return self.results(tensors)

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Returns whether the graphs are valid for inputs of these shapes."""
        return self.description.covers(shapes) and self.passes.step.takes(shapes)


class CallGraphs:
    """The graphs of a module.

    Args:
        module: The module.
        options: All settings.

    Attributes:
        exported: Called with the passes of each export.
    """

    def __init__(self, module: nn.Module, options: ORTTrainerOptions) -> None:
        self._module, self._options = module, options
        self.exported: Callable[[Step, Sequence[Step]], None] | None = None
        parameters = signature_of(module.forward).parameters.values()
        kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [parameter.name for parameter in parameters if parameter.kind in kinds]
        self._begin()

    def _begin(self) -> None:
        """Forgets all graphs, for a module that has other parts now."""
        self._watch = ModelWatch(self._module, list(canonical_names(self._module)), (), own_modes=True)
        self._reads = Reads(Root(self._module))
        self._outside: dict[str, torch.Tensor] = {}
        self._notes: list[Notes] = []
        self._found: dict[Any, list[_Found]] = {}
        self._calls: dict[Any, tuple[_Found, Call]] = {}

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[_Found, Call, list[torch.Tensor]]:
        """Returns graphs, a call of them, and the values that it takes.

        Args:
            args: The positional arguments of the call.
            kwargs: Its keyword arguments.

        Raises:
            ExportError: If the module can't be exported.
            RuntimeError: If there are too many graphs.
            TypeError: If an argument can't be used.
        """
        leaves: dict[str, torch.Tensor] = {}
        positional = tuple(flatten(self._name(at), value, leaves, objects=True) for at, value in enumerate(args))
        named = tuple((name, flatten(name, value, leaves, objects=True)) for name, value in kwargs.items())
        try:
            structure = self._watch.variant(True)
        except ModelChangedError as error:
            _log.info("exporting the module anew: %s", error)
            self._begin()
            structure = self._watch.variant(True)
        variant = self._reads.variant(structure)
        with_grad = torch.is_grad_enabled()
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        key: list[Any] = [variant, positional, named, with_grad, autocast]
        leaves = {name: readable(name, value) for name, value in leaves.items()}
        for value in leaves.values():
            key += (value.shape, value.dtype, value.requires_grad)
        try:
            known = self._calls.get(tuple(key))
        except TypeError as error:
            raise TypeError(
                f"an argument of {type(self._module).__name__} is neither a tensor nor a constant that can be compared "
                f"({error}): pass arrays as tensors"
            ) from None
        if known is None:
            with torch.inference_mode(False):
                known = self._add(leaves, tuple(key))
            if len(self._calls) >= _MAXIMUM_CALLS:
                self._calls.clear()
            self._calls[tuple(key)] = known
        found, call = known
        if found.notes.tensors or found.notes.scalars:
            self._outside.update(self._reads.carried())
        values = [tensors[name] for tensors, name in found.state]
        values += leaves.values()
        return found, call, values

    def _name(self, place: int) -> str:
        return self._names[place] if place < len(self._names) else f"args.{place}"

    def _add(self, leaves: Mapping[str, torch.Tensor], key: tuple[Any, ...]) -> tuple[_Found, Call]:
        """Finds or exports the graphs for inputs of other shapes."""
        shapes = {name: tuple(value.shape) for name, value in leaves.items()}
        # Of the key, all but the sizes.
        kind = tuple(len(part) if isinstance(part, torch.Size) else part for part in key)
        known = self._found.setdefault(kind, [])
        found = next((found for found in known if found.takes(shapes)), None)
        if found is None:
            if sum(map(len, self._found.values())) >= _MAXIMUM_GRAPHS:
                raise RuntimeError(
                    f"{type(self._module).__name__} has been exported {_MAXIMUM_GRAPHS} times, for different sizes, "
                    "modes, settings or constants among its arguments. Pass numbers that change as tensors, pad inputs "
                    "to fewer sizes, or wrap the part of the model whose graph stays the same"
                )
            description = CallDescription(input_shapes(leaves))
            if known:
                description = known[-1].description.covering(shapes)
                _log.warning(
                    "%s got inputs of other sizes than before, so it is exported again: %s",
                    type(self._module).__name__,
                    ", ".join(map(str, description.inputs)),
                )
            found = self._export(leaves, description, key)
            known.append(found)
        return found, Call(found.passes, shapes)

    def _export(self, leaves: Mapping[str, torch.Tensor], description: CallDescription, key: tuple[Any, ...]) -> _Found:
        _, positional, named, with_grad, autocast, *_ = key
        module, options = self._module, self._options
        device = _device_of([*leaves.values(), *module.parameters(), *module.buffers()])
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"ORTModule runs on the CPU or on CUDA, but the module is on {device}: move it")
        call = ExportedCall(
            model=module,
            description=description,
            loss_fn=None,
            trainable=self._watch.trainable if with_grad else frozenset(),
            modes=self._watch.modes or {},
            autocast=autocast,
            kernels=self._kernels(device),
            opset=options._internal_use.onnx_opset_version,
            recompute=recompute_options(options),
            fast_random=options.utils.random_numbers == "fast",
            args=positional,
            kwargs=dict(named),
            requires_grad=frozenset(name for name, value in leaves.items() if value.requires_grad and with_grad),
            carries=True,
            numbers=frozenset(self._reads.numbers),
        )
        sample = {name: value.clone() if value.is_inference() else value for name, value in leaves.items()}
        builder = GraphBuilder(
            call,
            cached=options.utils.cache_exports,
            tolerates=options.tolerates,
            depends_on_modes=self._watch.depends_on_modes,
            noted=lambda notes, _: self._notes.append(notes),
        )
        forward, backward = builder.build_call(sample)
        notes = self._notes.pop()
        self._reads.add(notes)
        own = len(forward.outputs) - notes.leftovers.tensors
        results = self._results(notes, own, positional, dict(named), leaves)
        if self.exported is not None:
            self.exported(forward, backward)
        memory = TorchMemory(device)
        passes = Passes(forward, backward, functools.partial(self._load, memory=memory), memory)
        outside = {*notes.tensors, *notes.scalars}
        state = [(self._outside, name) if name in outside else self._place(name) for name in forward.state]
        return _Found(description, passes, state, results, Root(module), notes)

    def _results(
        self,
        notes: Notes,
        count: int,
        positional: Sequence[Layout],
        named: Mapping[str, Layout],
        leaves: Mapping[str, torch.Tensor],
    ) -> Callable[[Sequence[torch.Tensor]], Any]:
        """Returns the function that makes the module's result of the tensors in it."""
        root, code = Root(self._module), notes.result
        if code is not None:
            return lambda tensors: decode(code, tensors, root)
        outputs: dict[str, torch.Tensor] = {}
        result = self._result(positional, named, {name: value.clone() for name, value in leaves.items()})
        layout = flatten("output", result, outputs, objects=True)
        if len(outputs) != count:
            raise ExportError(
                f"forward() of {type(self._module).__name__} returns {len(outputs)} tensors, but {count} while it is "
                "captured: it must not ask whether it is compiled or exported"
            )
        return lambda tensors: rebuild(layout, dict(zip(outputs, tensors, strict=True)))

    def _kernels(self, device: torch.device) -> str:
        chosen = self._options.utils.kernels
        if device.type == "cpu":
            return chosen
        if chosen in ("pytorch", "compiled"):
            raise ValueError(f"utils.kernels is {chosen!r}, but the module is not on the CPU: set it to 'auto'")
        return "onnxruntime"

    def _load(self, step: Step, memory: TorchMemory) -> GraphRunner:
        options, deterministic = self._options, self._options.debug.deterministic_compute
        if step.programs:
            return ProgramRunner(step, {}, memory, deterministic)
        providers = providers_for(memory.device, options.provider_options)
        return SessionRunner(step, {}, memory, session_options(options.session_options, deterministic), providers)

    def _place(self, name: str) -> tuple[dict[str, Any], str]:
        path, _, key = name.rpartition(".")
        owner = self._module.get_submodule(path)
        return (owner._parameters if key in owner._parameters else owner._buffers), key

    def _result(
        self, positional: Sequence[Layout], named: Mapping[str, Layout], copies: Mapping[str, torch.Tensor]
    ) -> Any:
        """Runs the module once, without a trace, to see what it returns."""
        args = [rebuild(layout, copies) for layout in positional]
        kwargs = {name: rebuild(layout, copies) for name, layout in named.items()}
        step = nn.Module()
        step.model, step.loss_fn = self._module, None
        with (
            BORROWED,
            borrowed(self._module, (), self._module.training, self._watch.modes),
            Recorder(step).running(),
            torch.random.fork_rng([]),
        ):
            return self._module(*args, **kwargs)


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device of all tensors.

    Raises:
        ValueError: If they are on several devices.
    """
    devices = dict.fromkeys(value.device for value in tensors)
    if len(devices) > 1:
        raise ValueError(
            f"the module's tensors and inputs are on several devices, {[*map(str, devices)]}: move them to one"
        )
    return next(iter(devices), torch.device("cpu"))
