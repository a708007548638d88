"""Captures a step with torch.export: the forward pass, with symbolic sizes. Imports nothing for ONNX, to be fast."""

from __future__ import annotations

import contextlib
import io
import itertools
import keyword
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import graph as autograd_graph
from torch.autograd.function import BackwardCFunction
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import _disable_current_modes

from ..core.errors import PACKAGE, ExportError
from ..fx.explain import LIBRARIES, TORCH_MODELS, explain, source_line
from ..fx.operator_table import replacements
from ..fx.symbols import users_lines_of_conditions
from ..fx.values import draws_numbers, reached
from ..fx.view_writes import DATA, bases_of, refuse_inexact_writes, written
from ..options import InputDescription
from ..outside.changes import BACKWARD_HOOKS, GLOBAL_HOOKS
from ..outside.generators import drawing_from_copies
from ..outside.numbers import functions_of_numbers
from ..outside.output import output_watched
from ..outside.recorder import Recorder
from ..outside.values import memory_of
from .borrow import fast_path_disabled
from .branches import Assumption
from .step_module import StepModule
from .torch_versions import CHECKPOINT_GENERATOR

CHECKPOINT = "ort_trainer_checkpoint"
"""Key in a node's custom metadata: the number of the ``torch.utils.checkpoint`` that it was captured in."""

# The names of autograd functions that torch.library makes for the backward passes of operators begin with this.
_OF_OPERATORS = "GeneratedBackwardFor_"
_DATA: Any = torch.Tensor.data
_APPLY: Callable[..., nn.Module] = nn.Module._apply
_TORCH = LIBRARIES[0]
_OURS = PACKAGE
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "__gt__": operator.gt,
    "__ge__": operator.ge,
    "__lt__": operator.lt,
    "__le__": operator.le,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
}


@dataclass(frozen=True)
class Capture:
    """A captured forward pass.

    Attributes:
        exported: torch.export's program of the step.
        inputs: The batch as the exporter traced it, with symbolic sizes.
        least: The least size of a symbol whose sizes 0 or 1 the model treats differently.
        as_it_stands: Whether the module itself must be differentiated, because the model has custom backward passes or
            hooks, which the exported program lacks.
        assumptions: The conditions on values that are assumed; they are the last results.
    """

    exported: torch.export.ExportedProgram
    inputs: tuple[torch.Tensor, ...]
    least: Mapping[sympy.Symbol, int]
    as_it_stands: bool
    assumptions: tuple[Assumption, ...] = ()

    @property
    def fake_mode(self) -> Any:
        """The fake mode of the inputs; its ``shape_env`` has the symbolic sizes and the conditions on them."""
        values = (node.meta.get("val") for node in self.exported.graph.nodes)
        return next(value.fake_mode for value in (*self.inputs, *values) if isinstance(value, FakeTensor))


@contextlib.contextmanager
def capturing(module: StepModule, autocast: torch.autocast, fused_attention: bool = False) -> Iterator[None]:
    """The context for capturing a model and for differentiating the captured program.

    Args:
        module: The step.
        autocast: The autocast context, enabled or not.
        fused_attention: Whether attention may become one of PyTorch's fused kernels. Their backward operators have no
            ONNX translation; the plain formula's have one.
    """
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if fused_attention else [SDPBackend.MATH]
    # Other devices have further fused kernels, among which PyTorch chooses.
    chosen = contextlib.nullcontext() if fused_attention and autocast.device != "cpu" else sdpa_kernel(backends)
    with chosen, exportable_functions(), fast_path_disabled(), autocast, module.branches.followed():
        yield


def capture(
    module: StepModule,
    inputs: Sequence[InputDescription],
    sample: Sequence[torch.Tensor],
    autocast: torch.autocast,
    held: Collection[str] = (),
) -> Capture:
    """Captures a step.

    Args:
        module: The step, already in the graph's mode and with its trainable parameters.
        inputs: Descriptions of the batch.
        sample: A batch; sizes of symbolic dimensions must be at least 2.
        autocast: The autocast context, enabled or not.
        held: Symbolic dimensions to capture with the sample's fixed size.

    Raises:
        ExportError: If PyTorch can't export the model.
        ValuesAsked: If it has branches on values, and there are no answers.
    """
    _refuse_hooks(module)
    dims = tuple(
        {
            axis: torch.export.Dim.AUTO
            for axis, size in enumerate(entry.shape)
            if isinstance(size, str) and size not in held
        }
        for entry in inputs
    )
    with (
        capturing(module, autocast),
        _watch_autograd() as custom_backward,
        _watch_small_sizes() as least,
        _fixing_sizes_in_texts(),
        _marked_checkpoints(module.recorder),
        _left_modules(),
        _without_stand_ins(),
        users_lines_of_conditions(),
        _without_drawing_outside_torch(module.model._get_name()),
        _attributes_put_back(module),
        output_watched(module.recorder.note_output),
        functions_of_numbers(),
    ):
        exported = _export(module, tuple(sample), dims)
    _refuse_changed_constants(exported)
    _refuse_tensors_without_place(exported, module)
    _refuse_random_branches(exported, module)
    for part in exported.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            refuse_inexact_writes(part.graph)
    # The program's own fake inputs keep the symbolic sizes; the user's module might look at sizes.
    placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    fakes = tuple(placeholders[str(name)].meta["val"] for name in exported.graph_signature.user_inputs)
    return Capture(exported, fakes, least, bool(custom_backward), tuple(module.branches.assumptions))


@contextlib.contextmanager
def exportable_functions() -> Iterator[None]:
    """Replaces functions of torch that can't be captured by ones that can."""
    with contextlib.ExitStack() as stack:
        for (module, name), function in replacements().items():
            stack.enter_context(mock.patch.object(module, name, function))
        stack.enter_context(mock.patch.object(torch.fx.graph, "_format_target", _attribute))
        stack.enter_context(mock.patch.object(torch.Tensor, "data", property(_data, _set_data)))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _applied))
        yield


def _data(tensor: torch.Tensor) -> torch.Tensor:
    """Stands for ``x.data``, which a capture can't follow: ``x.detach()``, with a mark."""
    if sys._getframe(1).f_code.co_filename.startswith((_TORCH, _OURS)):
        value: torch.Tensor = _DATA.__get__(tensor)
        return value
    with fx_traceback.annotate({DATA: True}):
        return tensor.detach()


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Stands for ``x.data = value``: a change in place, where the value has the form of the tensor."""
    file = sys._getframe(1).f_code.co_filename
    if file.startswith((_TORCH, _OURS)) or value.shape != tensor.shape or value.dtype != tensor.dtype:
        _DATA.__set__(tensor, value)
        return
    with fx_traceback.annotate({DATA: True}):
        tensor.detach().copy_(value.detach())


def _applied(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Stands for what ``module.to()``, ``float()`` and so on call: in a capture, tensors of a module can't be replaced.

    A model that calls them in each forward() has what it asks for from then on, so they change nothing.
    """
    with _disable_current_modes():
        kinds = {(tensor.dtype, tensor.device) for tensor in (*module.parameters(recurse), *module.buffers(recurse))}
        empty = [torch.empty(0, dtype=dtype, device=device) for dtype, device in kinds]
        if all(function(tensor) is tensor for tensor in empty):
            return module
    return _APPLY(module, function, recurse)


def _attribute(base: str, target: str) -> str:
    """Returns source text that reads an attribute; PyTorch's does not compile for ``class`` or a name with a quote."""
    for name in target.split("."):
        plain = name.isidentifier() and not keyword.iskeyword(name)
        base = f"{base}.{name}" if plain else f"getattr({base}, {name!r})"
    return base


@contextlib.contextmanager
def _watch_autograd() -> Iterator[list[str]]:
    """Yields a list that collects the names of the model's custom backward passes: an exported program lacks them.

    ``Function.apply`` itself may have been bound to another name before, and is compiled from torch 2.14 on, so the
    creation of what it hands to forward() as ``ctx`` is watched.
    """
    custom_backward: list[str] = []
    register_hook: Any = torch.Tensor.register_hook
    grad_fn: Any = torch.Tensor.grad_fn
    pack = autograd_graph.saved_tensors_hooks.__enter__

    def watched_context(context: Any, *_: Any) -> None:
        function = type(context)._forward_cls
        if function is checkpointing.CheckpointFunction:
            raise ExportError(
                "torch.utils.checkpoint with use_reentrant=True calls backward() while it runs, which can't be "
                "captured: pass use_reentrant=False"
            )
        # An operator of torch.library stays whole in an exported program, and keeps its backward pass. A checkpoint's
        # own function (until torch 2.11) only holds its inputs.
        whole = getattr(function, "made_of_operators", False) or function.__name__.startswith(_OF_OPERATORS)
        if not whole and function.__module__ != checkpointing.__name__:
            custom_backward.append(function.__name__)

    def watched_hook(tensor: torch.Tensor, hook: Any) -> Any:
        custom_backward.append("register_hook")
        return register_hook(tensor, hook)

    def watched_node(tensor: torch.Tensor) -> Any:
        if not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            custom_backward.append("grad_fn")  # probably for a hook of it
        return grad_fn.__get__(tensor)

    def watched_packing(hooks: Any) -> None:
        of_torch = type(hooks) is not autograd_graph.saved_tensors_hooks and type(hooks).__module__.startswith("torch.")
        if not of_torch:  # PyTorch's own, such as save_on_cpu, change no values
            raise ExportError(
                "the model or the loss uses torch.autograd.graph.saved_tensors_hooks, which can change what the "
                "backward pass reads, and which a graph can't run: remove them, or change the values in forward()"
            )
        pack(hooks)

    with (
        mock.patch.object(BackwardCFunction, "__init__", watched_context),
        mock.patch.object(torch.Tensor, "register_hook", watched_hook),
        mock.patch.object(torch.Tensor, "grad_fn", property(watched_node)),
        mock.patch.object(autograd_graph.saved_tensors_hooks, "__enter__", watched_packing),
    ):
        yield custom_backward


@contextlib.contextmanager
def _watch_small_sizes() -> Iterator[dict[sympy.Symbol, int]]:
    """Yields a dict that collects the least size of symbols: 2 if the model's comparisons distinguish 1 from 2, or 1.

    The exporter assumes that symbolic sizes are at least 2, so it evaluates a condition such as ``x.shape[0] > 1`` at
    once, without a trace in the graph or its guards. In the model's code, such a condition compares a ``torch.SymInt``
    with a number, so the comparison operators are watched.
    """
    least: dict[sympy.Symbol, int] = {}

    def watched(name: str) -> Callable[[Any, Any], Any]:
        original, compare = getattr(torch.SymInt, name), _COMPARISONS[name]

        def answer(expression: sympy.Expr, symbol: sympy.Symbol, size: int, other: int) -> bool | None:
            try:
                return bool(compare(int(expression.subs(symbol, size)), other))
            except (TypeError, ZeroDivisionError):  # a quotient, at size 0
                return None

        def method(self: Any, other: Any) -> Any:
            file = sys._getframe(1).f_code.co_filename
            if isinstance(other, int) and (not file.startswith(_TORCH) or file.startswith(TORCH_MODELS)):
                expression = self.node.expr
                symbols = expression.free_symbols
                if len(symbols) == 1:
                    (symbol,) = symbols
                    zero, one, two = (answer(expression, symbol, size, other) for size in (0, 1, 2))
                    if zero != two or one != two:
                        least[symbol] = max(least.get(symbol, 0), 2 if one != two else 1)
            return original(self, other)

        return method

    with contextlib.ExitStack() as stack:
        for name in _COMPARISONS:
            stack.enter_context(mock.patch.object(torch.SymInt, name, watched(name)))
        yield least


@contextlib.contextmanager
def _fixing_sizes_in_texts() -> Iterator[None]:
    """Fixes a size that the model formats as text or looks up in a dict or set: a graph can do so for one size only."""

    def fixing(name: str) -> Callable[..., Any]:
        original = getattr(torch.SymInt, name)

        def method(self: Any, *args: Any) -> Any:
            # The recorder looks up again what the model has looked up, so it must get the same hash.
            others = _TORCH if name == "__hash__" else (_TORCH, _OURS)
            if sys._getframe(1).f_code.co_filename.startswith(others):
                return original(self, *args)
            return getattr(int(self), name)(*args)

        return method

    with contextlib.ExitStack() as stack:
        for name in ("__hash__", "__repr__", "__str__", "__format__"):
            stack.enter_context(mock.patch.object(torch.SymInt, name, fixing(name)))
        yield


@contextlib.contextmanager
def _marked_checkpoints(recorder: Recorder) -> Iterator[None]:
    """Marks operators inside ``torch.utils.checkpoint``, which leaves no other trace: a capture saves no tensors.

    Args:
        recorder: Takes notes of what those parts change.
    """
    enclosed = getattr(checkpointing, CHECKPOINT_GENERATOR)
    numbers = itertools.count()

    def marked(*args: Any, **kwargs: Any) -> Iterator[None]:
        with fx_traceback.annotate({CHECKPOINT: next(numbers)}), recorder.repeated():
            yield from enclosed(*args, **kwargs)

    with (
        fx_traceback.preserve_node_meta(),  # without it, annotations are dropped
        mock.patch.object(checkpointing, CHECKPOINT_GENERATOR, marked),
    ):
        yield


@contextlib.contextmanager
def _left_modules() -> Iterator[None]:
    """Lets a model go on after an error in a submodule, as in ``try: layer(x, lengths) except TypeError: layer(x)``.

    A tracer notes the modules that it is in, and would still be in those that an error has left.
    """
    enter = torch.fx.Tracer.call_module

    def call_module(tracer: torch.fx.Tracer, *args: Any, **kwargs: Any) -> Any:
        outer = len(tracer.module_stack)
        try:
            return enter(tracer, *args, **kwargs)
        except BaseException:
            while len(tracer.module_stack) > outer:
                tracer.module_stack.popitem(last=True)
            raise

    with mock.patch.object(torch.fx.Tracer, "call_module", call_module):
        yield


def _without_stand_ins() -> contextlib.AbstractContextManager[Any]:
    """Lets a model and its hooks meet its own modules, whose ids may be keys, where torch.export has stand-ins.

    A stand-in tells by which of its names a module is called that has several; nothing here asks for that.
    """
    never = property(lambda tracer: False, lambda tracer, value: None)
    return mock.patch.object(_ModuleStackTracer, "enable_attr_proxy", never, create=True)


@contextlib.contextmanager
def _without_drawing_outside_torch(model: str) -> Iterator[None]:
    """Refuses random numbers of Python and NumPy: a graph would have those of its capture in every step.

    Raises:
        ExportError: If their global generators were used.
    """
    with drawing_from_copies() as drawn:
        yield
    if drawn:
        raise ExportError(
            f"forward() of {model} or the loss draws numbers from {' and '.join(sorted(drawn, reverse=True))}, which "
            "would be the same in every step of a graph: draw them with torch (torch.rand), or before the step and "
            "pass them as inputs. In models for speech it is SpecAugment, which config.apply_spec_augment=False turns "
            "off, or layerdrop, config.layerdrop=0"
        )


@contextlib.contextmanager
def _attributes_put_back(module: StepModule) -> Iterator[None]:
    """Restores the containers in the attributes of modules, which torch.export replaces by copies of its own."""
    before = [(vars(part), dict(vars(part))) for part in module.modules() if part is not module]
    try:
        yield
    finally:
        for values, attributes in before:
            values.update({key: value for key, value in attributes.items() if key in values})


def _refuse_hooks(module: StepModule) -> None:
    for name, parameter in () if module.hooks_of_parameters else module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ExportError(f"parameter {name.removeprefix('model.')!r} has a backward hook, which a graph can't run")
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise ExportError(f"module {name.removeprefix('model.')!r} has a backward hook, which a graph can't run")
    if any(GLOBAL_HOOKS[kind] for kind in BACKWARD_HOOKS):
        raise ExportError("there is a backward hook for all modules, which a graph can't run")


def _refuse_changed_constants(program: torch.export.ExportedProgram) -> None:
    """Raises if the model changes a tensor in place that is neither parameter nor buffer: the change would be lost."""
    kept = program.graph_signature.inputs_to_lifted_tensor_constants
    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    for node in (node for part in parts for node in part.graph.nodes):
        for value in written(node):
            *_, base = bases_of(value)
            if base.name in kept:
                name = str(kept[base.name])
                name = name.removeprefix("model.")
                what = "a tensor from outside" if "lifted_tensor" in name else f"the attribute {name!r}"
                raise ExportError(
                    f"forward() changes {what} in place, a plain tensor, so the change would be lost: make it a "
                    f"buffer, self.register_buffer(...)\n  {source_line(node)}"
                )


def _refuse_tensors_without_place(program: torch.export.ExportedProgram, module: StepModule) -> None:
    """Raises if the model reads a tensor that was there before the run, but no place is known where steps can read it.

    As a constant, the graph would have this tensor in every step. Those that the run makes, PyTorch lifts by an
    operator.
    """
    if not module.carries or module.recorder.used_caches:  # a tensor that a function has kept stays
        return
    nodes = [
        node
        for part in program.graph_module.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
    ]
    fresh = {node.args[0].name for node in nodes if node.target is torch.ops.aten.lift_fresh_copy.default}
    # The model's own parameters are refused later, by name.
    known = set(map(memory_of, (*module.outside().values(), *module.parameters())))
    for name, target in program.graph_signature.inputs_to_lifted_tensor_constants.items():
        value = program.constants[target]
        memory = memory_of(value) if isinstance(value, torch.Tensor) else None
        readers = [node for node in nodes if any(source.name == name for source in node.all_input_nodes)]
        if memory is not None and name not in fresh and memory not in known and readers:
            raise ExportError(
                f"{module.model._get_name()} or its loss reads a tensor of shape {list(value.shape)} that was there "
                "before the step, in an object in which a later change of it can't be noticed: keep it in an attribute "
                f"of the model, or make it in forward()\n  {source_line(readers[0])}"
            )


def _refuse_random_branches(program: torch.export.ExportedProgram, module: StepModule) -> None:
    """Raises if a branch depends on random numbers alone: whichever a graph has, other steps need another."""
    signature, assumptions = program.graph_signature, module.branches.assumptions
    names = signature.user_outputs[len(signature.user_outputs) - len(assumptions) :]
    given = {*signature.user_inputs, *signature.inputs_to_parameters}
    nodes = {node.name: node for node in program.graph.nodes}
    for name, assumption in zip(names, assumptions, strict=True):
        sources = reached([nodes[str(name)]], _read_values)
        if any(map(draws_numbers, sources)) and given.isdisjoint(node.name for node in sources):
            raise ExportError(
                f"{module.model._get_name()} or its loss takes a branch by a random number, as layerdrop does, but "
                "a graph has one branch: turn it off (config.layerdrop=0; in some models encoder_layerdrop=0 and "
                "decoder_layerdrop=0), or compute both branches and choose with torch.where\n"
                f"  {assumption.line}"
            )


def _read_values(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Returns the nodes whose values a node reads, not only their sizes."""
    only_sizes = node.target is torch.ops.aten.sym_size.int or getattr(node.target, "_opname", "").endswith("_like")
    return [] if only_sizes else node.all_input_nodes


def _export(
    module: StepModule, sample: tuple[torch.Tensor, ...], dims: tuple[Mapping[int, Any], ...]
) -> torch.export.ExportedProgram:
    try:
        # torch.export prints the partial graph before it raises, so its output is shown only after a success.
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            program = torch.export.export(module, sample, dynamic_shapes=(dims,), strict=False)
        sys.stderr.write(stderr.getvalue())
        return program
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(explain(error, "torch.export", module.model._get_name())) from error
