"""What a graph must know of a call's arguments and results beyond their values: where they are in memory.

One tensor that is two arguments is one input. A result that is an argument, or another result, comes back as such, so
that a change in place of one reaches the other.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ..capture.nested import Layout, flatten, mapped, with_numbers_apart
from ..core.errors import ExportError
from ..engine.torch_memory import dense_order, put_back
from ..fx.explain import with_history

_COLLECTIVES = f"{Path(torch.__file__).parent / 'distributed'}{os.sep}"
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def merged(layouts: Sequence[Layout], leaves: dict[str, torch.Tensor]) -> tuple[Layout, ...]:
    """Makes one input of each tensor that is in several places; returns the layouts, which then name it in each."""
    names: dict[int, str] = {}
    first = {name: names.setdefault(id(value), name) for name, value in leaves.items()}
    for name in [name for name, other in first.items() if name != other]:
        del leaves[name]

    def with_names(part: Layout) -> Layout:
        return ("tensor", first[part[1]]) if part[0] == "tensor" else part

    return tuple(mapped(layout, with_names) for layout in layouts)


def layout_of(value: torch.Tensor) -> tuple[int, ...]:
    """Returns the order of a tensor's dimensions in memory.

    If there are gaps or shared elements, it returns -1 and the strides instead.
    """
    strides = value.stride()
    order = dense_order(value.shape, strides)
    return (-1, *strides) if order is None else order


def like_given(value: torch.Tensor) -> torch.Tensor:
    """Returns a copy of an argument that requires grad if it does, whatever the mode, and is a leaf if it is one."""
    copied = clone(value.detach()).requires_grad_(value.requires_grad)
    if value.is_leaf:
        return copied
    with torch.enable_grad():
        return clone(copied)


def clone(value: torch.Tensor) -> torch.Tensor:
    """Returns a copy, with the same strides if possible."""
    if value.is_contiguous() or 0 in value.stride():
        return value.clone()
    try:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    except RuntimeError:  # elements share memory
        return value.clone()


def refuse_subclasses(leaves: Mapping[str, torch.Tensor]) -> None:
    """Raises if an input is of a subclass of tensors, which may have its own operators.

    Raises:
        ExportError: If so.
    """
    for name, value in leaves.items():
        if type(value) not in _TENSORS:
            raise ExportError(f"input {name!r} is a {type(value).__name__}, which a graph does not know: pass a tensor")


@contextlib.contextmanager
def without_reading_memory(leaves: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A context of a trial run, which raises if the forward pass depends on where its inputs are in memory.

    A graph knows the order of an input's dimensions, but no offset, and no gaps between its elements.

    Args:
        leaves: The inputs.

    Raises:
        ExportError: If so.
    """
    names = ["storage_offset"]
    if any(not value.is_contiguous() and layout_of(value)[:1] == (-1,) for value in leaves.values()):
        names += ["stride", "as_strided"]
    read: list[str] = []

    def watched(function: Any, name: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            # Results of collective operations are wrapped, which copies how they lie in memory.
            if not sys._getframe(1).f_code.co_filename.startswith(_COLLECTIVES):
                read.append(name)
            return function(*args, **kwargs)

        return functools.wraps(function)(method)

    with contextlib.ExitStack() as stack:
        for name in names:
            owners = (torch.Tensor, torch) if hasattr(torch, name) else (torch.Tensor,)
            for owner in owners:
                stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name), name)))
        yield
    if read:
        raise ExportError(
            f"forward() calls {read[0]}() of a tensor, which a graph does not know for inputs with an offset or gaps: "
            "pass contiguous ones, or leave it out"
        )


@contextlib.contextmanager
def without_histories(buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A context of a trial run, which raises if the run leaves a history that a graph would not.

    Args:
        buffers: The module's buffers.

    Raises:
        ExportError: If a buffer has one, a tensor within the module is to retain its gradient, or a view has a hook.
    """
    retain: Any = torch.Tensor.retain_grad
    register: Any = torch.Tensor.register_hook
    retained, hooked = list[torch.Size](), list[torch.Size]()

    def watched(tensor: torch.Tensor) -> None:
        retained.append(tensor.shape)
        retain(tensor)

    def watched_hook(tensor: torch.Tensor, hook: Any) -> Any:
        if tensor._is_view():
            hooked.append(tensor.shape)
        return register(tensor, hook)

    fixed = {name: buffer for name, buffer in buffers.items() if not buffer.requires_grad}
    try:
        with (
            mock.patch.object(torch.Tensor, "retain_grad", watched),
            mock.patch.object(torch.Tensor, "register_hook", watched_hook),
        ):
            yield
    finally:
        changed = [name for name, buffer in fixed.items() if buffer.requires_grad]
        for name in changed:
            fixed[name].detach_()
    if changed:
        raise ExportError(with_history(changed[0]))
    if retained:
        raise ExportError(
            f"forward() calls retain_grad() of a tensor of shape {list(retained[0])}, which would get no gradient in a "
            "graph: return it, and call retain_grad() of the result"
        )
    if hooked:
        raise ExportError(
            f"forward() registers a hook on a view of shape {list(hooked[0])}, whose gradient may bypass the graph: "
            "register it on a clone() of the view"
        )


def refuse_shared_memory(leaves: Mapping[str, torch.Tensor], state: Sequence[torch.Tensor]) -> None:
    """Raises if inputs share memory with each other or with the module, for graphs that change inputs in place.

    Raises:
        ExportError: If so.
    """
    places = [_memory(value) for value in leaves.values()]
    if len(set(places)) < len(places) or not {_memory(value) for value in state}.isdisjoint(places):
        raise ExportError(
            "forward() changes an input in place, and another input shares its memory, which the graph would not see: "
            "pass a copy, .clone()"
        )


def refuse_replaced_buffers(result: Any, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    """Raises if a buffer that the call has replaced requires grad, or if it or the former shares memory with a result.

    A graph changes the former buffer instead.

    Args:
        result: The result of a call.
        before, after: The module's buffers, from before and after the call.

    Raises:
        ExportError: If so.
    """
    replaced = {_memory(buffer): name for name, buffer in after.items() if buffer is not before.get(name)}
    for name in replaced.values():
        if after[name].requires_grad and (name not in before or not before[name].requires_grad):
            raise ExportError(with_history(name))
    outputs: dict[str, torch.Tensor] = {}
    if replaced:
        flatten("output", result, outputs, objects=True)
    replaced |= {_memory(before[name]): name for name in replaced.values() if name in before}
    for name in (replaced[_memory(output)] for output in outputs.values() if _memory(output) in replaced):
        raise ExportError(
            f"forward() replaces buffer {name!r}, and returns it or a part of it, where a graph returns a copy: return "
            ".clone() of it"
        )


def private(layout: Layout) -> Layout:
    """Returns a layout with copies of all objects that have a state, because a trial run may change it."""
    return mapped(layout, lambda part: (*part[:2], copy.deepcopy(part[2]), *part[3:]) if len(part) > 3 else part)


def filled(
    layouts: Mapping[str, Layout],
    values: Mapping[str, Any],
    began: Mapping[str, Mapping[Any, Any]],
    leaves: Mapping[str, torch.Tensor],
    numbers: Collection[str],
) -> dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Returns which dicts among a call's arguments have other entries after it: name -> keys that it sets, removes.

    Args:
        layouts: The layouts from which the arguments were built, by name.
        values: The arguments.
        began: Copies of the dicts among them, from before the call.
        leaves: The tensors that were in them.
        numbers: Numbers for which the layouts have names instead of values.

    Raises:
        ExportError: If the call has changed something else, other than in place in tensors, which a graph would not do.
    """
    now: dict[str, torch.Tensor] = {}
    after = [flatten(name, values[name], now, objects=True) for name in layouts]
    if len(set(map(id, now.values()))) < len(now):
        after = list(merged(after, now))

    def has_changed(before: Layout, layout: Layout) -> bool:
        return before != layout or any(now[leaf] is not leaves.get(leaf) for leaf in _names_in(layout))

    found = {}
    for (name, before), layout in zip(layouts.items(), after, strict=True):
        layout = with_numbers_apart(layout, name, {}, numbers)
        if not has_changed(before, layout):
            continue
        own, old = values[name], began.get(name, {})
        parts = dict(before[1]) if name in began else {}
        set_keys = [key for key, part in layout[1] if has_changed(parts.get(key, ()), part)] if name in began else []
        inside = [key for key in set_keys if key in old and own[key] is old[key]]
        if name not in began or inside:
            raise ExportError(
                f"forward() changes its argument {name!r} other than by entries of a dict: return what it adds to it"
            )
        found[name] = tuple(set_keys), tuple(key for key in old if key not in own)
    return found


def _names_in(layout: Layout) -> list[str]:
    """Returns the names of the tensors in a layout."""
    names: list[str] = []

    def collect(part: Layout) -> Layout:
        if part[0] == "tensor":
            names.append(part[1])
        return part

    mapped(layout, collect)
    return names


_PART = (
    "forward() returns a tensor that is a part of another one that it returns or was given, or of a parameter: a graph "
    "returns copies, which a change in place would not reach. Return .clone() of it"
)


@dataclass(frozen=True)
class Link:
    """A result that shares its memory with another tensor of the call.

    Attributes:
        place: The place of the result among the returned tensors.
        source: The place of the other tensor, among the returned tensors or among the graph's values.
        of_values: Whether the other tensor is one of the values.
        orders: The dimensions of both, the other tensor's first, as they lie in memory; None if it is that tensor.
        ones: The dimensions of both that had the size 1: of two of these, nothing says which one is the inner one.
        detached: Whether the result requires no grad, whether or not the other tensor does.
    """

    place: int
    source: int
    of_values: bool
    orders: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    ones: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    detached: bool = False

    def apply(self, tensors: list[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Puts the other tensor, or a view of it, in place of the copy that the graph returns."""
        source = (values if self.of_values else tensors)[self.source]
        if self.orders is not None:
            held, wanted = self.orders
            shape = tensors[self.place].shape
            source = put_back(source.permute(held).view([shape[axis] for axis in wanted]), wanted)
        tensors[self.place] = source.detach() if self.detached else source


def links(outputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor], with_grad: bool = True) -> list[Link]:
    """Returns the links of a call's results.

    Args:
        outputs: The results of a run.
        values: Parameters, buffers and inputs of that run.
        with_grad: Whether it ran with gradients.

    Raises:
        ExportError: If a result shares a part of its memory with another tensor.
    """
    shared: list[Link] = []
    sources: dict[int, list[tuple[int, bool, torch.Tensor]]] = {}
    for place, value in enumerate(values):
        sources.setdefault(_memory(value), []).append((place, True, value))
    # A graph returns contiguous tensors, so the others are views of them, or detached forms of those that require grad.
    order = sorted(enumerate(outputs), key=lambda pair: (not _is_in_order(pair[1]), not pair[1].requires_grad))
    for place, output in order:
        group = sources.setdefault(_memory(output), [])
        for source, of_values, value in group if output.numel() else ():
            if not _overlap(value, output):
                continue
            held, wanted = _whole_order(value), _whole_order(output)
            if output.requires_grad and _has_history(output) != with_grad and value is not output:
                raise ExportError(
                    "forward() returns a view of a parameter or an argument that was made under torch.no_grad() and "
                    "requires grad by itself, so its gradient is lost: detach() it, or make it with gradients"
                    if with_grad
                    else "forward() returns a view with a history, made under torch.enable_grad(), and the module was "
                    "called under torch.no_grad(), where a graph has none: call it with gradients"
                )
            if value is output:
                shared.append(Link(place, source, of_values))
            elif (
                held is None
                or wanted is None
                or not (of_values or _is_in_order(value))
                or value.numel() != output.numel()
                or value.dtype != output.dtype
                or output.requires_grad > value.requires_grad
            ):
                raise ExportError(_PART)
            else:
                ones = _ones(value), _ones(output)
                shared.append(Link(place, source, of_values, (held, wanted), ones, not output.requires_grad))
            break
        else:
            group.append((place, False, output))
    return shared


def _has_history(tensor: torch.Tensor) -> bool:
    """Returns whether a gradient of a tensor would reach any other: views of a view without a history have none."""
    ahead, met = [tensor.grad_fn], set()
    while ahead:
        node = ahead.pop()
        if hasattr(node, "variable"):  # it accumulates the gradient of a leaf
            return True
        if node is not None and node not in met:
            met.add(node)
            ahead += [following for following, _ in node.next_functions]
    return False


def refuse_other_gradients(
    outputs: Sequence[torch.Tensor], differentiable: Collection[int], links: Sequence[Link]
) -> None:
    """Raises if a result of a run requires grad, and that of the graph does not, or the other way round.

    Args:
        outputs: The results of the run.
        differentiable: The places of the graph's results that require grad.
        links: Results that are other tensors.

    Raises:
        ExportError: If so.
    """
    others = {link.place for link in links}
    for place, output in enumerate(outputs):
        if place not in others and output.requires_grad != (place in differentiable):
            does, graph = ("requires grad", "does not") if output.requires_grad else ("does not require grad", "does")
            raise ExportError(
                f"result {place} of forward() {does}, and that of the graph {graph}: forward() must not ask whether it "
                "is compiled or exported"
            )


def check_links(
    links: Sequence[Link], outputs: Sequence[Sequence[int] | None], values: Sequence[Sequence[int]]
) -> None:
    """Checks that results share memory in the same way for other sizes: all of one row is its first, and its transpose.

    Args:
        links: The links of a run.
        outputs: The shapes of the results now, as far as they are known.
        values: The shapes of what the graphs take.

    Raises:
        ExportError: If one is a part of another, or may be.
    """
    for link in links:
        shape, source = outputs[link.place], values[link.source] if link.of_values else outputs[link.source]
        if shape is None or source is None:
            continue
        grown = [sum(sizes[axis] != 1 for axis in ones) for sizes, ones in zip((source, shape), link.ones, strict=True)]
        if math.prod(shape) != math.prod(source) or max(grown) > 1:
            raise ExportError(_PART)


def _ones(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(axis for axis, size in enumerate(value.shape) if size == 1)


def _is_in_order(value: torch.Tensor) -> bool:
    """Returns whether a tensor is contiguous, and would be if axes of size 1 had another size: ``x.t()`` would not."""
    return _whole_order(value) == tuple(range(value.dim()))


def _whole_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the dimensions as they lie in memory; None if there are gaps, now or if axes of size 1 had another size.

    Of two axes with one stride, one has size 1, or the tensor has gaps: it is the inner one.
    """
    order = sorted(range(value.dim()), key=lambda axis: (-value.stride()[axis], -value.shape[axis], axis))
    sizes = [value.shape[axis] for axis in order]
    strides = list(itertools.accumulate(reversed(sizes[1:]), lambda stride, size: stride * max(size, 1), initial=1))
    in_memory = [value.stride()[axis] for axis in order]
    return tuple(order) if in_memory == strides[::-1][: value.dim()] else None


def _memory(value: torch.Tensor) -> int:
    """Returns the address of a tensor's storage."""
    return value.untyped_storage().data_ptr()


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether two tensors in the same memory have a byte of it in common."""
    if first is second:
        return True
    touched = torch.zeros(first.untyped_storage().nbytes(), dtype=torch.bool)
    for at in range(first.element_size()):
        _bytes_of(touched, first, at).fill_(True)
    return any(bool(_bytes_of(touched, second, at).any()) for at in range(second.element_size()))


def _bytes_of(memory: torch.Tensor, value: torch.Tensor, at: int) -> torch.Tensor:
    """Returns byte ``at`` of each element of a tensor, as a view of ``memory``, which has an element for each byte."""
    size = value.element_size()
    strides = [stride * size for stride in value.stride()]
    return memory.as_strided(value.shape, strides, value.storage_offset() * size + at)
