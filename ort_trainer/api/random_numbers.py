"""The random numbers of a training step: PyTorch's Mersenne Twister, without PyTorch.

A step that needs dropout masks draws one key and derives all masks from it, as the trainer does by default. NumPy's
generator yields the same words as PyTorch's on the CPU, so the masks continue where the trainer's stopped. The other
kinds are NumPy's own draws from that generator.

``numpy.random`` is imported on the first draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import shown
from ..core.masks import KEYS, draw_mask, unpacked
from ..step.contract import RandomInput

if TYPE_CHECKING:
    from ..state.state import Array

# The words of a Mersenne Twister's state.
_WORDS = 624


class _Seed:
    """The last call of :func:`set_seed`.

    Attributes:
        value: Its seed; None before the first call.
        calls: Number of calls so far.
    """

    value: int | None = None
    calls = 0


def set_seed(seed: int) -> None:
    """Sets the seed of all random numbers that training draws from now on.

    It reseeds every state, including states already loaded. A checkpoint loaded later brings its own random state.
    The numbers are those of ``torch.manual_seed(seed)`` in the trainer.

    Args:
        seed: Any int; only its lowest 32 bits are used.

    Raises:
        TypeError: If ``seed`` is not an int.
    """
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
        raise TypeError(f"the seed must be an int, but {shown(seed)} was given")
    _Seed.value = int(seed) & 0xFFFFFFFF
    _Seed.calls += 1


class RandomNumbers:
    """The generator of a state.

    Args:
        state: The 624 words and the position, uint32 [625]; None to seed from :func:`set_seed` or the operating
            system.
    """

    def __init__(self, state: Array | None = None) -> None:
        self._state = state
        self._calls = _Seed.calls
        self._bits: Any = None
        self._generator: Any = None
        # A state of the generator, and the number of words drawn for masks since then, from which undo() restores the
        # state before a draw. Reading NumPy's state at each draw would take a tenth of a small step.
        self._anchor: Any = None
        self._words = self._words_before = 0

    def get_state(self) -> Array | None:
        """Returns the words and the position; None if not seeded yet."""
        self._follow_seed()
        if self._bits is None:
            return self._state
        mt19937 = self._bits.state["state"]
        return np.append(mt19937["key"], mt19937["pos"]).astype(np.uint32)

    def set_state(self, state: Array | None) -> None:
        """Restores a state from :meth:`get_state`."""
        self._state, self._bits, self._generator, self._anchor = state, None, None, None

    def draw(self, wanted: Sequence[tuple[RandomInput, tuple[int, ...]]]) -> list[Array]:
        """Returns random numbers for inputs, each with its shape."""
        self._follow_seed()
        if self._bits is None:
            self._bits = _bits(self._state)
            self._generator = np.random.Generator(self._bits)
        kinds = {spec.kind for spec, _ in wanted}
        if self._anchor is None or kinds != {"mask"}:
            self._anchor, self._words = self._bits.state, 0
        self._words_before = self._words
        key = self._key() if "mask" in kinds else 0
        return [self._draw(spec, shape, key) for spec, shape in wanted]

    def undo(self) -> None:
        """Restores the state before the last :meth:`draw`."""
        if self._anchor is not None:
            self._bits.state = self._anchor
            self._bits.random_raw(self._words_before, output=False)
            self._words = self._words_before

    def _follow_seed(self) -> None:
        """Discards the state if :func:`set_seed` was called since it was made."""
        if self._calls != _Seed.calls:
            self._calls = _Seed.calls
            self.set_state(None)

    def _key(self) -> int:
        """Draws the number that ``torch.randint(2**62, ())`` would."""
        self._words += 2
        high, low = self._bits.random_raw(2)
        return ((int(high) << 32) | int(low)) % KEYS

    def _draw(self, spec: RandomInput, shape: tuple[int, ...], key: int) -> Array:
        if spec.kind == "mask":
            kept, number = spec.parameters
            count = math.prod(shape)
            mask = unpacked(draw_mask(key, count, int(number), kept), count)
            return mask.reshape(shape).astype(spec.dtype, copy=False)
        if spec.kind == "uniform":
            return _uniform(self._generator, shape, np.dtype(spec.dtype))
        return np.asarray(_DRAWS[spec.kind](self._generator, shape, *spec.parameters)).astype(spec.dtype, copy=False)


def _bits(state: Array | None) -> Any:
    """Returns NumPy's Mersenne Twister in a saved state, or seeded by :func:`set_seed` or the operating system."""
    if state is None and _Seed.value is not None:
        # Knuth's seeding, as in PyTorch; MT19937(seed) seeds differently.
        return np.random.RandomState(_Seed.value)._bit_generator
    bits: Any = np.random.MT19937()
    if state is not None:
        words = {"key": state[:_WORDS].astype(np.uint32), "pos": int(state[_WORDS])}
        bits.state = {"bit_generator": "MT19937", "state": words}
    return bits


def _uniform(generator: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns numbers in [0, 1) that are exact in the dtype, so none is rounded to 1."""
    levels = 2 ** (np.finfo(dtype).nmant + 1)
    numbers: Array = (generator.integers(0, levels, shape) / levels).astype(dtype)
    return numbers


def _bernoulli(generator: Any, shape: tuple[int, ...], probability: float, factor: float = 1.0) -> Array:
    return np.asarray(generator.random(shape, np.float32) < probability) * np.float64(factor)


# Kind of a random input -> how to draw it from NumPy's generator.
_DRAWS: Mapping[str, Any] = {
    "bernoulli": _bernoulli,
    "normal": lambda generator, shape: generator.standard_normal(shape),
    "exponential": lambda generator, shape, rate=1.0: generator.standard_exponential(shape) / rate,
    "integers": lambda generator, shape, low, high: generator.integers(int(low), int(high), shape),
    "permutation": lambda generator, shape: generator.permutation(shape[0]),
}
