"""The tables and pictures of speed, and the README's picture, from the results in benchmarks/results/."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from contenders import COMPILE, EAGER, FASTEST, FLOOR, LEGACY, LOOPS, MODULE, ONNX, OURS

__all__ = ["Results", "blocks", "pictures", "read_results"]

# What benchmarks/train_step.py has written: by version, then by row.
Results = Mapping[str, Any]

# Contender -> label and color. All colors can be read on white and on black.
_CONTENDERS = {
    COMPILE: ("torch.compile", "#a08a4f"),
    MODULE: ("ORTModule", "#5aa469"),
    OURS: ("ort_trainer", "#2f81d6"),
    LOOPS: ("compiled loops", "#8a6fbf"),
    FASTEST: ("fastest", "#3fa7a0"),
    ONNX: ("ONNX Runtime", "#c9772e"),
    LEGACY: ("legacy 1.16.3", "#b5577d"),
}
_OVER_RELEASES = (COMPILE, OURS)
_IN_README = {"mlp", "convolutions", "resnet18", "lstm", "bert", "gpt2", "llama", "unet"}
_TEXT = "#7a7f87"
# The bars' left end, the first row's top, the length of the longest bar, and the heights of a bar and between rows.
_LEFT, _TOP, _LENGTH, _BAR, _SPACE, _WIDTH = 150, 44, 500, 11, 8, 720

Bars = Mapping[str, Mapping[str, float]]
"""Label of a row -> contender -> length."""


def read_results(folder: Path) -> Results:
    """Returns the results of all versions, the newest last."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    return {version: found[version] for version in sorted(found, key=lambda text: [*map(int, text.split("."))])}


def pictures(results: Results) -> dict[str, str]:
    """Returns the SVG of each picture, by its name."""
    *_, newest = results.values()
    rows = newest["rows"]

    def bars(value: Any, chosen: Mapping[str, Any] = rows, contenders: Any = _CONTENDERS) -> Bars:
        found = {row["label"]: _measured(row) for row in chosen.values()}
        return {
            label: {name: value(figures[name], figures[EAGER]) for name in contenders if name in figures}
            for label, figures in found.items()
        }

    def speed(own: Any, eager: Any) -> float:
        return float(own["speed"][0])

    def memory(own: Any, eager: Any) -> float:
        return float(own["MB"] / eager["MB"])

    def again(own: Any, eager: Any) -> float:
        return float(own["starts"][-1])

    readme = {name: row for name, row in rows.items() if name in _IN_README}
    common = set.intersection(*(_complete(part["rows"]) for part in results.values()))
    releases = {
        version: {name: _mean(_speeds([part["rows"][key] for key in common], name)) for name in _OVER_RELEASES}
        for version, part in results.items()
    }
    title = "Speed relative to eager PyTorch"
    return {
        "against_eager": _drawn(title, bars(speed, readme, (COMPILE, OURS, LOOPS)), "eager"),
        "speed": _drawn(title, bars(speed), "eager"),
        "memory": _drawn("Peak memory, as a multiple of eager PyTorch's", bars(memory), "eager"),
        "starts": _drawn("Seconds to the first step, in a second process", bars(again, rows, (EAGER, *_CONTENDERS))),
        "releases": _drawn(f"{title}: mean of {len(common)} models", releases, "eager"),
    }


def _complete(rows: Mapping[str, Any]) -> set[str]:
    """Returns the rows that have what is drawn over the versions."""
    return {key for key, row in rows.items() if _measured(row).keys() >= set(_OVER_RELEASES)}


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of the contenders of a row that did not fail."""
    return {name: figures for name, figures in row["contenders"].items() if "ms" in figures}


def _speeds(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, float]:
    """Returns a contender's speeds, by label of the row."""
    return {row["label"]: found[name]["speed"][0] for row in rows if name in (found := _measured(row))}


def _mean(speeds: Mapping[str, float]) -> float:
    """Returns the geometric mean."""
    return math.exp(sum(map(math.log, speeds.values())) / len(speeds))


def _drawn(title: str, rows: Bars, line: str = "") -> str:
    """Returns an SVG with bars for each row, and with a line at 1 if it has a label."""
    used = {name: _CONTENDERS.get(name, (name, _TEXT)) for group in rows.values() for name in group}
    unit = _LENGTH / max(length for group in rows.values() for length in group.values())
    drawn: list[str] = []
    top = _TOP + 18
    for number, (label, color) in enumerate(used.values()):
        x = _LEFT + 112 * number
        drawn.append(f'<rect x="{x}" y="26" width="10" height="10" fill="{color}"/>')
        drawn.append(f'<text x="{x + 15}" y="35" font-size="11">{escape(label)}</text>')
    for label, group in rows.items():
        middle = top + (_BAR + 1) * len(group) / 2 + 4
        drawn.append(f'<text x="{_LEFT - 10}" y="{middle:.0f}" text-anchor="end" font-size="12">{escape(label)}</text>')
        for name, length in group.items():
            width = length * unit
            # In the bar, where no line can cross it, if the bar is long enough.
            at, ink = (_LEFT + 4, "#fff") if width > 40 else (_LEFT + width + 5, _TEXT)
            drawn.append(
                f'<rect x="{_LEFT}" y="{top}" width="{width:.0f}" height="{_BAR}" fill="{used[name][1]}"/>'
                f'<text x="{at:.0f}" y="{top + _BAR - 2}" font-size="10" fill="{ink}">{length:.2f}</text>'
            )
            top += _BAR + 1
        top += _SPACE
    if line:
        one = _LEFT + unit
        drawn.append(f'<path d="M{one:.0f} {_TOP + 12}V{top}" stroke="{_TEXT}" stroke-dasharray="4 3"/>')
        drawn.append(f'<text x="{one:.0f}" y="{_TOP + 9}" text-anchor="middle" font-size="11">{line}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}"'
        f' font-family="system-ui, sans-serif" font-size="13" fill="{_TEXT}" role="img">'
        f'<title>{escape(title)}</title><text x="{_LEFT}" y="16">{escape(title)}</text>'
    )
    return "\n".join([head, *drawn, "</svg>"]) + "\n"


def blocks(results: Results) -> dict[str, list[str]]:
    """Returns what pages say of the newest version, by the name of its marks (figures.py)."""
    version, newest = list(results.items())[-1]
    rows = newest["rows"]
    return {"means": [*_means(version, newest)], "steps": [*_table(rows)], "speed": [*_sentence(newest)]}


def _sentence(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the means as a sentence, for pages that have no table."""
    rows, cores = results["rows"], results["where"].rpartition("; ")[2].rstrip(".")
    means = {name: _speeds(rows.values(), name) for name in (OURS, LOOPS, MODULE)}
    ours, loops, module = (f"{_mean(found):.2f}" if found else "unknown" for found in means.values())
    speeds = means[OURS].values()
    yield f"On {cores}, steps of {len(rows)} models are {ours} times as fast as eager PyTorch's in the geometric"
    yield f"mean ({min(speeds):.2f} to {max(speeds):.2f}); {loops} with compiled loops; {module} with `ORTModule`."


def _means(version: str, results: Mapping[str, Any]) -> Iterator[str]:
    rows = results["rows"]
    yield f"Version {version}, {results['date']}: {results['where']}"
    yield ""
    yield f"| {len(rows)} models, against eager PyTorch | speed, geometric mean | slowest | fastest | models below 1 |"
    yield "|---|---|---|---|---|"
    for name in _CONTENDERS:
        found = _speeds(rows.values(), name)
        if not found:
            continue
        ends = (f"{found[label]:.2f} ({label})" for label in (min(found, key=found.get), max(found, key=found.get)))  # type: ignore[arg-type]
        below = sum(speed < 1 for speed in found.values())
        label = _CONTENDERS[name][0] if len(found) == len(rows) else f"{_CONTENDERS[name][0]}, {len(found)} of them"
        yield f"| {label} | **{_mean(found):.2f}** | {' | '.join(ends)} | {below} |"


def _table(rows: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "| model | contender | step, ms | eager's time / its time (95 %) | of the floor | peak memory, MB | / eager's "
        "| first start, s | second start, s |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows.values():
        floor = row["contenders"].get(FLOOR, {}).get("ms")
        for name, found in row["contenders"].items():
            if name == FLOOR:
                continue
            head = f"| {row['title']} | {_CONTENDERS.get(name, (name,))[0]} |"
            if "ms" not in found:
                yield f"{head} fails |{' - |' * 6}"
                continue
            middle, low, high = found["speed"]
            speed = "1" if name == EAGER else f"**{middle:.2f}** ({low:.2f} - {high:.2f})"
            first, second = (*map(str, found["starts"]), "-")[:2]
            share = found["MB"] / row["contenders"][EAGER]["MB"]
            above = f"{found['ms'] / floor:.2f}" if floor else "-"
            yield f"{head} {found['ms']:.4g} | {speed} | {above} | {found['MB']} | {share:.2f} | {first} | {second} |"
