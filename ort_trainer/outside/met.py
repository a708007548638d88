"""What a run meets outside tensors, and which values it reads there.

Attributes of modules and of other objects are recorded as they are read (``watch.py``). Python has no way to watch
global variables, variables of closures and defaults, so those that the code of a function names are recorded when the
function is first met: at its place, or when it runs (``calls.py``).
"""

from __future__ import annotations

import builtins
import copy
import enum
import functools
import gc
import inspect
import io
import itertools
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..core.errors import ExportError
from ..fx.explain import EXPORTER, LIBRARIES, TORCH_MODELS
from .calls import functions_in
from .changes import HOOKS, OF_EVERY_MODULE, Copies
from .code import LIBRARY_NAMES, globals_of, imports_of, is_users, names_of, optional_in
from .containers import copied
from .generators import is_generator
from .numbers import Growing, Number, TypeOf, places_of
from .output import position_of
from .places import MISSING, Access, Place, attributes_of, described, in_cell, of_class, read, referent, write
from .values import CONTAINERS, MEMORIES, VIEWS, is_plain, is_watched, parts_of
from .watch import Watch

# Of an autograd.Function, called after the run.
_CALLED_LATER = frozenset({"setup_context", "backward"})
# Objects that can't be watched, so all of their attributes count as read.
_NAMESPACES = (types.SimpleNamespace, threading.local)


class Met:
    """What a run has met; everything is recorded once.

    Args:
        root: Where places begin; see :class:`~.recorder.Recorder`.
        copies: Takes copies of what the run may change.
        numbers: Places of numbers and lists for which stand-ins are there during the run, with their values.
        own: The ids of the parameters and buffers of the modules.

    Attributes:
        reads: The places that the run has read, in order, with their values.
        tensors: Tensors at these places that are not the modules' own, by ``id``, each with its first place.
        objects: Other objects, likewise.
        aliases: Pairs of places that hold one object.
        modes: The modules, by ``id``, whose attribute ``training`` the run has read.
        names: Names of globals and attributes in the code of all functions.
        ran: The code that has run, of users' functions.
        listed: Places of the ``__dict__`` whose keys were read.
        files: Files, each with its place and its position when it was met.
        caches: Functions that keep results, and what they had kept before.
    """

    def __init__(self, root: Any, copies: Copies, numbers: Mapping[Place, Any], own: Collection[int]) -> None:
        self._root, self._copies, self._numbers, self._own = root, copies, numbers, own
        self.reads: dict[Place, Any] = {}
        self.tensors: dict[int, tuple[torch.Tensor, Place]] = {}
        self.objects: dict[int, tuple[Any, Place]] = {}
        self.aliases: dict[tuple[Place, Place], None] = {}
        self.modes: dict[int, nn.Module] = {}
        self.names: set[str] = set()
        self.ran: set[types.CodeType] = set()
        self.listed: dict[Place, None] = {}
        self.files: list[tuple[Place, Any, int]] = []
        self.caches: list[tuple[Any, Any]] = []
        self._iterators: list[Place] = []  # without counts
        self._counts: list[tuple[Place, Any, Any]] = []  # each with a copy from when it was met
        self._made: dict[int, Any] = {}  # what the run has made and put outside, by id
        self._foreign: set[int] = set()  # ids of modules that are not parts of the model
        self._of_classes: set[tuple[int, str]] = set()  # ids of classes and Python modules, with attributes recorded
        self._places_of_classes: dict[int, Place] = {}  # id of a class -> its first place
        self._holders: dict[int, list[tuple[type, Place, Any]]] = {}  # id of code -> a class, its attribute, the value
        self._codes: dict[int, types.CodeType] = {}  # of the functions that were met
        self._looked_up: set[int] = set()  # ids of classes and Python modules, of which names were recorded
        self._having: dict[str, dict[int, tuple[Any, Place]]] = {}  # a name -> those of them that have it, by id
        self._typed: list[dict[str, Any]] = []  # the global variables that have another "type"
        self.watch = Watch(self.objects, self._read)

    def end(self) -> None:
        """Puts back what was replaced, and the counts and caches that the run has changed."""
        for place, count, before in self._counts:
            if repr(count) != repr(before):
                write(self._root, place, before)
        for values in self._typed:
            del values["type"]
        for function, before in self.caches:
            # It may have kept a stand-in for a number, a traced tensor, or a result of what the run has changed.
            # Where the run clears caches, the number of misses tells nothing.
            has_kept = self.clears_caches or (self._numbers and function.cache_info().misses != before.misses)
            if has_kept or _holds_traced(function):
                function.cache_clear()

    @property
    def clears_caches(self) -> bool:
        """Whether code that was met clears the cache of a function."""
        return "cache_clear" in self.names and bool(self.caches)

    def meet_module(self, module: nn.Module, place: Place) -> None:
        """Takes note of a module, and copies what the run may change of it; its submodules are met separately."""
        if id(module) in self.objects:
            return
        self.objects[id(module)] = module, place
        values = attributes_of(module)
        self._copies.add_attributes(values, place)
        self._copies.add_parts(values)
        for key, tensor in (*values["_parameters"].items(), *values["_buffers"].items()):
            if tensor is not None:  # bitsandbytes keeps the scales of a weight in attributes, and moves them away
                of_tensor: Place = (*place, Access("tensor", key))
                self._copies.add_attributes(attributes_of(tensor), of_tensor)
                for name, value in attributes_of(tensor).items() if id(tensor) in self._own else ():
                    self.meet(value, (*of_tensor, Access("attribute", name)))
        for base, of_base in self._place_classes(type(module), (*place, Access("get", "__class__"))):
            self._copies.add_class(base, of_base)
        for name, value in values.items():
            if type(value) in CONTAINERS and name not in OF_EVERY_MODULE:
                self._copies.add_contents(value, (*place, Access("attribute", name)))
        for hooks in HOOKS:
            for at, hook in enumerate(values.get(hooks, {}).values()):
                self.meet(hook, (*place, Access("get", hooks), Access("entry", at)))

    def meet(self, value: Any, place: Place) -> None:
        """Takes note of an object that the run may read from or change."""
        if isinstance(value, enum.Enum) and is_users(type(value).__module__):
            self._copies.add_attributes(attributes_of(value), place)
            for name, part in list(attributes_of(value).items()):
                self.record((*place, Access("attribute", name)), part)
        if value is MISSING or type(value) is Growing or (is_plain(value) and not isinstance(value, type)):
            return
        if value is sys.modules or id(value) in self._made:  # the modules that code reads are met at their names
            return
        if isinstance(value, torch.Tensor):
            if type(value) in (torch.Tensor, nn.Parameter):  # not one that stands for a parameter during a capture
                self._note_alias(self.tensors.setdefault(id(value), (value, place))[1], place)
                self._copies.add_tensor(value)
            return
        if isinstance(value, (types.ModuleType, type)):
            if id(value) not in self._looked_up:
                self._looked_up.add(id(value))
                if isinstance(value, enum.EnumMeta):
                    for name in value.__members__:
                        self.meet(value[name], (*place, Access("get", name)))
                for owner, of_owner in self._with_bases(value, place):
                    for name in vars(owner):
                        self._having.setdefault(name, {})[id(owner)] = owner, of_owner
                # Of a class among values, code may read a function without calling it.
                self._meet_names(value, place, frozenset(self.names), data_only=isinstance(value, types.ModuleType))
            return
        if id(value) in self.objects:
            if not isinstance(value, (nn.Module, types.FunctionType, types.MethodType)):  # compared by identity anyway
                self._note_alias(self.objects[id(value)][1], place)
            return
        if isinstance(value, nn.Module):  # one that is not a part of the model
            for name, module in value.named_modules():
                inner = (*place, *(Access("get", part) for part in name.split("."))) if name else place
                self.meet_module(module, inner)
                self._foreign.add(id(module))
                for kind in ("_modules", *HOOKS):
                    self.record((*inner, Access("attribute", kind)), attributes_of(module)[kind])
                for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                    self.record((*inner, Access("tensor", key)), tensor)
            return
        self.objects[id(value)] = value, place
        if isinstance(value, types.FunctionType):
            self._meet_function(value, place)
        elif isinstance(value, types.MethodType):
            self.meet(value.__self__, (*place, Access("get", "__self__")))
            self.meet(value.__func__, (*place, Access("get", "__func__")))
        elif isinstance(value, (*CONTAINERS, functools.partial)):
            self._copies.add_contents(value, place)
            for step, part in parts_of(value):
                self.meet(part, (*place, Access(*step)))
            for at, key in enumerate(copied(value) if isinstance(value, dict) else ()):
                self.meet(key, (*place, Access("member", at)))
            if type(value) not in CONTAINERS:
                self._meet_object(value, place)
        elif is_generator(value):
            self._copies.add_generator(value, place)
        elif isinstance(value, types.BuiltinFunctionType):
            if isinstance(value.__self__, (random.Random, *CONTAINERS)):  # a method that was kept
                self.record((*place, Access("get", "__self__")), value.__self__)
        elif isinstance(value, weakref.ref) or type(value) in weakref.ProxyTypes:
            self.meet(referent(value), (*place, Access("referent", "")))
        elif isinstance(value, VIEWS):
            self.meet(value.mapping, (*place, Access("get", "mapping")))
        elif isinstance(value, types.MappingProxyType):
            for key, part in value.items():
                self.meet(part, (*place, Access("key", key)))
        elif isinstance(value, Iterator):
            if isinstance(value, io.IOBase):  # what files hold is not watched
                position = position_of(value)
                self.files += [] if position is None else [(place, value, position)]
            elif type(value) is itertools.count:
                self._counts.append((place, value, copy.copy(value)))
            else:
                self._iterators.append(place)
                self.refuse_iterators()  # before the run takes a value, which nothing could put back
        elif isinstance(value, MEMORIES):
            self._copies.add_memory(value, place)
            for step, part in parts_of(value):
                self.meet(part, (*place, Access(*step)))
        else:
            self._meet_object(value, place)

    def _note_alias(self, first: Place, second: Place) -> None:
        """Notes that two places hold one object, as what is read and left is noted at the first of them."""
        if first != second:
            self.aliases[first, second] = None

    def _meet_object(self, value: Any, place: Place) -> None:
        """Takes note of an object of a user's class: watches the class, or records all attributes if that fails."""
        kind = type(value)
        # Such as a function wrapped by functools.lru_cache. Statically, as a user's __getattr__ may run any code.
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            self.meet(wrapped, (*place, Access("get", "__wrapped__")))
            if isinstance(value, functools._lru_cache_wrapper) and is_users(value.__module__):
                self.caches.append((value, value.cache_info()))
                for step, part in parts_of(value):
                    self.meet(part, (*place, Access(*step)))
        can_be_watched = is_watched(kind) and self.watch.add(kind)
        if not can_be_watched and kind not in _NAMESPACES:
            return
        try:
            values = attributes_of(value)
            self._copies.add_attributes(values, place)
        except AttributeError:  # it has slots only
            values = {}
        self._copies.add_slots(value, place)
        for name, part in () if can_be_watched else values.items():
            self.record((*place, Access("attribute", name)), part)
        self._meet_names(kind, (*place, Access("get", "__class__")), frozenset(self.names), data_only=can_be_watched)

    def of_stand_ins(self, parameters: Collection[tuple[Place, torch.Tensor]]) -> Callable[[torch.Tensor, str], Any]:
        """Returns a ``__getattr__`` for the tensors that stand for others during a capture, and lack their attributes.

        Args:
            parameters: Places where a tensor may stand for one, which is given, too.
        """
        now = [(read(self._root, place), place, tensor) for place, tensor in parameters]
        stands_for = {id(other): (other, place, tensor) for other, place, tensor in now if other is not tensor}
        mine = threading.get_ident()

        def absent(owner: torch.Tensor, name: str) -> Any:
            value: Any = MISSING
            by_user = not sys._getframe(1).f_code.co_filename.startswith(LIBRARIES)
            if id(owner) in stands_for and by_user and threading.get_ident() == mine:
                _, place, tensor = stands_for[id(owner)]
                value = attributes_of(tensor).get(name, MISSING)
                self.record((*place, Access("attribute", name)), value)
            if value is MISSING:
                raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}", name=name, obj=owner)
            return value

        return absent

    def called(self, frame: types.FrameType) -> None:
        """Records a function that runs, at its place: in a class of its first argument, or by its name."""
        code, values = frame.f_code, frame.f_globals
        self.ran.add(code)
        if id(code) in self._codes:
            return
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if id(owner) in self.objects:
            self._place_classes(type(owner), (*self.objects[id(owner)][1], Access("get", "__class__")))
        bases = {*type(owner).__mro__, *(owner.__mro__ if isinstance(owner, type) else ())}
        holders = self._holders.get(id(code), [])
        for _, place, value in [entry for entry in holders if entry[0] in bases] or holders:
            self._record_function(code, place, value)
        if holders:
            return
        holder: Any = sys.modules.get(values["__name__"])
        of_module: Place = (Access("module", values["__name__"]),)
        is_module = holder is not None and vars(holder) is values
        place = of_module
        for part in (*getattr(code, "co_qualname", code.co_name).split("."), "") if is_module else ():
            for name, value in list(vars(holder).items()):
                is_old = self._copies.is_old(vars(holder), name, value)
                if is_old and self._record_function(code, (*place, Access("attribute", name)), value):
                    return
            holder, place = vars(holder).get(part), (*place, Access("attribute", part))
            if not isinstance(holder, type):
                break
        if is_module:  # the function has no place, as those that this run has made, but its global variables have
            self._meet_code(code, values, of_module, "attribute")

    def _record_function(self, code: types.CodeType, place: Place, value: Any) -> bool:
        """Records the function with this code in an attribute, such as a property; returns whether it is there."""
        for steps, function in functions_in(value):
            if function.__code__ is code:
                self.record(place, value)
                self.record((*place, *steps), function)
                return True
        return False

    def _meet_function(self, function: types.FunctionType, place: Place) -> None:
        """Records what a function may read: its closure, defaults, globals, and the modules that it imports."""
        self._codes[id(function.__code__)] = function.__code__
        self._copies.add_function(function, place)
        for at, cell in enumerate(function.__closure__ or ()):
            inner: Place = (*place, Access("cell", at))  # type: ignore[assignment]
            if self._copies.add_variable(cell, "cell_contents", inner) is in_cell(cell):
                self.record(inner, in_cell(cell))
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self.record((*place, Access("get", name)), getattr(function, name))
        self.record((*place, Access("get", "__code__")), function.__code__)
        if is_users(function.__globals__.get("__name__")):
            code = function.__code__
            self._meet_code(code, function.__globals__, place, "global")
            for at, cell in enumerate(function.__closure__ or ()):
                names = names_of(code) | _CALLED_LATER
                self._meet_names(in_cell(cell), (*place, Access("cell", at)), names, optional_in(code))

    def _meet_code(self, code: types.CodeType, values: dict[str, Any], place: Place, kind: str) -> None:
        """Records the global variables that code may read.

        Args:
            code: The code.
            values: The global variables.
            place: Of the function, or the Python module.
            kind: The kind of the step from there to a global variable.
        """
        names, optional = names_of(code), optional_in(code)
        new = names - self.names
        self.names |= names
        having = {key: entry for name in sorted(new) for key, entry in self._having.get(name, {}).items()}
        for known, of_known in having.values():
            self._meet_names(known, of_known, new, data_only=isinstance(known, types.ModuleType))
        if self._numbers and "type" in names and "type" not in values:
            values["type"] = TypeOf
            self._typed.append(values)
        for name in sorted(names):
            if name not in values and hasattr(builtins, name):
                continue
            is_data = name in values and not isinstance(values[name], (types.ModuleType, types.FunctionType, type))
            if is_data and name not in globals_of(code):  # the name of an attribute
                continue
            inner: Place = (*place, Access(kind, name))  # type: ignore[assignment]
            self._copies.add_variable(values, name, inner)
            if name in values:
                self._record_if_old(values, name, place, values[name], kind)
                self._meet_names(values[name], inner, names | _CALLED_LATER, optional)
            elif name in optional and name in globals_of(code):
                self._record_if_old(values, name, place, MISSING, kind)
        for name in sorted(imports_of(code, values)):
            self._meet_names(sys.modules[name], (*place, Access("module", name)), names, optional)

    def _meet_names(
        self,
        value: Any,
        place: Place,
        names: frozenset[str],
        optional: frozenset[str] = frozenset(),
        data_only: bool = False,
    ) -> None:
        """Records what code may read of a class, a function or a Python module: nothing can watch their attributes.

        Args:
            value: The class, function or module.
            place: Its place.
            names: The names in the code.
            optional: Those of them that may be absent.
            data_only: Whether to leave out functions, as the code that names them does not call them on this class.
        """
        if isinstance(value, (type, types.ModuleType, types.FunctionType)):
            room = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
            for name in sorted(optional) if is_users(room) else ():
                if inspect.getattr_static(value, name, MISSING) is MISSING:
                    self.record((*place, Access("get" if isinstance(value, type) else "attribute", name)), MISSING)
        if isinstance(value, types.ModuleType):
            of_user = is_users(value.__name__)
            if value.__name__.partition(".")[0] in LIBRARY_NAMES:
                return
            for name in sorted(names & vars(value).keys()):
                part = vars(value)[name]
                is_new = (id(value), name) not in self._of_classes
                if is_new and (
                    not callable(part) or (of_user and not data_only)
                ):  # Python's own functions don't change
                    self._of_classes.add((id(value), name))
                    if of_user:
                        self._copies.add_variable(vars(value), name, (*place, Access("attribute", name)))
                    self._record_if_old(vars(value), name, place, part)
        elif isinstance(value, types.FunctionType):
            self._copies.add_attributes(vars(value), place)
            for name in sorted(names & vars(value).keys()):
                self._record_if_old(vars(value), name, place, vars(value)[name])
        elif isinstance(value, type):
            for base, of_base in self._with_bases(value, place):
                self._copies.add_class(base, of_base)
                # __getattribute__ is ours, for the time of the run.
                for name in sorted(names & vars(base).keys() - {"__getattribute__"}):
                    part = vars(base)[name]
                    function = part.__func__ if type(part) in (classmethod, staticmethod) else part
                    function = part.fget if type(part) is property else function
                    code = function.__code__ if type(function) is types.FunctionType else None
                    if (id(base), name) in self._of_classes or (code is not None and data_only):
                        continue
                    self._of_classes.add((id(base), name))
                    self._record_if_old(base, name, of_base, part)
                    if code is not None:  # a method may read attributes of its class
                        self._meet_names(value, place, names_of(code), optional_in(code), data_only=True)

    def _with_bases(self, value: Any, place: Place) -> list[tuple[Any, Place]]:
        """Returns a Python module; or a class, its bases and metaclasses; of users alone."""
        if isinstance(value, type):
            of_metaclass = self._place_classes(type(value), (*place, Access("get", "__class__")))
            return [*self._place_classes(value, place), *of_metaclass]
        return [] if value.__name__.partition(".")[0] in LIBRARY_NAMES else [(value, place)]

    def _place_classes(self, kind: type, place: Place) -> list[tuple[type, Place]]:
        """Returns a class and its bases, except for PyTorch's and Python's, each with the first place it was met at."""
        placed = []
        for at, base in enumerate(kind.__mro__):
            if is_users(base.__module__) and not issubclass(base, enum.Enum):  # which keeps combinations of flags
                if id(base) not in self._places_of_classes:
                    of_base: Place = (*place, Access("get", "__mro__"), Access("item", at))  # type: ignore[assignment]
                    self._places_of_classes[id(base)] = of_base
                    for name, value in list(vars(base).items()):
                        for _, function in functions_in(value):
                            entry = base, (*of_base, Access("attribute", name)), value
                            self._holders.setdefault(id(function.__code__), []).append(entry)
                placed.append((base, self._places_of_classes[id(base)]))
        return placed

    def record(self, place: Place, value: Any) -> None:
        """Records the value of a place as read."""
        if isinstance(value, (staticmethod, classmethod)):
            place, value = (*place, Access("get", "__func__")), value.__func__  # type: ignore[assignment]
        if isinstance(value, property):
            place, value = (*place, Access("get", "fget")), value.fget
        if isinstance(value, types.ModuleType):
            self.meet(value, place)
        if isinstance(value, (types.ModuleType, types.MemberDescriptorType)):
            return
        if place not in self.reads:
            if type(value) in (Number, Growing):
                for own in (place,) if place in self._numbers else places_of(value.expression):
                    self.reads.setdefault(own, self._numbers[own])
                    if own != place:  # met on another way, which may lead elsewhere later
                        self.record(own[:-1], read(self._root, own[:-1]))
                return
            self.reads[place] = value
            self.meet(value, place)

    def _read(self, owner: Any, name: str, value: Any) -> None:
        """Records that an attribute was read."""
        _, place = self.objects[id(owner)]
        if isinstance(owner, nn.Module):
            if name == "training":
                self.modes[id(owner)] = owner
                if id(owner) in self._foreign:
                    self.record((*place, Access("attribute", name)), value)
            if name in OF_EVERY_MODULE:
                return
            file = sys._getframe(2).f_code.co_filename
            of_models = file.startswith(TORCH_MODELS) and name != "__dict__"
            if (file.startswith(LIBRARIES[0]) and not of_models) or file.startswith(EXPORTER):
                self.watch.seen.discard((id(owner), name))  # an exporter looks at everything
                return
        try:
            values = attributes_of(owner)
        except AttributeError:  # it has slots only
            values = None
        of_type = of_class(type(owner), name)
        kept = isinstance(of_type, types.MemberDescriptorType) or (values is not None and name in values)
        if name.startswith("__") and name != "__dict__" and not kept:
            return
        if name == "__dict__":
            self.listed[(*place, Access("get", name))] = None
            for key, entry in list(values.items()):
                if key in OF_EVERY_MODULE:
                    continue
                self._record_if_old(values, key, place, entry)
        elif values is not None and name in values:
            self._record_if_old(values, name, place, values[name])
        elif isinstance(of_type, types.MemberDescriptorType) and not isinstance(owner, nn.Module):
            self._record_if_old(owner, name, place, value, "get")
        elif of_type is not MISSING:
            of_user = any(name in vars(base) for base in type(owner).__mro__ if is_users(base.__module__))
            if of_user or name == "forward" or not callable(of_type):
                self._record_if_old(values, name, place, MISSING)
            if of_user or name == "forward":
                having = next((base for base in type(owner).__mro__ if name in vars(base)), type(owner))
                self._record_if_old(having, name, place, of_type, "class")
            elif isinstance(of_type, types.GetSetDescriptorType):  # a property's own reads are recorded as it runs
                self.record((*place, Access("get", name)), value)
            if of_user and type(of_type) is types.FunctionType:
                code = of_type.__code__
                of_class_ = (*place, Access("get", "__class__"))
                self._meet_names(type(owner), of_class_, names_of(code), optional_in(code), data_only=True)
        elif isinstance(owner, nn.Module) and name in {**owner._modules, **owner._parameters, **owner._buffers}:
            pass  # the model's own parts
        elif value is MISSING:
            self._record_if_old(values, name, place, MISSING)
            self.record((*place, Access("class", name)), MISSING)
        else:  # what a __getattr__ or __getattribute__ makes, such as a config's other names
            self.record((*place, Access("get", name)), value)

    def _record_if_old(self, owner: Any, name: str, place: Place, value: Any, kind: str = "attribute") -> None:
        """Records an attribute or a global variable, unless this run has assigned it."""
        if owner is None:
            return
        if self._copies.is_old(owner, name, value):
            self.record((*place, Access(kind, name)), value)
        elif not any(id(value) in known for known in (self.objects, self._looked_up, self.tensors)):
            self._made[id(value)] = value

    def refuse_iterators(self) -> None:
        """Raises an error if the run takes values from an iterator."""
        # The text of a count shows whether a number was taken.
        taken = [place for place, count, before in self._counts if repr(count) != repr(before)]
        for place in (*self._iterators, *taken):
            raise ExportError(
                f"the run reads the iterator {described(place)!r}, from which a graph can't take a value in each step: "
                "take it before the step, and pass it as an input"
            )


def _holds_traced(function: Any) -> bool:
    """Returns whether a function with a cache has kept a tensor that a capture has traced."""
    kept = [part for part in gc.get_referents(function) if part is not vars(function)]
    leaves = torch.utils._pytree.tree_leaves(kept)
    return any(isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, nn.Parameter) for leaf in leaves)
