"""The list of operators that artifacts need, for a reduced build of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from ort_trainer import optim

from ..helpers import mlp_batches, mlp_trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = mlp_trainer({"utils": {"kernels": "onnxruntime"}}, config=optim.AdamWConfig(lr=0.01))
    trainer.prepare(mlp_batches(1)[0])
    folder = tmp_path_factory.mktemp("artifacts")
    trainer.export_artifacts(folder, reduced_operators="ops.config")
    for value, kind in (
        (3, TypeError),
        ("a/ops.config", ValueError),
        ("", ValueError),
        ("..", ValueError),
        ("checkpoint", ValueError),
        ("eval_model.onnx", ValueError),
    ):
        with pytest.raises(kind, match="reduced_operators must be"):
            trainer.export_artifacts(folder, reduced_operators=value)
    with pytest.raises(ValueError, match="for the flavor 'ort_trainer' only"):
        trainer.export_artifacts(folder, flavor="onnxruntime-training", reduced_operators="ops.config")
    return folder


def test_the_list_is_what_onnx_runtimes_build_reads(folder: Path) -> None:
    parser: Any = pytest.importorskip("onnxruntime.tools.reduced_build_config_parser")
    found, *_ = parser.parse_config(str(folder / "ops.config"))
    listed = {
        (domain, version, name) for domain, by in found.items() for version, names in by.items() for name in names
    }
    for path in folder.glob("*.onnx"):
        model = onnx.load(path)
        (opset,) = (entry.version for entry in model.opset_import if not entry.domain)
        inner = [g.g for node in model.graph.node for g in node.attribute if g.HasField("g")]
        for graph in (model.graph, *inner):
            missing = {node.op_type for node in graph.node if ("ai.onnx", opset, node.op_type) not in listed}
            assert not missing
    assert any(domain == "com.microsoft" for domain, _, _ in listed), "what ONNX Runtime fuses is missing"
