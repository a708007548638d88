"""The trainer's own copies of a model's tensors; tensors that share memory in the model share it here."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

Named = Mapping[str, torch.Tensor]


def shared_groups(tensors: Named, trained: Collection[str]) -> list[list[str]]:
    """Returns groups of tensors that share elements, by name, in the given order.

    Args:
        tensors: Different tensors by name. Slices of one storage that do not overlap form no group.
        trained: Names of tensors that may be trained. A group without any (only buffers) is left out if a graph can't
            bind its memory: such buffers are constant, or the exporter refuses the code that changes them.

    Raises:
        ValueError: If a graph can't bind a group's memory, because a tensor in it is not contiguous or dtypes differ.
    """
    group_of = {name: [name] for name in tensors}
    for storage in _by_storage(tensors).values():
        active: list[str] = []  # tensors that reach beyond the start of the next one
        for name in sorted(storage, key=lambda name: tensors[name].storage_offset()):
            active = [other for other in active if _extent(tensors[other])[1] > _extent(tensors[name])[0]]
            for other in active:
                if group_of[other] is not group_of[name] and _overlap(tensors[other], tensors[name]):
                    group_of[other] += group_of[name]
                    group_of.update(dict.fromkeys(group_of[name], group_of[other]))
            active.append(name)
    order = list(tensors)
    groups = {id(group): sorted(group, key=order.index) for group in group_of.values() if len(group) > 1}
    shared = [group for group in groups.values() if _is_bindable(group, tensors) or set(group) & set(trained)]
    for group in shared:
        _check(group, tensors)
    return shared


def owned_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the trainer's copy of a model's tensor.

    This is the tensor's own dtype, except float32 for bfloat16: small updates would vanish in the 8 significant bits of
    a bfloat16 weight. (Every bfloat16 number is a float32 number; graphs round their inputs.)
    """
    return torch.float32 if dtype == torch.bfloat16 else dtype


def own_copies(tensors: Named, trained: Collection[str], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns contiguous copies on a device, with dtypes from :func:`owned_dtype`."""
    copies = {
        name: tensor.detach().to(device, owned_dtype(tensor.dtype), copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    for group in shared_groups(tensors, trained):
        first = tensors[group[0]].detach()
        elements = first.untyped_storage().nbytes() // first.element_size()
        memory = first.as_strided((elements,), (1,), 0).to(device, owned_dtype(first.dtype), copy=True)
        for name in group:
            like = tensors[name]
            copies[name] = memory.as_strided(like.shape, like.stride(), like.storage_offset())
    return copies


def _by_storage(tensors: Named) -> dict[int, list[str]]:
    """Returns the names of tensors in one storage, for storages with several; address -> names."""
    storages: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return {address: names for address, names in storages.items() if len(names) > 1}


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the offsets of a tensor's first byte in its storage and of the byte after its last."""
    last = sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether two tensors in the same storage have an element in common."""
    (start, stop), (other_start, other_stop) = _extent(first), _extent(second)
    if stop <= other_start or other_stop <= start:
        return False
    if (first.is_contiguous() and second.is_contiguous()) or first.dtype != second.dtype:
        return True
    # Columns of a matrix interleave without overlapping, so mark one tensor's elements and look for marks in the other.
    marks = torch.zeros(max(stop, other_stop) // first.element_size(), dtype=torch.bool)
    marks.as_strided(first.shape, first.stride(), first.storage_offset()).fill_(True)
    return bool(marks.as_strided(second.shape, second.stride(), second.storage_offset()).any())


def _is_bindable(group: list[str], tensors: Named) -> bool:
    """Returns whether a graph can bind all tensors of a group: contiguous ones of one dtype."""
    return all(tensors[name].is_contiguous() for name in group) and len({tensors[n].dtype for n in group}) == 1


def _check(group: list[str], tensors: Named) -> None:
    """Raises if a graph can't bind the memory of a group of tensors."""
    if not _is_bindable(group, tensors):
        wrong = [name for name in group if not tensors[name].is_contiguous()]
        what = f"{wrong} not contiguous" if wrong else "with different dtypes"
        raise ValueError(
            f"{group} are different tensors in the same memory ({what}), which a graph can't share: a change of one "
            "would not reach the other. Make them one Parameter and compute with a view of it in forward(), such as "
            "F.linear(x, self.encoder.weight.t()); or give each its own memory with .clone()"
        )
