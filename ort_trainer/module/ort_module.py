"""``ORTModule``: a module that runs as graphs in the user's own loop."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import VerificationError, was_given
from ..core.report import Report, memory_of
from ..core.unknown import explains_calls
from ..options import OptionsDict, ORTTrainerOptions
from .fallback import (
    AT_RUN_TIME,
    Fallback,
    NoGraphError,
    foreign_context,
    is_running,
    policy_of,
    refuse_divided,
    refuse_freed,
    running,
)
from .forward import Assigned, Graphed, Inner, Outer, graphed_in, rebound
from .graphs import CallGraphs
from .methods import Method, checked_methods, expect_calls
from .verify import CallVerifier

# Attributes that a wrapper shares with its module: parameters have the same names in both, and hooks of state dicts run
# whichever of the two is asked.
_SHARED = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
# What each wrapper makes for itself; a copy has its own.
_MADE = (
    *("forward", "module", "_graphs", "_user_options"),
    *("_fallback", "_first", "_own_forward", "_exported", "_callers", "_verifier", "_methods"),
)
_WRAPPER_NAMES = frozenset({*vars(nn.Module()), *_MADE})

_address = torch.Tensor.data_ptr
# Assignments to an attribute of that name become the module's; this is Python's own.
_set_class = vars(object)["__class__"].__set__
_SPECIAL = ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__")
_OPTIONS = (
    *("utils.kernels", "utils.random_numbers", "utils.cache_exports", "utils.memory_efficient_gradient"),
    *(
        "graph_transformer",
        "debug.deterministic_compute",
        "debug.verify_every",
        "session_options",
        "provider_options",
        "_internal_use.onnx_opset_version",
    ),
)


class ORTModule(nn.Module):
    """A module whose forward and backward pass run as graphs of PyTorch's kernels.

    It is called as the module itself, in any loop, and ``loss.backward()`` adds to ``p.grad`` of the module's own
    parameters. Parameters, buffers, submodules, attributes and methods are the module's, under the names that they have
    there, and it passes as an instance of the module's class. Methods other than ``forward`` run in PyTorch, unless
    they are named. A function that is assigned to ``forward`` becomes the module's, and is exported.

    The first call with arguments of a new structure, or in a new mode, exports the module, which takes seconds. For
    that it first runs the module once, to see what it returns.

    Args:
        module: The module.
        options: Options for its graphs, as for ``ORTTrainer``: of ``utils``, ``kernels``, ``random_numbers``,
            ``cache_exports`` and ``memory_efficient_gradient``; ``graph_transformer``, with what is computed again in
            the backward pass; of ``debug``, ``deterministic_compute`` and ``verify_every``; with ONNX Runtime's
            kernels, ``session_options``, ``provider_options`` and ``_internal_use.onnx_opset_version``.
        fallback: What a call does if no graph can run it. ``"warn"``: PyTorch runs it, with a warning that says why.
            ``"error"``: it raises. None: what the environment variable ``ORTMODULE_FALLBACK_POLICY`` says, otherwise
            ``"warn"``. The same is done if an optimizer updates the parameters, but ``forward`` was never called.
        methods: Names of other methods that are called from outside, and become graphs, too.

    Attributes:
        module: The module inside.

    Raises:
        TypeError: If it is not a module, or is wrapped already.
        ValueError: If an option has no effect here, or the policy or a method is unknown.

    Example:
        >>> model = ORTModule(model)
        >>> loss = model(x, labels=y).loss
        >>> loss.backward()
    """

    module: nn.Module

    def __new__(cls, module: nn.Module, *args: Any, **kwargs: Any) -> ORTModule:
        """Creates an object that can be indexed and iterated over if the module can."""
        return _blank(cls, *(name for name in _SPECIAL if hasattr(type(module), name)))

    @explains_calls("ORTModule(model): the optimizer and the loss stay in the loop", {"model": "module"})
    def __init__(
        self,
        module: nn.Module,
        options: ORTTrainerOptions | OptionsDict | None = None,
        fallback: str | None = None,
        methods: Sequence[str] = (),
    ) -> None:
        _check(module)
        methods = checked_methods(module, methods)
        if any(base.__name__ == "LightningModule" for base in type(module).__mro__):
            warnings.warn(
                f"Lightning calls training_step() of {type(module).__name__}, whose own forward() then runs in "
                "PyTorch: wrap the networks inside, as in self.model = ORTModule(self.model)",
                stacklevel=2,
            )
        modes = module.training
        vars(self)["module"] = module
        super().__init__()
        module.training = modes
        for key in _SHARED:
            vars(self)[key] = vars(module)[key]
        vars(self)["_user_options"] = options
        checked = _checked(options)
        vars(self)["_graphs"] = CallGraphs(module, checked)
        every = checked.verification()
        vars(self)["_verifier"] = CallVerifier(every, module) if every else None
        vars(self)["_fallback"] = Fallback(module, policy_of(fallback))
        vars(self)["_methods"] = {name: ORTModule(Method(module, name), options, fallback) for name in methods}
        if not methods and not isinstance(module, Method):
            expect_calls(self, self._fallback)
        vars(self)["_exported"] = None, None
        vars(self)["_callers"] = None, set()
        vars(self)["_own_forward"] = "forward" in vars(module)
        # Others replace it, as accelerate does for mixed precision, and read its signature.
        vars(self)["forward"] = vars(self)["_first"] = Graphed(ORTModule._run, self).as_of(module.forward)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module returns."""
        if is_running(self.module):
            return self._first.like(*args, **kwargs)
        self._fallback.called = self._fallback.entered = True
        context = foreign_context()
        if context:
            return self._fallback.run_inside(context, args, kwargs)
        with self._graphs.turns:  # while a thread exports the module, no other may run it, not even in PyTorch
            return self._run_in_turn(args, kwargs)

    def _run_in_turn(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs graphs, or PyTorch if no graph can run the call."""
        kind: Any = None
        if self._verifier is not None and self._verifier.error is not None:
            return self._fallback.run(self._verifier.error, args, kwargs)
        try:
            graphs, call, values = self._graphs.find(args, kwargs)
        except NoGraphError as error:
            kind, reason = error.kind, error.__cause__
        except Exception as error:
            reason = error
        else:
            if not all(map(_address, values)):  # an address is 0, where some kernels would read
                refuse_freed(self.module)
            try:
                if self._verifier is not None and not graphs.filled:
                    return self._verifier.run(graphs, call, values, args, kwargs)
                result = graphs.result(call(values), values)
                return graphs.fill(result, args, kwargs) if graphs.filled else result
            except VerificationError as error:
                if not self._verifier.handles(error, self._graphs.renew):
                    raise
                if self._verifier.error is None:
                    return self._run_in_turn(args, kwargs)
                reason = error
            except AT_RUN_TIME as error:
                reason = error
        try:
            assert isinstance(reason, Exception)
            result = self._fallback.run(reason, args, kwargs)
            if kind is not None:  # PyTorch could run it, so the arguments are valid
                self._graphs.refused[kind] = str(reason)
            return result
        finally:
            del reason  # its traceback holds this frame, and so the arguments

    def _assign(self, function: Callable[..., Any]) -> None:
        """Makes a function the wrapper's ``forward``: one that calls the graphs is called, any other is exported."""
        inside = graphed_in(function)
        if inside is None:
            inside = Graphed(ORTModule._run, self).as_of(rebound(function, self, self.module))
            function = inside
        elif not isinstance(function, (Graphed, Outer)):
            function = Outer(ORTModule._run_outer, self, function).as_of(function)
        # The module's own methods call it, too, and the next call sees that the graphs are of another function.
        if inside is self._first and not self._own_forward:
            vars(self.module).pop("forward", None)
        else:
            vars(self.module)["forward"] = inside.like
        vars(self)["forward"] = function

    def _run_outer(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a function that was assigned to ``forward``: as a graph, once a call of it did not call the graphs.

        A function that has called them for such arguments stays as it is: it may return in another call what it has
        kept of the first, as losses of sentence-transformers do.
        """
        exported, inner = self._exported
        if exported is function:
            vars(self.module)["forward"] = inner
            return self._run(*args, **kwargs)
        self._fallback.called, self._fallback.entered = True, False
        result = function(*args, **kwargs)
        caller, kinds = self._callers
        kind = (len(args), *sorted(kwargs))
        if self._fallback.entered:
            vars(self)["_callers"] = function, {*(kinds if caller is function else ()), kind}
        elif caller is not function or kind not in kinds:
            inside = rebound(function, self, self.module)
            vars(self)["_exported"] = function, Inner(_run_inside, self.module, inside).as_of(inside)
        return result

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The module's class, so that others recognize the module, as transformers recognizes its models."""
        return type(vars(self)["module"]) if "module" in vars(self) else ORTModule

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.training = mode

    def report(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what has run: calls by graph, calls by PyTorch and why, exports and their seconds, memory.

        If the module has a method of this name, that is called.

        Returns:
            A :class:`~ort_trainer.core.report.Report`, which ``print()`` shows.

        Example:
            >>> print(model.report())
        """
        own = getattr(self.module, "report", None)
        if own is not None:
            return own(*args, **kwargs)
        faces = {"forward": self, **self._methods}
        tensors = [*self.module.parameters(), *self.module.buffers()]
        gradients = [value.grad for value in tensors if value.grad is not None]
        return Report(
            f"ORTModule of {self.module._get_name()}",
            tuple(graph for name, face in faces.items() for graph in face._graphs.runs(name)),
            dict(sum((face._fallback.counts for face in faces.values()), Counter[str]())),
            max(face._verifier.last if face._verifier is not None else 0 for face in faces.values()),
            memory_of(tensors, gradients),
        )

    def train(self, mode: bool = True) -> ORTModule:
        """Sets the mode of the module; see :meth:`torch.nn.Module.train`."""
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the module's state dict; see :meth:`torch.nn.Module.state_dict`."""
        state_dict: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state_dict

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the module's state dict; see :meth:`torch.nn.Module.load_state_dict`."""
        return self.module.load_state_dict(*args, **kwargs)

    def apply(self, fn: Any) -> ORTModule:
        """Calls a function with every submodule; see :meth:`torch.nn.Module.apply`."""
        self.module.apply(fn)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        self.module._load_from_state_dict(*args)

    def _apply(self, *args: Any, **kwargs: Any) -> ORTModule:
        self.module._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self

    def _replicate_for_data_parallel(self) -> ORTModule:
        raise RuntimeError(
            "an ORTModule can't be copied to several devices, as DataParallel does: start one process per device, and "
            "use DistributedDataParallel(ORTModule(model))"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(vars(self)["module"], name)
            return vars(self).get("_methods", {}).get(name, found)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            self._assign(value)
        elif name in _WRAPPER_NAMES:
            object.__setattr__(self, name, value)
        elif name == "__class__":
            self._become(value)
        else:
            setattr(self.module, name, value)

    def _become(self, kind: type) -> None:
        """Takes another class, which adds something to that of the module.

        What other classes add, as ``torch.distributed.fsdp.FSDPModule`` does, becomes the wrapper's: its methods look
        for what was attached to the wrapper, such as states and hooks. The module's own class is replaced by one that
        adds to it itself, as ``torch.nn.utils.parametrize`` does.
        """
        added = [base for base in kind.__mro__[1:] if not isinstance(self.module, base)]
        if not added:
            self.module.__class__ = kind
            return
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        _set_class(self, type(kind.__name__, (*added, type(self)), own))

    def __delattr__(self, name: str) -> None:
        if name == "forward":
            self._assign(self._first)
        elif name in vars(self):
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *vars(self), *dir(self.module)})

    def __reduce__(self) -> tuple[Any, ...]:
        kind = vars(type(self)).get("_kind", type(self))
        names = [name for name in _SPECIAL if name in vars(type(self))] if kind is not type(self) else []
        of_wrapper = {key: value for key, value in vars(self).items() if key not in (*_SHARED, *_MADE)}
        own = self._first.like if self._own_forward else None
        forward = vars(self)["forward"]
        assigned = None if forward is self._first else Assigned(forward)
        # The state comes last, because parts of it may refer to the wrapper.
        state = self.module, self._user_options, self._fallback.policy, [*self._methods], own, assigned, of_wrapper
        return _blank, (kind, *names), state

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        module, options, policy, methods, own, assigned, of_wrapper = state
        vars(module).pop("forward", None)
        if own is not None:
            vars(module)["forward"] = own
        ORTModule.__init__(self, module, options, policy, methods)
        vars(self).update(of_wrapper)
        if assigned is not None:
            self._assign(assigned.function)

    def __repr__(self) -> str:
        return f"ORTModule({self.module!r})"


def _blank(kind: type[ORTModule], *special: str) -> ORTModule:
    """Returns a wrapper without a module, of a class with special methods that call the module's."""
    if special:
        kind = type(kind.__name__, (kind,), {"_kind": kind, **{name: _special(name) for name in special}})
    return nn.Module.__new__(kind)


def _run_inside(module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a module's ``forward`` in PyTorch, together with what it calls of an ``ORTModule`` around the module."""
    with running(module):
        return function(*args, **kwargs)


def _special(name: str) -> Callable[..., Any]:
    """Returns a special method that calls the module's; Python looks special methods up in classes only."""
    return lambda self, *args: getattr(self.module, name)(*args)


def _check(module: Any) -> None:
    """Raises if a module can't be wrapped."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, but {was_given(module)}")
    kind = type(module).__name__
    if isinstance(module, ORTModule):
        raise TypeError("module is an ORTModule already")
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(f"module is a {kind}: wrap the module inside, {kind}(ORTModule(model.module))")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("module is a TorchScript module, which can't be exported: use the original module")
    if kind == "OptimizedModule" and hasattr(module, "_orig_mod"):
        raise TypeError("module is the result of torch.compile(): use the module inside, module._orig_mod")
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
        raise TypeError(
            "module has a FullyShardedDataParallel, which frees and replaces parameters while it runs: use its "
            "successor, and shard outside, torch.distributed.fsdp.fully_shard(ORTModule(layer))"
        )
    refuse_divided(module)


def _checked(options: ORTTrainerOptions | OptionsDict | None) -> ORTTrainerOptions:
    """Returns the options, after checking that all that were set have an effect here."""
    checked = ORTTrainerOptions.of(options)
    # A path may also be a section with such an option, or a part of one.
    idle = [p for p in checked.given if not any(f"{p}.".startswith(f"{o}.") or o.startswith(f"{p}.") for o in _OPTIONS)]
    if idle:
        raise ValueError(
            f"options {idle} have no effect on an ORTModule, whose loop is the user's: leave them out. It has "
            f"{list(_OPTIONS)}"
        )
    return checked
