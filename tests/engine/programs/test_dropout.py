"""Dropout masks: their distribution, and what they depend on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ort_trainer.engine.programs.dropout import apply_mask, draw_mask, unpack_mask, unpacked

KEY = torch.tensor(1234567)


def mask(count: int, number: int = 0, kept: float = 0.9, key: torch.Tensor = KEY) -> torch.Tensor:
    return unpacked(draw_mask(key, count, number, kept), (count,)).double()


def test_elements_are_kept_where_their_16_bits_are_large() -> None:
    """Compares masks with NumPy's numbers, computed step by step."""
    count, kept = 11, 0.7
    words = math.ceil(count / 4)
    numbers = np.random.SFC64(np.random.SeedSequence((int(KEY), 5, 0))).random_raw(words)
    threshold = round((1 - kept) * 65536) - 32768
    expected = [0] * (4 * words)
    for number, raw in enumerate(numbers):
        for part in range(4):
            value = int((int(raw) >> (16 * part)) & 0xFFFF)
            signed = value - 65536 if value >= 32768 else value
            half = 2 * number + part // 2  # index among the 32-bit words; the second half of them is shifted
            place = 2 * (part % 2) + (half >= words)
            expected[place * words + half % words] = int(signed >= threshold)
    assert unpacked(draw_mask(KEY, count, 5, kept), (count,)).tolist() == expected[:count]


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_the_share_that_is_kept(kept: float) -> None:
    count = 400_000
    deviation = math.sqrt(kept * (1 - kept) / count)
    assert mask(count, kept=kept).mean().item() == pytest.approx(kept, abs=5 * deviation + 1 / 65536)


def test_neighbours_masks_and_keys_are_independent() -> None:
    count = 400_000
    first = mask(count) - 0.9
    others = [
        mask(count, 1) - 0.9,
        mask(count, key=KEY + 1) - 0.9,
        first.roll(1),
        first.roll(4),
        first.roll(count // 4),
    ]
    others.append((mask(4 * count)[-count:]) - 0.9)
    for other in others:
        assert abs((first * other).mean().item()) < 5 * 0.09 / math.sqrt(count)


def test_the_number_of_threads_changes_nothing() -> None:
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(mask(600_000))
    assert torch.equal(*found)
    assert torch.equal(found[0], mask(600_000)) and not torch.equal(found[0], mask(600_000, 1))


@pytest.mark.parametrize("count", [0, 1, 3, 4, 1001, 262_144, 262_145])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_mask_is_applied(count: int, dtype: torch.dtype) -> None:
    value = torch.randn(count).to(dtype)
    packed = draw_mask(KEY, count, 2, 0.75)
    assert packed.numel() * 4 < count + 4, "one byte per element"
    noise = torch.tensor(4 / 3).to(dtype)
    expected = value * (unpacked(packed, (count,)).to(dtype) * noise)
    assert torch.equal(apply_mask(value, packed, 4 / 3), expected)
    assert torch.equal(unpack_mask(packed, value), unpacked(packed, (count,)).bool())


def test_what_is_not_finite_stays_so() -> None:
    packed = draw_mask(KEY, 8, 0, 0.5)
    result = apply_mask(torch.full((8,), math.nan), packed, 2.0)
    assert result.isnan().all(), "as in PyTorch, which multiplies by zero"


def test_the_shape_is_the_value_s() -> None:
    value = torch.ones(6, 10).t()
    assert apply_mask(value, draw_mask(KEY, 60, 0, 1.0), 1.0).shape == (10, 6)
