"""Finds the graphs for a call of a module, or exports them."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import Parameter
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from ..capture.borrow import BORROWED, borrowed
from ..capture.call import CallDescription, Entries, ExportedCall, with_entries
from ..capture.describe import input_shapes
from ..capture.eager import random_state_kept
from ..capture.nested import Layout, flatten, rebuild, with_numbers_apart
from ..capture.step_module import canonical_names
from ..core.errors import ExportError
from ..core.report import GraphRuns
from ..core.signatures import signature_of
from ..core.threads import turns
from ..engine import Request
from ..engine.ort import providers_for
from ..engine.runners import Runners
from ..engine.torch_memory import readable
from ..engine.turns import Race
from ..export.builder import GraphBuilder
from ..export.compile_later import Compilation, Compilations
from ..export.model import recompute_options
from ..guard.guard import ModelChangedError, ModelWatch
from ..guard.reads import Reads, Root
from ..kernels.kinds import choose, undetermined
from ..options import ORTTrainerOptions
from ..options.trainer_options import MINIMUM_OPSET
from ..outside.leftovers import decode, encode, numbers_in
from ..outside.notes import Notes
from ..outside.recorder import Pair, Recorder
from ..step import Step
from .arguments import (
    Link,
    check_links,
    filled,
    layout_of,
    like_given,
    links,
    merged,
    private,
    refuse_other_gradients,
    refuse_replaced_buffers,
    refuse_shared_memory,
    refuse_subclasses,
    without_histories,
    without_reading_memory,
)
from .fallback import (
    NoGraphError,
    OptionError,
    SettlingError,
    in_backward_pass,
    refuse_divided,
    refuse_freed,
    refuse_sparse,
    refuse_uninitialized,
    running,
    settled,
)
from .passes import CallsInTurns, Passes, SizedPasses, reduces_early

Call = SizedPasses | CallsInTurns
Layouts = tuple[Layout, ...]
NamedLayouts = tuple[tuple[str, Layout], ...]

_log = logging.getLogger(__name__)
_shape = attrgetter("shape")
# Each costs an export; a module that fixes a size, or gets another constant in every call, must not export without end.
_MAXIMUM_GRAPHS = 16
# After so many calls that changed their module, as the first call of a lazy module does, the module gets no graph.
_MAXIMUM_UNSETTLED = 3
# Limit for remembered shapes.
_MAXIMUM_CALLS = 1024


@dataclasses.dataclass
class ExportedGraphs:
    """The graphs of one export, with all that a call needs.

    Attributes:
        description: The inputs that they were exported for.
        passes: The graphs.
        state: The dict and the key of every parameter, buffer and tensor from outside that they take, in order.
        results: Makes the module's result from the tensors in it.
        notes: What the module leaves outside, and more.
        root: The module and its arguments, from which places outside tensors are reached.
        links: Outputs that share their memory with others, or with what the graphs take.
        changes_inputs: Whether they change inputs in place.
        filled: The entries of dicts among the arguments that the module sets and removes.
        returned: The one of them that it returns; None if it returns something else.
        rival: The same graphs for other kernels, and the race of both, while they take turns.
        runs: How often they have run.
    """

    description: CallDescription
    passes: Passes
    state: list[tuple[Mapping[str, Any], str]]
    results: Callable[[Sequence[torch.Tensor]], Any]
    notes: Notes
    root: Root
    links: list[Link]
    changes_inputs: bool
    filled: tuple[Entries, ...]
    returned: int | str | None
    rival: tuple[Passes, Race] | None = None
    runs: int = 0

    def fill(self, result: tuple[Any, ...], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Gives the dicts among the arguments of a call the entries that it leaves in them, and returns its result.

        Args:
            result: What :func:`with_entries` returns.
            args, kwargs: The arguments.
        """
        own, *contents = result
        for entries, content in zip(self.filled, contents, strict=True):
            target = entries.dict_in(args, kwargs)
            for key in entries.removed:
                del target[key]
            target.update(content)
            own = target if entries.place == self.returned else own
        return own

    def result(self, tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Any:
        """Returns the module's result, and writes what the module leaves outside tensors.

        Args:
            tensors: What the graphs returned.
            values: What they took.
        """
        self.runs += 1
        left = self.notes.leftovers
        count = len(tensors) - left.tensors
        returned = tensors[:count] if left.tensors else tensors
        if self.links:
            returned = list(returned)
            for link in self.links:
                link.apply(returned, values)
        result = self.results(returned)  # first, as numbers in it are computed from those before the call
        if left.writes:
            left.leave(self.root, tensors[count:])
        return result

    def tensors_in(self, result: Any) -> list[torch.Tensor]:
        """Returns the tensors in a result of the module, as the graphs return them; zero for a number."""
        return _tensors_in(result, self.notes)

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Returns whether the graphs are valid for inputs of these shapes."""
        return self.description.covers(shapes) and self.passes.step.takes(shapes)


class _Parts(Mapping[str, Any]):
    """The tensors of which one consists, such as a quantized weight, as long as another one is of the same kind.

    Args:
        tensors: The dict of parameters or buffers that has it; an assignment there is seen.
        key: Its key there.
        name: Its name, for errors.
        path: Attributes of it, to a part that consists of tensors itself.
    """

    def __init__(self, tensors: Mapping[str, Any], key: str, name: str, path: Sequence[str]) -> None:
        self._tensors, self._key, self._name, self._path = tensors, key, name, path
        self._checked = tensors[key]
        self._kind = _kind_of(self._checked)

    def __getitem__(self, part: str) -> Any:
        tensor = self._tensors[self._key]
        if tensor is not self._checked:
            if _kind_of(tensor) != self._kind:
                raise ExportError(f"{self._name!r} is a tensor of another kind than the one that was exported")
            self._checked = tensor
        return getattr(functools.reduce(getattr, self._path, tensor), part)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kind[1])

    def __len__(self) -> int:
        return len(self._kind[1])


def _kind_of(tensor: Any) -> tuple[Any, ...]:
    """Returns the class of a tensor that consists of others, their names, dtypes and shapes, and what else it holds."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return type(tensor), (), (), None
    names, held = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    return type(tensor), tuple(names), tuple((*_kind_of(part), part.dtype, part.shape) for part in parts), held


def _owning(owner: nn.Module, key: str) -> Mapping[str, Any]:
    """Returns the dict in which a module has a parameter or buffer."""
    return owner._parameters if key in owner._parameters else owner._buffers


class CallKind(NamedTuple):
    """What calls have in common that differ only in sizes, and in the values of tensors.

    Attributes:
        variant: What the module is like, and what it reads outside tensors.
        positional, named: The layouts of the arguments, with their constants.
        with_grad: Whether PyTorch records operations for a backward pass.
        autocast: The dtype of autocast; None without it.
        tensors: Number of dimensions, dtype, whether it requires grad, and order in memory of each tensor among the
            arguments; the order is True for a contiguous tensor.
    """

    variant: Any
    positional: Layouts
    named: NamedLayouts
    with_grad: bool
    autocast: torch.dtype | None
    tensors: tuple[tuple[int, torch.dtype, bool, Any], ...]


CallKey = tuple[CallKind, tuple[torch.Size, ...]]
"""A kind of call, and the shapes of the tensors among the arguments."""


class CallGraphs:
    """The graphs of a module.

    Args:
        module: The module.
        options: All settings.

    Attributes:
        turns: The lock for threads that call the module.
        exported: Called with the passes of each export.
        refused: Kinds of calls for which no graph can be made, and why.
    """

    def __init__(self, module: nn.Module, options: ORTTrainerOptions) -> None:
        self._module, self._options = module, options
        self.turns = turns()
        self.exported: Callable[[Step, Sequence[Step]], None] | None = None
        self._unsettled = 0
        self._settles = False  # whether PyTorch ran the last call, because it changed the module
        self._trial: Recorder | None = None
        self._is_renewed = False
        self.forget()

    def renew(self) -> None:
        """Has all graphs made anew, from the module as it is, not from the cache."""
        self._is_renewed = True
        self.forget()

    def runs(self, name: str) -> list[GraphRuns]:
        """Returns the graphs with their runs, under a name."""
        return [
            GraphRuns(name, each.runs, step.kernels, step.seconds, step.kept, bool(each.passes.trained))
            for several in self._by_kind.values()
            for each in several
            for step in [each.passes.step]
        ]

    def forget(self) -> None:
        """Forgets all graphs, for a module that has other parts or another ``forward`` now."""
        parameters = signature_of(self._module.forward).parameters.values()
        kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [parameter.name for parameter in parameters if parameter.kind in kinds]
        self._forward = vars(self._module).get("forward")
        self._watch: ModelWatch | None = None  # created in the next call: a lazy module has no parameters yet
        self._by_kind: dict[CallKind, list[ExportedGraphs]] = {}
        self._calls: dict[CallKey, tuple[ExportedGraphs, Call]] = {}
        # Numbers among the arguments that have changed from call to call, which makes them inputs of graphs.
        self._changing: set[str] = set()
        # Their values in the current call.
        self._arguments: dict[str, Any] = {}
        # What calls have in common that differ only in numbers -> the numbers of the first such call.
        self._first_numbers: dict[Any, dict[str, Any]] = {}
        self.refused: dict[Any, str] = {}
        self._compilations = Compilations()

    def _begin(self) -> ModelWatch:
        """Begins to watch the module, after checking that its parameters exist."""
        refuse_uninitialized(self._module)
        refuse_sparse(self._module)
        refuse_divided(self._module)
        refuse_freed(self._module)
        self._watch = ModelWatch(self._module, list(canonical_names(self._module)), (), for_calls=True)
        self._root = Root(self._module, None, self._arguments)
        self._reads = Reads(self._root)
        self._outside: dict[str, torch.Tensor] = {}
        return self._watch

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[ExportedGraphs, Call, list[torch.Tensor]]:
        """Returns graphs, a call of them, and the values that it takes.

        Args:
            args: The positional arguments of the call.
            kwargs: Its keyword arguments.

        Raises:
            NoGraphError: If the module can't be exported for such calls.
            RuntimeError: If there are too many graphs.
            SettlingError: If the call changes the module, as a first call may.
            TypeError: If an argument can't be used.
        """
        self._prepare()
        key, leaves = self._read(args, kwargs)
        entry = self._entry(key)
        if entry is None and self._has_changing_numbers(key[0]):
            key, leaves = self._read(args, kwargs)  # now with inputs for them
            entry = self._entry(key)
        if entry is None:
            with torch.inference_mode(False):
                entry = self._add(leaves, key[0])
            if len(self._calls) >= _MAXIMUM_CALLS:
                self._calls.clear()
            self._calls[key] = entry
        graphs, call = entry
        if graphs.notes.tensors or graphs.notes.scalars:
            self._outside.update(self._reads.carried(owned=False))
        # Numbers are copied: the backward pass of this call may run after calls with other numbers.
        scalars = graphs.notes.scalars
        values = [tensors[name].clone() if name in scalars else tensors[name] for tensors, name in graphs.state]
        if graphs.changes_inputs:
            refuse_shared_memory(leaves, values)
        values += leaves.values()
        return graphs, call, values

    def _prepare(self) -> None:
        """Takes what has changed between calls: graphs compiled meanwhile, and another ``forward``."""
        if self._settles and in_backward_pass():
            raise SettlingError("repeats such a call, as a checkpoint of activations does")
        self._settles = False
        if self._compilations.running:
            with torch.inference_mode(False):
                self._compilations.take()
        if vars(self._module).get("forward") is not self._forward:  # another one was assigned
            self.forget()

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CallKey, dict[str, torch.Tensor]]:
        """Returns the key of a call, and the tensors among its arguments by name."""
        leaves: dict[str, torch.Tensor] = {}
        positional = tuple(flatten(self._name(at), value, leaves, objects=True) for at, value in enumerate(args))
        named = tuple((name, flatten(name, value, leaves, objects=True)) for name, value in kwargs.items())
        leaves = {name: readable(name, value) for name, value in leaves.items()}
        if len(set(map(id, leaves.values()))) < len(leaves):
            layouts = merged([*positional, *(layout for _, layout in named)], leaves)
            positional, of_names = layouts[: len(args)], layouts[len(args) :]
            named = tuple(zip(kwargs, of_names, strict=True))
        if self._changing:
            positional, named = self._with_numbers_apart(positional, named, self._arguments, self._changing)
        variant = self._variant()
        device = next(iter(leaves.values())).device.type if leaves else "cpu"
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        tensors = tuple(
            (value.dim(), value.dtype, value.requires_grad, value.is_contiguous() or layout_of(value))
            for value in leaves.values()
        )
        kind = CallKind(variant, positional, named, torch.is_grad_enabled(), autocast, tensors)
        return (kind, tuple(map(_shape, leaves.values()))), leaves

    def _entry(self, key: CallKey) -> tuple[ExportedGraphs, Call] | None:
        """Returns the graphs that such a call has used before; None if there was none.

        Raises:
            TypeError: If an argument has no hash.
        """
        try:
            return self._calls.get(key)
        except TypeError as error:
            raise TypeError(
                f"an argument of {self._module._get_name()} is neither a tensor nor a constant that can be compared "
                f"({error}): pass arrays as tensors"
            ) from None

    def _variant(self) -> Any:
        """Returns what the module is like now; one that has become another one is watched anew."""
        try:
            structure = (self._watch or self._begin()).variant(True)
        except ModelChangedError as error:
            _log.info("exporting the module anew: %s", error)
            self.forget()
            structure = self._begin().variant(True)
        return self._reads.variant(structure)

    def _with_numbers_apart(
        self, positional: Layouts, named: NamedLayouts, numbers: dict[str, Any], wanted: Collection[str] | None
    ) -> tuple[Layouts, NamedLayouts]:
        """Returns layouts with names in place of the wanted numbers, or of all; puts their values into ``numbers``."""
        return (
            tuple(with_numbers_apart(part, self._name(at), numbers, wanted) for at, part in enumerate(positional)),
            tuple((name, with_numbers_apart(part, name, numbers, wanted)) for name, part in named),
        )

    def _has_changing_numbers(self, call: CallKind) -> bool:
        """Returns whether a call differs from an earlier one only in numbers, and makes these inputs of graphs."""
        numbers: dict[str, Any] = {}
        kind = self._with_numbers_apart(call.positional, call.named, numbers, None)
        first = self._first_numbers.setdefault(kind, numbers)
        changed = {name for name, value in numbers.items() if first[name] != value}
        self._changing |= changed
        return bool(changed)

    def _name(self, place: int) -> str:
        """Returns the name of a positional argument."""
        return self._names[place] if place < len(self._names) else f"args.{place}"

    def _add(self, leaves: Mapping[str, torch.Tensor], kind: CallKind) -> tuple[ExportedGraphs, Call]:
        """Finds or exports the graphs for inputs of other shapes."""
        shapes = {name: tuple(value.shape) for name, value in leaves.items()}
        candidates = self._by_kind.get(kind, [])
        graphs = next((graphs for graphs in candidates if graphs.takes(shapes)), None)
        if graphs is None:
            if kind in self.refused:
                raise ExportError(self.refused[kind])
            if sum(map(len, self._by_kind.values())) + len(self.refused) >= _MAXIMUM_GRAPHS:
                raise RuntimeError(
                    f"{self._module._get_name()} has been exported {_MAXIMUM_GRAPHS} times, for different sizes, "
                    "modes, settings or constants among its arguments. Pass numbers that change as tensors, pad inputs "
                    "to fewer sizes, or wrap the part of the model whose graph stays the same"
                )
            description = CallDescription(input_shapes(leaves))
            if candidates:
                description = candidates[-1].description.covering(shapes)
                _log.warning(
                    "%s got inputs of other sizes than before, so it is exported again: %s",
                    self._module._get_name(),
                    ", ".join(map(str, description.inputs)),
                )
            self._trial = None
            try:
                with running(self._module):
                    graphs = self._export(leaves, description, kind)
            except SettlingError as error:
                self._unsettled += 1
                if self._unsettled <= _MAXIMUM_UNSETTLED:
                    self._settles = True
                    raise
                raise NoGraphError(kind) from ExportError(str(error))
            except Exception as error:
                if self._trial is not None:  # another try is worth it only if something that the trial read has changed
                    self._reads.add(Notes(reads=tuple(self._trial.met.reads)))
                raise NoGraphError(kind) from error
            self._by_kind.setdefault(kind, []).append(graphs)
        call = SizedPasses(graphs.passes, shapes)
        if graphs.links:
            taken = [*(owner[name].shape for owner, name in graphs.state), *shapes.values()]
            check_links(graphs.links, call.shapes, taken)
        if graphs.rival is not None and graphs.rival[0].step.takes(shapes):
            rival, race = graphs.rival
            return graphs, CallsInTurns(call, SizedPasses(rival, shapes), race)
        return graphs, call

    def _export(
        self, leaves: Mapping[str, torch.Tensor], description: CallDescription, kind: CallKind
    ) -> ExportedGraphs:
        """Runs the module once to see its result, then exports its graphs."""
        positional, with_grad = kind.positional, kind.with_grad
        module, options, watch = self._module, self._options, self._watch
        assert watch is not None  # find() has created it: the kind has its variant
        device = _device_of([*leaves.values(), *module.parameters(), *module.buffers()])
        refuse_subclasses(leaves)
        copies = {name: like_given(value) for name, value in leaves.items()}
        result, entries, returned = self._result(positional, dict(kind.named), copies, device, with_grad)
        if entries and options.verification() not in (0, "auto"):
            raise ExportError(
                "forward() changes a dict among its arguments, which debug.verify_every can't compare: return what it "
                "adds to it"
            )
        call = ExportedCall(
            model=module,
            description=description,
            loss_fn=None,
            trainable=watch.trainable if with_grad else frozenset(),
            modes=watch.modes or {},
            autocast=kind.autocast,
            kernels=self._kernels(device),
            opset=max(options._internal_use.onnx_opset_version, MINIMUM_OPSET),
            recompute=recompute_options(options),
            fast_random=options.utils.random_numbers == "fast",
            args=positional,
            kwargs=dict(kind.named),
            requires_grad=frozenset(name for name, value in leaves.items() if value.requires_grad and with_grad),
            carries=True,
            arguments=dict(self._arguments),
            filled=entries,
            numbers=frozenset(self._reads.numbers),
            tables=self._reads.tables,
        )
        sample = {name: value.clone() if value.is_inference() else value for name, value in leaves.items()}
        noted: list[Notes] = []
        builder = GraphBuilder(
            call,
            cached=options.utils.cache_exports and not self._is_renewed,
            tolerates=options.tolerates,
            depends_on_modes=lambda modules, _: watch.depends_on_modes(modules),
            noted=lambda notes, _: noted.append(notes),
        )
        forward, backward = builder.build_call(sample)
        notes = noted[-1]
        self._reads.add(notes)
        outputs = _tensors_in(result, notes)
        if len(outputs) != len(forward.outputs) - notes.leftovers.tensors:
            raise ExportError(
                f"forward() of {module._get_name()} returns {len(outputs)} tensors, but "
                f"{len(forward.outputs) - notes.leftovers.tensors} while it is captured: it must not ask whether it is "
                "compiled or exported"
            )
        if self.exported is not None:
            self.exported(forward, backward)
        passes = Passes(forward, backward, self._runners(device))
        outside = {*notes.tensors, *notes.scalars}
        self._outside.update(self._reads.carried(owned=False))
        state = [(self._outside, name) if name in outside else self._place(name) for name in forward.state]
        taken = [*(owner[name] for owner, name in state), *copies.values()]
        linked = links(outputs, taken, with_grad)
        differentiable = {at for part in passes.parts for at in part} if passes.trained else set()
        refuse_other_gradients(outputs, differentiable, linked)
        changes_inputs = bool(forward.input_updates)
        results = self._results(result, notes)
        root = Root(module, None, self._arguments)
        graphs = ExportedGraphs(
            description, passes, state, results, notes, root, linked, changes_inputs, entries, returned
        )
        # Each process would choose by itself, and the parts of a call take no turns.
        if len(passes.parts) == 1 and not reduces_early():
            begin = functools.partial(builder.compile_later, Request(sample, True), forward, backward)
            self._compilations.begin(begin, functools.partial(self._add_rival, graphs))
        return graphs

    def _add_rival(
        self, graphs: ExportedGraphs, compilation: Compilation, forward: Step, backward: Sequence[Step]
    ) -> None:
        """Lets graphs that were compiled meanwhile take turns with those that run."""
        passes = Passes(forward, backward, graphs.passes.runners)

        def decided(won: bool, seconds: tuple[float, float]) -> None:
            compilation.chosen(won, seconds)
            graphs.rival = None
            self._calls.clear()
            if won:
                self._replace(graphs, dataclasses.replace(graphs, passes=passes))

        graphs.rival = passes, Race(decided)
        self._calls.clear()

    def _replace(self, graphs: ExportedGraphs, others: ExportedGraphs) -> None:
        """Prefers other graphs of the same calls; the former ones stay if they take more sizes."""
        for candidates in self._by_kind.values():
            place = next((at for at, each in enumerate(candidates) if each is graphs), None)
            if place is not None:
                step, other = graphs.passes.step, others.passes.step
                stays = (step.guards, step.fixed) != (other.guards, other.fixed)
                candidates[place : place + 1] = [others, graphs] if stays else [others]

    def _results(self, result: Any, notes: Notes) -> Callable[[Sequence[torch.Tensor]], Any]:
        """Returns the function that builds the module's result from the tensors in it.

        Args:
            result: What the module returned in the trial run.
            notes: The notes of the export.
        """
        code, root = notes.result, Root(self._module, None, self._arguments)
        if code is not None:  # mostly one tensor
            return itemgetter(code[1]) if code[0] == "tensor" else lambda tensors: decode(code, tensors, root)
        named: dict[str, torch.Tensor] = {}
        layout = flatten("output", result, named, objects=True)
        return lambda tensors: rebuild(layout, dict(zip(named, tensors, strict=True)))

    def _kernels(self, device: torch.device) -> str:
        """Returns the kind of kernels for a device.

        Raises:
            OptionError: If the option asks for kernels that the device lacks.
        """
        name = self._options.utils.kernels
        if reason := undetermined(name, self._options.debug.deterministic_compute):
            raise OptionError(reason)
        usable, reason = choose(name, lambda kernels: kernels.objection(device))
        if not usable:
            raise OptionError(f"utils.kernels is {name!r}, but {reason}: set it to 'auto'")
        return usable

    def _runners(self, device: torch.device) -> Runners:
        """Returns what makes the runners of passes."""
        options = self._options
        providers = providers_for(device, options.provider_options)
        return Runners(device, options.session_options, options.debug.deterministic_compute, providers)

    def _place(self, name: str) -> tuple[Mapping[str, Any], str]:
        """Returns the dict and the key of a parameter or buffer; a later assignment to it is then seen.

        Of a tensor that consists of others, such as a quantized weight, the name goes on with the attribute of one.
        """
        owner, (*path, key) = self._module, name.split(".")
        for at, part in enumerate(path):
            inner = owner._modules.get(part)
            if inner is None:
                return _Parts(_owning(owner, part), part, ".".join(path[: at + 1]), path[at + 1 :]), key
            owner = inner
        return _owning(owner, key), key

    def _result(
        self,
        positional: Sequence[Layout],
        named: Mapping[str, Layout],
        copies: Mapping[str, torch.Tensor],
        device: torch.device,
        with_grad: bool,
    ) -> tuple[Any, tuple[Entries, ...], int | str | None]:
        """Runs the module once on copies, to see what it returns and what of it requires grad; leaves no side effects.

        Returns:
            The result, with the entries that it sets in dicts among its arguments, if any; the keys of these entries;
            and the place of a dict that it returns.
        """
        layouts = {self._name(at): private(layout) for at, layout in enumerate(positional)}
        layouts |= {name: private(layout) for name, layout in named.items()}
        values = {name: rebuild(layout, {**copies, **self._arguments}) for name, layout in layouts.items()}
        args, kwargs = list(values.values())[: len(positional)], {name: values[name] for name in named}
        modes, trainable = (self._watch.modes, self._watch.trainable) if self._watch else (None, ())
        began = {name: dict(value) for name, value in values.items() if type(value) is dict}
        buffers = dict(self._module.named_buffers())
        self._trial = Recorder(Pair(self._module))
        with (
            BORROWED,
            borrowed(self._module, trainable, self._module.training, modes),
            self._trial.running(),
            random_state_kept(device),
            settled(self._module),
            without_reading_memory(copies),
            without_histories(buffers),
            torch.set_grad_enabled(with_grad),
        ):
            result = self._module(*args, **kwargs)
            for written in self._trial.output:
                raise SettlingError(written)
            refuse_replaced_buffers(result, buffers, dict(self._module.named_buffers()))
        at = dict(zip(layouts, (*range(len(positional)), *named), strict=True))
        keys = filled(layouts, values, began, copies, self._changing)
        entries = tuple(Entries(at[name], *of_name) for name, of_name in keys.items())
        returned = next((at[name] for name in keys if result is values[name]), None)
        return with_entries(result, entries, args, kwargs) if entries else result, entries, returned


def _tensors_in(result: Any, notes: Notes) -> list[torch.Tensor]:
    """Returns the tensors in a result of a module, as its graphs return them; zero for a number that they compute."""
    tensors: list[torch.Tensor] = []
    if notes.result is not None:
        encode(result, tensors, {})
        for at in sorted(numbers_in(notes.result)):
            tensors.insert(at, torch.zeros(()))
    else:
        named: dict[str, torch.Tensor] = {}
        flatten("output", result, named, objects=True)
        tensors += named.values()
    # What a collective operation returns in PyTorch waits when it is read.
    return [value.trigger_wait() if hasattr(value, "trigger_wait") else value for value in tensors]


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
