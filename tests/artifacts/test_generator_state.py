"""Converting the state of PyTorch's generator to NumPy's and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ort_trainer.state.devices import random_to_numpy, random_to_torch


@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 700])
def test_both_draw_the_same_numbers(drawn: int) -> None:
    """Also at the ends of a block of 624 words."""
    generator = torch.Generator().manual_seed(3)
    torch.randint(0, 2**16, (drawn,), generator=generator)
    state = random_to_numpy(generator.get_state().numpy())
    again, theirs = torch.Generator(), np.random.RandomState()
    again.set_state(torch.from_numpy(random_to_torch(state)))
    theirs.set_state(("MT19937", state[:-1], int(state[-1])))
    expected = torch.randint(0, 2**16, (700,), generator=generator)
    assert torch.equal(torch.randint(0, 2**16, (700,), generator=again), expected)
    np.testing.assert_array_equal(theirs.randint(0, 2**32, 700, dtype=np.uint32) % 2**16, expected.numpy())
