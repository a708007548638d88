"""The picture of docs/contributing.md: which room imports from which."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.harness.import_map import FILES, room, rooms_imported  # noqa: E402

__all__ = ["room_picture"]

# They only pass names on.
_DOORS = {"__init__", "__main__", "sources"}
_WIDTH, _HEIGHT, _EDGE = 92, 24, 8  # of a room, and around all
_ACROSS, _DOWN = 112, 52  # from a room to the next
# Can be read on white and on black.
_LINE, _BOX, _TEXT = "#7a7f87", "#2f81d6", "#ffffff"

# A room; of an arrow over several layers, also its place in each layer between.
Place = str | tuple[str, str, int]


def room_picture() -> str:
    """Returns an SVG in which an arrow leads down from a room to one that imports from it.

    Arrows that follow from others are left out. A room stands one layer below the last room that it imports from.
    """
    graph = networkx.DiGraph(
        (upstream, room(path))
        for path in FILES
        for upstream in sorted(rooms_imported(path) - {room(path)})
        if not {upstream, room(path)} & _DOORS
    )
    graph = networkx.transitive_reduction(graph)
    layer = {name: number for number, names in enumerate(networkx.topological_generations(graph)) for name in names}
    layers: list[list[Place]] = [[] for _ in range(max(layer.values()) + 1)]
    for name in sorted(layer):
        layers[layer[name]].append(name)
    ways: list[list[Place]] = []
    for first, then in sorted(graph.edges):
        between: list[Place] = [(first, then, number) for number in range(layer[first] + 1, layer[then])]
        ways.append([first, *between, then])
        for number, place in enumerate(between, layer[first] + 1):
            layers[number].append(place)
    return _drawn(layer, ways, _ordered(layers, ways))


def _ordered(layers: list[list[Place]], ways: list[list[Place]]) -> dict[Place, float]:
    """Returns how far right each place is, near its neighbors, so that few arrows cross."""
    near: dict[Place, set[Place]] = {place: set() for places in layers for place in places}
    for first, then in (pair for way in ways for pair in pairwise(way)):
        near[first].add(then)
        near[then].add(first)
    widest = max(map(len, layers))
    right: dict[Place, float] = {}

    def stand(places: list[Place]) -> None:
        right.update((place, (widest - len(places)) / 2 + number) for number, place in enumerate(places))

    for places in layers:
        stand(places)
    for _ in range(12):
        for places in (*layers, *reversed(layers)):
            means = {place: sum(right[other] for other in near[place]) / len(near[place]) for place in places}
            places.sort(key=lambda place: (means[place], str(place)))
            stand(places)
    return right


def _drawn(layer: dict[str, int], ways: list[list[Place]], right: dict[Place, float]) -> str:
    width = _ACROSS * max(right.values()) + _WIDTH + 2 * _EDGE
    height = _DOWN * max(layer.values()) + _HEIGHT + 2 * _EDGE
    middle = {place: _EDGE + _ACROSS * right[place] + _WIDTH / 2 for place in right}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="13" text-anchor="middle" role="img">',
        "<title>Which room of the package imports from which</title>",
        '<marker id="head" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0L6 3L0 6z" fill="{_LINE}"/></marker>',
    ]
    for way in ways:
        start = layer[str(way[0])]
        path = f"M{middle[way[0]]:g}"
        for number, (place, then) in enumerate(pairwise(way), start):
            y, to = _EDGE + _DOWN * number + _HEIGHT, _EDGE + _DOWN * (number + 1)
            path += f" {y}C{middle[place]:g} {y + 16} {middle[then]:g} {to - 16} {middle[then]:g} {to}"
            path += "" if then == way[-1] else f"L{middle[then]:g}"
        lines.append(f'<path d="{path}" fill="none" stroke="{_LINE}" marker-end="url(#head)"/>')
    for name, number in sorted(layer.items()):
        x, y = middle[name] - _WIDTH / 2, _EDGE + _DOWN * number
        lines.append(f'<rect x="{x:g}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="{_BOX}"/>')
        lines.append(f'<text x="{middle[name]:g}" y="{y + 17}" fill="{_TEXT}">{name}</text>')
    return "\n".join(lines) + "\n</svg>\n"
