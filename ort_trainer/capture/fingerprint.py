"""The cache key of an export: a hash of everything that the graph depends on.

That is the captured program, node by node; names, options, and the capabilities of the engine; and the versions of all
code that works on the program, including the source of this package. The program is serialized as text that contains
every object in full. A program with an object that can't be serialized, such as one of an unknown class, has no key: a
graph that might belong to another model is worse than a second export.

The hash excludes the values of parameters, of the model's buffers, and of tensors from outside that the step carries,
because they are inputs of the graph. It also excludes the sample's sizes in symbolic dimensions, because the graph has
conditions on them, which are checked at look-up. All other tensors are constants of the graph, so their values are
hashed::

    environment    versions of libraries, hash of this package's source, settings of PyTorch, the engine
    step           options, description, names, classes and modes of the modules
    tensors        dtypes, shapes, strides, which share memory; values of constants only
    sizes          symbols, their sources, conditions on them
    program        node by node, with what later stages read of a node's metadata
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.metadata
import inspect
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..engine.ort import engine_identity
from ..engine.programs.collectives import COLLECTIVES
from ..engine.programs.operators import LIBRARY
from ..fx.operator_table import composites, is_extended
from ..fx.symbols import is_choice_of_library
from ..outside.values import memory_of
from ..step.cache import SOURCES_AT_IMPORT, hash_of_sources
from .capture import Capture
from .step_module import ExportedStep, StepModule, canonical_names, content_of

# PyTorch's own operators, whose behavior follows from its version. The backward pass of others may be defined anywhere,
# perhaps in the user's script.
_NAMESPACES = frozenset({"aten", "prim", "prims", "export", LIBRARY, COLLECTIVES, f"{COLLECTIVES}_autograd"})
_LIBRARIES = (
    *("torch", "onnx", "onnxscript", "onnx_ir", "networkx", "numpy"),
    *("onnxruntime", "onnxruntime-training", "onnxruntime-training-cpu"),
)
# The metadata of a node that later stages read, besides the value itself.
_METADATA = ("nn_module_stack", "torch_fn", "custom")


class NoFingerprint(Exception):
    """The program has a part that can't be serialized completely."""


def fingerprint(
    captured: Capture, module: StepModule, step: ExportedStep, training: bool, kernels: Iterable[str] = ()
) -> str:
    """Returns the key of a graph: 64 hexadecimal digits.

    Args:
        captured: The captured step.
        module: The captured module, unchanged since the capture.
        step: What is exported.
        training: Whether the graph has the backward pass.
        kernels: What the kernels add to the key.

    Raises:
        NoFingerprint: If the graph depends on something that can't be serialized.
    """
    if is_extended():
        raise NoFingerprint("operators have been registered, and their code is not in the captured graph")
    if captured.as_it_stands:
        raise NoFingerprint(
            "the model has custom autograd functions or hooks, and their code is not in the captured graph"
        )
    digest = hashlib.sha256()
    for line in (
        *_environment(),
        *_step(step, training, [value.device for value in captured.inputs]),
        *(f"kernels {key}" for key in kernels),
        *_tensors(captured, module),
        *_sizes(captured),
        *_graph_module(captured.exported.graph_module),
        f"signature {_value(captured.exported.graph_signature)}",
        f"least {sorted((str(symbol), size) for symbol, size in captured.least.items())}",
        f"assumptions {list(captured.assumptions)}",
    ):
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def outline(captured: Capture) -> dict[str, str]:
    """Returns the operators of a captured step, and the tensors that its code makes, as texts by name.

    They are for a comparison with another process. It has the key ``""`` for the conditions on sizes and values: only
    programs with the same ones can be compared. It is empty if the program can't be serialized, or has collective
    operations, whose processes may have parts of their own in the loss.
    """
    nodes = [node for node in captured.exported.graph_module.graph.nodes if node.op == "call_function"]
    if any(str(node.target).startswith(COLLECTIVES) for node in nodes):
        return {}
    try:
        lines = {node.name: _call(node) for node in nodes}
        for name, value in captured.exported.constants.items():
            if "lifted_tensor" in name:
                digest = hashlib.sha256(_tensor(value, value=True).encode()).hexdigest()
                lines[name] = digest if value.numel() > 8 else str(value.tolist())
        conditions = [*_sizes(captured), f"assumptions {list(captured.assumptions)}"]
    except NoFingerprint:
        return {}
    return {"": hashlib.sha256("\n".join(conditions).encode()).hexdigest(), **lines}


def _call(node: torch.fx.Node) -> str:
    """Returns a call as text for messages, which is the same in every process."""
    _value(node.args), _value(node.kwargs)  # raises if the text of an object may have its address
    arguments = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
    return f"{_function(node.target)}({', '.join(arguments)})"


def _environment() -> Iterator[str]:
    """Yields the versions of the code that works on the program, and the settings of PyTorch that affect it."""
    yield from _versions()
    if hash_of_sources() != SOURCES_AT_IMPORT:  # which source the running code has is unknown, as imports are lazy
        raise NoFingerprint("the source of ort_trainer has been changed since it was imported")
    yield f"sources {SOURCES_AT_IMPORT}"
    yield f"engine {engine_identity()}"
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():  # its code may change any operator
        raise NoFingerprint("a mode of PyTorch is active, such as torch.set_default_device()")
    yield f"defaults {torch.get_default_dtype()} {torch.are_deterministic_algorithms_enabled()}"
    yield f"backends {torch.backends.mkldnn.is_available()} {torch.backends.mkldnn.enabled}"  # type: ignore[no-untyped-call]
    for config in (torch._functorch.config, torch.fx.experimental._config):
        yield f"{config.__name__} {sorted(config.get_config_copy().items())}"
    yield f"backends {torch.get_float32_matmul_precision()} {torch.backends.cpu.get_cpu_capability()}"


def _versions() -> Iterator[str]:
    yield f"python {platform.python_version()} {platform.machine()}"
    yield f"torch {torch.__version__} {torch.version.git_version}"
    for name in _LIBRARIES:
        try:
            yield f"{name} {_version(name)}"
        except importlib.metadata.PackageNotFoundError:  # not in the cache: a notebook may install it later
            yield f"{name} is not installed"


_version = functools.cache(importlib.metadata.version)


def _step(step: ExportedStep, training: bool, device: Sequence[torch.device]) -> Iterator[str]:
    yield f"{type(step).__name__} training {training} device {device}"
    yield f"trainable {sorted(step.trainable)} unfetched {sorted(step.unfetched)} padding {step.padding_mask}"
    yield f"options {step.autocast} {step.opset} {step.simplified} {_value(step.recompute)}"
    yield f"options {step.kernels} {step.fast_random}"
    yield f"description {_value(step.description.to_dict())} {step.description.has_open_outputs}"
    yield f"canonical {canonical_names(step.model)}"
    # The classes of all modules determine which layers are recomputed.
    for name, part in step.model.named_modules(remove_duplicate=False):
        kinds = [kind for kind in (nn.ModuleList, nn.Sequential) if isinstance(part, kind)]
        yield f"module {name!r} {_class(type(part))} {kinds} {part.training}"


def _tensors(captured: Capture, module: StepModule) -> Iterator[str]:
    """Yields the properties of parameters, buffers and constants; for constants, also the values."""
    # Other tensors of a loss function are constants.
    of_model = canonical_names(module.model, module)
    yield f"names {sorted(of_model.items())}"
    carried = {memory_of(tensor): name for name, tensor in module.outside().items()}
    yield f"carries {module.carries} leaves {module.leaves and module.recorder.leftovers.tensors}"
    storages: dict[int, int] = {}
    for name, tensor in [*captured.exported.state_dict.items(), *captured.exported.constants.items()]:
        if not isinstance(tensor, torch.Tensor):
            raise NoFingerprint(f"{name!r} is a {type(tensor).__name__}")
        is_made_of_others = _is_made_of_others(tensor)  # and has no memory of its own
        outside = None if name in of_model or is_made_of_others else carried.get(memory_of(tensor))
        name = outside or name
        is_input = name in of_model or outside is not None
        if is_made_of_others:
            yield f"tensor {name!r} {is_input} {_made_of_others(tensor)}"
        for part_name, part in _parts(name, tensor):
            yield f"tensor {part_name!r} {is_input} {_tensor(part, value=not is_input)}"
            # Which tensors share memory; tensors without elements never do.
            if part.numel():
                storage = storages.setdefault(part.untyped_storage().data_ptr(), len(storages))
                yield f"memory {storage} {part.storage_offset()}"


def _parts(name: str, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a tensor, or the plain tensors that it consists of, as a quantized weight does, with their names."""
    if not _is_made_of_others(tensor):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))


def _made_of_others(tensor: Any) -> str:
    """Returns a tensor that consists of others as text, without those, but with the source of its class.

    The class's code is in the captured program already; its source is for what later stages ask the class.
    """
    kind = type(tensor)
    names, held = tensor.__tensor_flatten__()
    inner = [_made_of_others(part) for part in (getattr(tensor, name) for name in names) if _is_made_of_others(part)]
    sizes = f"{_value(tuple(tensor.shape))} {_value(tensor.stride())} {tensor.dtype} {tensor.requires_grad}"
    return f"{_class(kind)} {_source(kind)} {sizes} {list(names)} {_value(held)} {inner}"


def _is_made_of_others(tensor: Any) -> bool:
    return hasattr(tensor, "__tensor_flatten__")


def _source(kind: type) -> str:
    """Returns a hash of the file that defines a class.

    Raises:
        NoFingerprint: If there is no such file, as in a notebook.
    """
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (OSError, TypeError) as error:
        raise NoFingerprint(f"the source of {_class(kind)} can't be read") from error


def _tensor(tensor: torch.Tensor, value: bool) -> str:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        raise NoFingerprint(f"a tensor is a {type(tensor).__name__} of layout {tensor.layout}")
    text = f"{type(tensor).__name__} {tensor.dtype} {list(tensor.shape)} {tensor.stride()} {tensor.device}"
    text += f" {tensor.requires_grad} {tensor.is_conj()} {tensor.is_neg()}"
    if value:
        text += " " + hashlib.sha256(content_of(tensor)).hexdigest()
    return text


def _sizes(captured: Capture) -> Iterator[str]:
    """Yields the symbolic sizes, their sources, and the conditions on them, but not the sample's sizes."""
    shape_env = captured.fake_mode.shape_env
    for symbol, sources in sorted(shape_env.var_to_sources.items(), key=lambda item: str(item[0])):
        yield f"symbol {symbol} {[source.name for source in sources]}"
    for name in ("var_to_range", "replacements", "deferred_runtime_asserts"):
        table = getattr(shape_env, name)
        yield f"{name} {sorted((str(key), str(value)) for key, value in table.items())}"
    yield f"divisible {sorted(map(str, shape_env.divisible))} size-like {sorted(map(str, shape_env.size_like))}"
    yield f"settings {shape_env.settings}"
    for guard in shape_env.guards:
        # Whether it is a condition of the graph: one that only chooses a library is not.
        yield f"guard {sympy.srepr(guard.expr)} {guard.size_oblivious} {is_choice_of_library(guard)}"
    ranges = captured.exported.range_constraints
    yield f"ranges {sorted((str(key), str(value)) for key, value in ranges.items())}"


def _graph_module(module: torch.fx.GraphModule) -> Iterator[str]:
    for node in module.graph.nodes:
        yield f"{node.op} {node.name} {_target(module, node)} {_value(node.args)} {_value(node.kwargs)}"
        yield f"  {_value(node.meta.get('val'))}"
        for key in _METADATA:
            yield f"  {key} {_value(node.meta.get(key))}"
    for name, part in module.named_children():
        if not isinstance(part, torch.fx.GraphModule):
            raise NoFingerprint(f"the graph calls a {type(part).__name__}")
        yield f"graph {name!r}"
        yield from _graph_module(part)
        yield f"end of {name!r}"


def _target(module: torch.fx.GraphModule, node: torch.fx.Node) -> str:
    """Returns what a node calls or reads, as unambiguous text."""
    if node.op == "call_function":
        return _function(node.target)
    if node.op == "get_attr":
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, torch.fx.GraphModule):  # serialized as a child
            return str(node.target)
        if isinstance(value, torch.Tensor):
            return f"{node.target} {_tensor(value, value=True)}"
        raise NoFingerprint(f"the graph reads {node.target}, a {type(value).__name__}")
    if node.op in ("placeholder", "output"):
        return str(node.target)
    raise NoFingerprint(f"the graph has a node of the kind {node.op}")


def _function(target: Any) -> str:
    """Returns an operator, or a function of Python or PyTorch, as text: its behavior follows from the versions."""
    if isinstance(target, torch._ops.OpOverload):
        # Another library's operator may be replaced by the package's own, whose sources are known.
        if target.namespace not in _NAMESPACES and str(target) not in composites():
            raise NoFingerprint(f"{target} is not an operator of PyTorch")
        return str(target)
    where = getattr(type(target) if isinstance(target, torch._ops.HigherOrderOperator) else target, "__module__", "")
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if (where or "").split(".")[0] not in ("_operator", "builtins", "math", "torch") or not name:
        raise NoFingerprint(f"the graph calls {target!r}")
    return f"{where}.{name}"


def _value(value: Any) -> str:
    """Returns a value as unambiguous text.

    Raises:
        NoFingerprint: If the type is unknown.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes) or value is Ellipsis:
        return f"{kind.__name__}:{value!r}"
    if kind in (torch.dtype, torch.layout, torch.memory_format, torch.device):
        return str(value)
    if kind in (tuple, list, torch.fx.immutable_collections.immutable_list, torch.Size):
        return f"{kind.__name__}[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{kind.__name__}{{{', '.join(f'{_value(key)}: {_value(entry)}' for key, entry in value.items())}}}"
    if kind is torch.fx.Node:
        return f"%{value.name}"
    if isinstance(value, torch.Tensor) and _is_made_of_others(value):
        return f"tensor {_made_of_others(value)} {[_value(part) for _, part in _parts('', value)]}"
    if isinstance(value, FakeTensor):
        sizes = f"{_value(tuple(value.shape))} {_value(value.stride())} {_value(value.storage_offset())}"
        return f"tensor {value.dtype} {value.device} {value.layout} {sizes} {value.requires_grad} {value.is_conj()}"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        # srepr, unlike str, spells out the classes of an expression and the assumptions on its symbols.
        return f"{kind.__name__} {sympy.srepr(value.node.expr)}"
    if kind is slice:
        return f"slice[{_value(value.start)}, {_value(value.stop)}, {_value(value.step)}]"
    if isinstance(value, enum.Enum):
        return f"{_class(kind)}.{value.name}"
    if isinstance(value, torch._ops.OpOverload):
        return _function(value)
    if dataclasses.is_dataclass(value) and kind.__module__.split(".")[0] in ("torch", __name__.split(".")[0]):
        parts = (f"{field.name}={_value(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{_class(kind)}({', '.join(parts)})"
    raise NoFingerprint(f"the graph contains a {_class(kind)}")


def _class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
