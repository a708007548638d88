"""The charts of docs/benchmarks.md, as SVG files.

Equal numbers give equal bytes: files contain no dates or random names. The background is white, so the charts are
readable on a dark page too. Only this module needs matplotlib, and imports it late.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from turns import Profile

from ort_trainer.profiling.figures import is_product

__all__ = ["Bar", "draw_operators", "draw_ratios", "family", "require_matplotlib"]

_WIDTH = 8.0
_COLOURS = ("#8c8c8c", "#1f6fb4", "#7fb8e6", "#d98032")
_SETTINGS = {
    "svg.hashsalt": "ort_trainer",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],  # ships with matplotlib, so text has the same width everywhere
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

_PRODUCTS = "products, convolutions"
# Other kinds of operators, with prefixes of their names in PyTorch and ONNX. The first match wins.
_FAMILIES = {
    "dropout, random numbers": r"random numbers|ort_trainer\.(draw|apply)_mask|aten\.native_dropout|Dropout|Dequantize",
    "norms": r"aten\.(native_(layer|batch|group)_norm|cudnn_batch)|(Layer|Batch|Group)Norm|SimplifiedLayerNorm",
    "softmax, losses": r"aten\._?(safe_|log_)*softmax|aten\.nll_loss|ort_trainer\.cross_entropy|(Log)?Softmax",
    "sums": r"aten\.(sum|mean|amax|max)|Reduce",
    "copies, embeddings": (
        r"aten\.(clone|contiguous|copy|_to_copy|cat|stack|embedding|index|gather|scatter|slice|select|split|expand|t$|"
        r"reshape|view|permute|transpose|unsqueeze|squeeze|constant_pad)|Transpose|Concat|Gather|Scatter|Slice|Split|"
        r"Expand|Reshape|Squeeze|Unsqueeze|Pad|Cast|Identity"
    ),
}
_REST = "activations, other arithmetic"
_UPDATE, _BETWEEN = "update of the weights", "Python, overhead"
_FAMILY_COLOURS = {
    _PRODUCTS: "#1f6fb4",
    "dropout, random numbers": "#d98032",
    "norms": "#5aa469",
    "softmax, losses": "#b5577d",
    "sums": "#8a6fbf",
    "copies, embeddings": "#c9b14a",
    _REST: "#7fb8e6",
    _UPDATE: "#6d6d6d",
    _BETWEEN: "#c4c4c4",
}


class Bar(NamedTuple):
    """The length of a bar, with the ends of its interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None


def require_matplotlib() -> None:
    """Raises an error that says what to install, if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            "the charts are drawn by matplotlib, which is not installed: run "
            "`pip install --constraint constraints.txt '.[bench]'`, or leave out --write"
        ) from error


def draw_ratios(path: Path, title: str, contenders: Sequence[str], rows: Mapping[str, Mapping[str, Bar]]) -> None:
    """Draws a group of bars for each row, and a line at 1.

    Args:
        path: The SVG file.
        title: The title.
        contenders: All contenders in the order of their colours, so that a missing one does not change the others'.
        rows: Bars by label of the row and name of the contender.
    """
    colours = dict(zip(contenders, _COLOURS, strict=True))
    bars = [(label, name, bar) for label, group in rows.items() for name, bar in group.items()]
    with _figure(path, 0.22 * len(bars) + 0.25 * len(rows) + 1.2) as axes:
        position, ticks, named = 0.25, [], set()
        for label, group in rows.items():
            ticks.append((position + (len(group) - 1) / 2, label))
            for name, bar in group.items():
                axes.barh(position, bar.value, 0.85, color=colours[name], label=None if name in named else name)
                named.add(name)
                if bar.low is not None and bar.high is not None:
                    axes.plot((bar.low, bar.high), (position, position), color="black", linewidth=0.8)
                axes.text(max(bar.value, bar.high or 0.0) + 0.02, position, f"{bar.value:.2f}", va="center", size=8)
                position += 1
            position += 1
        axes.axvline(1.0, color="black", linewidth=1.0, linestyle="--")
        axes.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks])
        axes.set_ylim(position - 0.5, -0.5)
        axes.set_xlim(0, 1.1 * max(1.0, *(max(bar.value, bar.high or 0.0) for _, _, bar in bars)))
        axes.set_title(title, loc="left", size=10)
        axes.figure.legend(loc="outside lower center", ncols=len(contenders))


def draw_operators(path: Path, profiles: Mapping[str, Profile]) -> None:
    """Draws where the time of a step goes: a bar of kinds of operators for each profile, in milliseconds.

    Args:
        path: The SVG file.
        profiles: Profiles by label of the bar.
    """
    with _figure(path, 0.45 * len(profiles) + 1.6) as axes:
        sums = [_by_family(profile) for profile in profiles.values()]
        starts = [0.0] * len(sums)
        for name, colour in _FAMILY_COLOURS.items():
            lengths = [parts.get(name, 0.0) for parts in sums]
            axes.barh(range(len(sums)), lengths, 0.7, left=starts, color=colour, label=name)
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        for position, end in enumerate(starts):
            axes.text(end * 1.01, position, f"{end:.0f}", va="center", size=8)
        axes.set_yticks(range(len(sums)), list(profiles))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.1 * max(starts))
        axes.set_title("milliseconds of a training step, by kinds of operators", loc="left", size=10)
        axes.figure.legend(loc="outside lower center", ncols=3)


def family(operator: str) -> str:
    """Returns the kind that an operator belongs to, by its name in a profile."""
    if is_product(operator):
        return _PRODUCTS
    for name, pattern in _FAMILIES.items():
        if re.match(pattern, operator):
            return name
    return _REST


def _by_family(profile: Profile) -> dict[str, float]:
    sums = {_UPDATE: profile["optimizer"], _BETWEEN: profile["overhead"]}
    for name, milliseconds in profile["operators"]:
        sums[family(name)] = sums.get(family(name), 0.0) + milliseconds
    return sums


@contextlib.contextmanager
def _figure(path: Path, height: float) -> Iterator[Any]:
    """Yields the axes of a new figure, and writes it at the end."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure((_WIDTH, height), facecolor="white", layout="constrained")
        yield figure.subplots()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
