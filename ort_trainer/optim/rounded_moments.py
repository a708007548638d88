"""Moments that are kept in bfloat16, in half of the memory.

Rules compute in float32: block by block, moments are copied into memory that stays in the processor's caches, updated
there, and rounded back::

    moments in bfloat16 -> block in float32 -> Rule.update -> plus noise below the last bit -> cut off to bfloat16

The noise makes rounding stochastic: a number is rounded up with a probability equal to the fraction that is cut off, so
its expectation is exact. Rounded to nearest, a second moment would not move: with beta 0.999 an update changes it by
about 0.1 %, and bfloat16 has steps of 0.4 to 0.8 %. (Zamirai et al., "Revisiting BFloat16 Training", 2020.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from .rule import ParameterBatch, Rule

# Elements of a block: a weight, its gradient and its moments fit into the second-level cache.
_BLOCK = 1 << 18


def update_rounded(rule: Rule, batch: ParameterBatch, number: int) -> None:
    """Updates a batch some of whose moments are bfloat16, though its weights are float32.

    Args:
        rule: The rule.
        batch: The batch.
        number: The number of the update, which chooses the noise.
    """
    longest = min(_BLOCK, max(weight.numel() for weight in batch.weights))
    words = np.random.SFC64(np.random.SeedSequence(number)).random_raw(longest // 4 + 1)  # four numbers in each
    noise = torch.from_numpy(words.view(np.uint16).astype(np.int32)).to(batch.weights[0].device)
    for part in _blocks(batch, rule.by_element):
        kept = part.slots
        part.slots = [
            {name: value.to(weight.dtype) for name, value in slots.items()}
            for slots, weight in zip(kept, part.weights, strict=True)
        ]
        rule.update(part)
        for slots, exact in zip(kept, part.slots, strict=True):
            for name, value in slots.items():
                if value.dtype != exact[name].dtype:
                    moment = exact[name]
                    if bool(moment.amax().isnan()):
                        # Adding noise to 0x7fffffff, which is CUDA's NaN, would carry into the sign: -0.
                        moment[moment.isnan()] = math.nan
                    _add(moment.view(-1).view(torch.int32), noise)
                    value.copy_(moment)
    if batch.counts.count(None) < len(batch.counts):
        batch.count_up()


def _add(bits: torch.Tensor, noise: torch.Tensor) -> None:
    """Adds noise to the 16 bits of float32 numbers that bfloat16 lacks, and clears them.

    Sign, exponent and mantissa are one number, so a carry goes where it belongs.
    """
    for block in torch.split(bits, _BLOCK):
        block.add_(noise[: len(block)]).bitwise_and_(-(1 << 16))


def _blocks(batch: ParameterBatch, by_element: bool) -> Iterator[ParameterBatch]:
    """Yields blocks of a batch: parts of a large parameter, if they do not depend on each other, or several small ones.

    The counts are copies.
    """
    block = batch.part(())
    size = 0
    for index, (weight, gradient) in enumerate(zip(batch.weights, batch.gradients, strict=True)):
        whole = weight, gradient, batch.slots[index]
        cut = by_element and weight.numel() > _BLOCK and gradient.is_contiguous()
        for values in _cut(*whole) if cut else [whole]:
            if size and size + values[0].numel() > _BLOCK:
                yield block
                block, size = batch.part(()), 0
            block.weights.append(values[0])
            block.gradients.append(values[1])
            block.slots.append(values[2])
            count = batch.counts[index]
            block.counts.append(None if count is None else count.clone())
            size += values[0].numel()
    yield block


def _cut(
    weight: torch.Tensor, gradient: torch.Tensor, slots: Mapping[str, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]]:
    """Yields the blocks of a parameter, its gradient and its slots, all of which are contiguous."""
    parts = {name: torch.split(value.view(-1), _BLOCK) for name, value in slots.items()}
    pairs = zip(torch.split(weight.view(-1), _BLOCK), torch.split(gradient.view(-1), _BLOCK), strict=True)
    for index, (weight_part, gradient_part) in enumerate(pairs):
        yield weight_part, gradient_part, {name: values[index] for name, values in parts.items()}
