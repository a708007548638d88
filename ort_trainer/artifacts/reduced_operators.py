"""Lists the operators that artifacts need, for a reduced build of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx

from ..core.atomic import temporary_folder
from ..engine.ort import CPU, engine, make_session, own_options, providers_for
from .files import FILES

_HEAD = "# Operators of {names}, as they are and as ONNX Runtime {version} fuses them: domain;opset;operators\n"


def check_name(name: object) -> str:
    """Returns the name of the file with the list.

    Raises:
        TypeError: If it is not a str.
        ValueError: If it is not a plain file name, or is that of a model.
    """
    if not isinstance(name, str):
        raise TypeError(f"reduced_operators must be a file name, such as 'ops.config', but {name!r} was given")
    if not name or Path(name).name != name or name in (*FILES, "..") or name.endswith(".onnx"):
        raise ValueError(
            f"reduced_operators must be the name of a file in the folder of the artifacts, such as 'ops.config', but "
            f"{name!r} was given"
        )
    return name


def operators_of(models: Iterable[Path]) -> str:
    """Returns the list in the format that ONNX Runtime's ``--include_ops_by_config`` takes.

    It has the operators of the models, and those that ONNX Runtime's extended optimizations fuse them into when it
    loads a model: a build without the fused operators would refuse the model that it has optimized itself.

    Args:
        models: The files.
    """
    needed: dict[tuple[str, int], set[str]] = {}
    paths = sorted(models)
    for path in paths:
        for proto in (onnx.load(path), _optimized(path)):
            versions = {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import}
            for node in _nodes(proto.graph):
                domain = node.domain or "ai.onnx"
                needed.setdefault((domain, versions[domain]), set()).add(node.op_type)
    lines = [f"{domain};{opset};{','.join(sorted(names))}\n" for (domain, opset), names in sorted(needed.items())]
    return _HEAD.format(names=", ".join(path.name for path in paths), version=engine().__version__) + "".join(lines)


def _optimized(path: Path) -> onnx.ModelProto:
    """Returns a model as ONNX Runtime runs it, without optimizations that depend on the processor."""
    options = own_options()
    options.graph_optimization_level = engine().GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    with temporary_folder() as folder:
        options.optimized_model_filepath = str(folder / "model.onnx")
        make_session(path.read_bytes(), options, providers_for(CPU))
        return onnx.load(options.optimized_model_filepath)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yields the nodes of a graph, including those of graphs in attributes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from _nodes(inner)
