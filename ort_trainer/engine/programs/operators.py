"""The package's own operators, registered in PyTorch for use in graphs; programs call them directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.masks import words_for
from . import dropout, linear, losses, recurrent, rows

LIBRARY = "ort_trainer"

_library: Any = torch.library.Library(LIBRARY, "FRAGMENT")  # type: ignore[no-untyped-call]
OWN: dict[str, Callable[..., Any]] = {}
"""Target of a program's step -> its function."""


def _define(
    signature: str,
    function: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> None:
    """Defines an operator; ``fake`` returns tensors of the right shape and dtype without computing them."""
    _library.define(signature, tags=tags)
    name = signature.partition("(")[0]
    _library.impl(name, function, "CPU")
    if fake is not None:  # otherwise registered below, as the result has sizes that depend on values
        _library.impl(name, fake, "Meta")
    OWN[f"{LIBRARY}.{name if '.' in name else f'{name}.default'}"] = function


# Dropout whose rate is an input. In a training graph, an input of masks takes its place. ``fast`` allows masks that are
# not PyTorch's.
_define(
    "dropout(Tensor value, Tensor kept, bool fast) -> (Tensor, Tensor)",
    lambda value, kept, fast: torch.native_dropout(value, 1.0 - float(kept), True),
    lambda value, *_: (torch.empty_like(value), torch.empty_like(value, dtype=torch.bool)),
    (torch.Tag.nondeterministic_seeded,),
)
# The overloads ``rate`` take the probability of being kept as a tensor, from which the factor follows.
for _overload, _kept in (("", "float"), (".rate", "Tensor")):
    _define(
        f"draw_mask{_overload}(Tensor key, SymInt count, int number, {_kept} kept) -> Tensor",
        dropout.draw_mask,
        lambda key, count, number, kept: key.new_empty(words_for(count), dtype=torch.int32),
    )
    _define(
        f"draw_unpacked{_overload}(Tensor key, SymInt count, int number, {_kept} kept) -> Tensor",
        dropout.draw_unpacked,
        lambda key, count, number, kept: key.new_empty(count, dtype=torch.bool),
    )
_define(
    "apply_mask(Tensor value, Tensor mask, float factor) -> Tensor",
    dropout.apply_mask,
    lambda value, mask, factor: torch.empty_like(value, memory_format=torch.contiguous_format),
)
_define(
    "apply_mask.rate(Tensor value, Tensor mask, Tensor kept) -> Tensor",
    lambda value, mask, kept: dropout.apply_mask(value, mask, 1.0 / float(kept)),
    lambda value, mask, kept: torch.empty_like(value, memory_format=torch.contiguous_format),
)
_define(
    "unpack_mask(Tensor mask, Tensor like) -> Tensor",
    dropout.unpack_mask,
    lambda mask, like: torch.empty_like(like, dtype=torch.bool, memory_format=torch.contiguous_format),
)
_define(
    "noise(Tensor mask, float factor, ScalarType dtype, bool backward) -> Tensor",
    lambda mask, factor, dtype, backward: mask.to(dtype) * factor,
    lambda mask, factor, dtype, backward: torch.empty_like(mask, dtype=dtype),
)
_define(
    "noise.rate(Tensor mask, Tensor kept, ScalarType dtype, bool backward) -> Tensor",
    lambda mask, kept, dtype, backward: mask.to(dtype) * (1.0 / float(kept)),
    lambda mask, kept, dtype, backward: torch.empty_like(mask, dtype=dtype),
)
_define(
    "linear(Tensor value, Tensor weight, Tensor? bias) -> Tensor",
    linear.linear,
    lambda value, weight, bias: value.new_empty((*value.shape[:-1], weight.shape[0])),
)
_define(
    "grouped_mm(Tensor first, Tensor second, Tensor ends) -> Tensor",
    linear.grouped_mm,
    linear.grouped_mm_fake,
)
_define(
    "add_rows(Tensor gradient, Tensor indices, SymInt rows, SymInt padding) -> Tensor",
    rows.add_rows,
    lambda gradient, indices, rows, padding: gradient.new_empty((rows, gradient.shape[-1])),
)
_define(
    "checked_matrix(Tensor matrix, Tensor info, str name) -> Tensor",
    linear.checked_matrix,
    lambda matrix, info, name: torch.empty_like(matrix),
)
_define(
    "flat_index(Tensor[] indices, SymInt[] sizes) -> Tensor",
    rows.flat_index,
    lambda indices, sizes: sum(indices[1:], indices[0]).long().reshape(-1),
)
_define(
    "cross_entropy_backward(Tensor gradient, Tensor log_probabilities, Tensor target, int reduction, "
    "SymInt ignore_index, Tensor total_weight) -> Tensor",
    losses.cross_entropy_backward,
    lambda gradient, log_probabilities, *_: torch.empty_like(log_probabilities),
)
_define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor gradient, int reduction, "
    "SymInt ignore_index, bool[] wanted) -> Tensor[]",
    losses.linear_cross_entropy,
    lambda hidden, weight, bias, target, gradient, *_: [
        torch.empty_like(gradient),
        torch.empty_like(hidden),
        torch.empty_like(weight),
        weight.new_empty(weight.shape[:1]),
    ],
)
_define(
    "ctc_losses(Tensor log_probabilities, Tensor targets, Tensor frames, Tensor lengths, int blank, "
    "bool zero_infinity) -> (Tensor, Tensor)",
    losses.ctc_losses,
    lambda log_probabilities, *_: (
        log_probabilities.new_empty(log_probabilities.shape[1]),
        torch.empty_like(log_probabilities, memory_format=torch.contiguous_format),
    ),
)
_define(
    "steps(str cell, bool reverse, Tensor[] states, Tensor[] sequences, Tensor[] weights) -> Tensor[]",
    recurrent.steps,
    recurrent.steps_fake,
)
_define(
    "linear_recurrence(Tensor factors, Tensor terms) -> Tensor",
    recurrent.linear_recurrence,
    lambda factors, terms: torch.empty_like(terms, memory_format=torch.contiguous_format),
)
_define(
    "checked_lengths(Tensor lengths, SymInt steps, bool exact) -> Tensor",
    recurrent.checked_lengths,
    lambda lengths, steps, exact: torch.empty_like(lengths),
)
_define(
    "as_sizes(Tensor values) -> Tensor[]",
    lambda values: [values.new_empty((max(size, 0), 0)) for size in values.reshape(-1).tolist()],
)


@torch.library.register_fake("ort_trainer::as_sizes", lib=_library)  # type: ignore[untyped-decorator]
def _as_sizes(values: torch.Tensor) -> list[torch.Tensor]:
    context = torch.library.get_ctx()
    return [values.new_empty((context.new_dynamic_size(), 0)) for _ in range(values.numel())]
