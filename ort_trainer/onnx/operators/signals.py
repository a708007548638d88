"""Signals: windows, Fourier transforms, the matrix of mel frequencies.

Transforms are products with matrices of cosines and sines, because ONNX graphs have no complex numbers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from ..node_table import Node, operator
from ..values import Number, integers, numbers, torch_dtype

_Tensor = torch.Tensor


_WINDOWS = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


def _window(
    factors: tuple[float, float, float], size: Any, *, output_datatype: int, periodic: int, node: Node
) -> _Tensor:
    """Returns a window of cosines: factors[0] - factors[1] cos(a) + factors[2] cos(2a), with a from 0 to 2 pi."""
    (count,) = integers(size, "size", node)
    angle = torch.arange(count, dtype=torch.float64) * (2 * math.pi / (count if periodic else count - 1))
    values = factors[0] - factors[1] * torch.cos(angle) + factors[2] * torch.cos(2 * angle)
    return values.to(torch_dtype(output_datatype))


for _name, _factors in _WINDOWS.items():
    operator(_name, since=17, known_inputs=True)(functools.partial(_window, _factors))


@operator("DFT", since=17, known_inputs=(1, 2))
def _transform(x: _Tensor, length: Any, axis: Any, *, inverse: int, onesided: int, node: Node) -> _Tensor:
    axis = (-2 if axis is None else integers(axis, "axis", node)[0]) % x.dim()
    if axis == x.dim() - 1:
        raise node.error("its axis is the last, which has the real and the imaginary part")
    size = x.shape[axis]
    to_real = bool(inverse and onesided)
    count = integers(length, "dft_length", node)[0] if length is not None else 2 * (size - 1) if to_real else size
    values = x.movedim(axis, -2)
    y = _to_real(values, count) if to_real else fourier(values, count, bool(inverse), bool(onesided))
    return y.movedim(-2, axis)


def fourier(x: _Tensor, count: Number, inverse: bool = False, onesided: bool = False) -> _Tensor:
    """Transforms the dimension before the last.

    Args:
        x: Real numbers, ... x L x 1, or real and imaginary parts, ... x L x 2.
        count: The length of the transform: longer signals are cut, shorter ones are followed by zeros.
        inverse: Whether it is the inverse transform.
        onesided: Whether to return only the frequencies up to half of the length.

    Returns:
        Real and imaginary parts, ... x frequencies x 2.
    """
    x = x[..., :count, :]
    cosines, sines = _waves(count // 2 + 1 if onesided else count, x.shape[-2], count, x.dtype)
    real = x[..., 0]
    parts = [real @ cosines, real @ sines] if inverse else [real @ cosines, -(real @ sines)]
    if x.shape[-1] == 2:
        imaginary = x[..., 1]
        turned = imaginary @ sines, imaginary @ cosines
        parts = [parts[0] - turned[0] if inverse else parts[0] + turned[0], parts[1] + turned[1]]
    y: _Tensor = torch.stack(parts, -1) * (1 / count if inverse else 1)
    return y


def _to_real(x: _Tensor, count: Number) -> Any:
    """Computes the real signal, ... x L x 1, from its frequencies up to half of its length."""
    used = count // 2 + 1
    x = x[..., :used, :]
    cosines, sines = _waves(count, x.shape[-2], count, x.dtype)
    # The other half of the spectrum is the conjugate: each frequency except the first and the middle counts twice.
    k = torch.arange(x.shape[-2])
    weights = torch.where((k == 0) | (2 * k == count), 1.0, 2.0).to(x.dtype) / count
    real = (x[..., 0] * weights) @ cosines
    if x.shape[-1] == 2:
        real = real - (x[..., 1] * weights) @ sines
    return real.unsqueeze(-1)


def _waves(frequencies: Number, samples: Number, count: Number, dtype: torch.dtype) -> tuple[_Tensor, _Tensor]:
    """Returns cos and sin of 2 pi s f / count for each sample s and frequency f, both of samples x frequencies.

    The product s f is reduced modulo count while it is an integer, which is exact.
    """
    turns = torch.arange(samples).unsqueeze(1) * torch.arange(frequencies) % count
    angles = turns.double() * (2 * math.pi / count)
    return torch.cos(angles).to(dtype), torch.sin(angles).to(dtype)


@operator("STFT", since=17, known_inputs=(1, 3))
def _short_time_transform(
    signal: _Tensor, step: Any, window: _Tensor | None, length: Any, *, onesided: int, node: Node
) -> _Tensor:
    if length is None and window is None:
        raise node.error("it needs a window or a frame_length")
    (hop,) = integers(step, "frame_step", node)
    size = window.shape[0] if length is None and window is not None else integers(length, "frame_length", node)[0]
    values = signal.unsqueeze(-1) if signal.dim() == 2 else signal
    # Cuts the signal into overlapping frames, batch x frames x samples x parts (real and imaginary).
    frames = (values.shape[1] - size) // hop + 1
    places = torch.arange(frames).unsqueeze(1) * hop + torch.arange(size)
    cut = values.index_select(1, places.flatten()).reshape(values.shape[0], frames, size, values.shape[2])
    if window is not None:
        cut = cut * window.unsqueeze(-1)
    return fourier(cut, size, onesided=bool(onesided))


@operator("MelWeightMatrix", since=17, known_inputs=True)
def _mel_weights(
    bins: Any, length: Any, rate: Any, lower: Any, upper: Any, *, output_datatype: int, node: Node
) -> _Tensor:
    count, size, sampled = (integers(value, "a size", node)[0] for value in (bins, length, rate))
    # The mel scale: mel = 2595 log10(1 + hertz / 700).
    low, high = (2595 * math.log10(1 + numbers(value, "an edge", node)[0] / 700) for value in (lower, upper))
    mels = np.arange(count + 2) * ((high - low) / (count + 2)) + low
    hertz = 700 * (np.power(10, mels / 2595) - 1)
    edges = ((size + 1) * hertz // sampled).astype(np.int64)
    weights = np.zeros((size // 2 + 1, count))
    for i in range(count):
        # Each filter is a triangle: it rises from the first of three edges to the second, and falls to the third.
        left, middle, right = edges[i : i + 3]
        if left == middle:
            weights[middle, i] = 1
        else:
            weights[left : middle + 1, i] = np.arange(middle - left + 1) / (middle - left)
        if right > middle:
            weights[middle:right, i] = np.arange(right - middle, 0, -1) / (right - middle)
    return torch.from_numpy(weights).to(torch_dtype(output_datatype))
