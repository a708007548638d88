"""ort-trainer inspect: its output matches the contents of the files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import onnx
import pytest
import safetensors.numpy

from ort_trainer import CheckpointError
from ort_trainer.cli.describe import describe
from ort_trainer.core.optimizer_keys import CONFIGS
from ort_trainer.core.protobuf import field
from ort_trainer.core.sealed import write
from ort_trainer.optim import rules
from ort_trainer.state import load_checkpoint_file, save_checkpoint_file
from ort_trainer.state.training_api import read_checkpoint

from ..state.test_legacy import REAL as LEGACY
from .conftest import Run, damage


def test_a_checkpoint(files: Path, run: Run) -> None:
    code, out, _ = run("inspect", files / "run.ortckpt", "--json")
    found = json.loads("\n".join(out))
    assert code == 0
    expected = {"kind": "checkpoint of ORTTrainer", "version": 2, "optimization_step": 3, "step": 3, "world_size": 1}
    expected |= {"optimizer": "AdamConfig or AdamWConfig", "mixed_precision": False, "checksums": "ok", "damaged": []}
    assert {key: found[key] for key in expected} == expected
    assert sorted(found["user_dict"]) == ["best", "epoch", "name", "seen"]
    theirs = safetensors.numpy.load_file(files / "run.ortckpt")
    assert {t["name"]: (t["dtype"], t["shape"], t["bytes"]) for t in found["tensors"]} == {
        name: (value.dtype.name, list(value.shape), value.nbytes) for name, value in theirs.items()
    }
    sums = {"tensors": len(theirs), "elements": 0, "bytes": 0}
    for value in theirs.values():
        sums["elements"] += value.size
        sums["bytes"] += value.nbytes
    assert found["totals"] == sums


def test_as_text(files: Path, run: Run) -> None:
    code, out, err = run("inspect", files / "run.ortckpt")
    assert code == 0 and not err
    assert out[0].startswith(f"{files / 'run.ortckpt'}: checkpoint of ORTTrainer, 1")
    facts = dict(line.strip().split("  ", 1) for line in out[1 : out.index("")])
    assert {name: value.strip() for name, value in facts.items()}["optimizer"] == "AdamConfig or AdamWConfig"
    assert any(
        line.split() == ["state/model/full_precision/fc1.weight", "float32", "[16,", "8]", "512", "bytes"]
        for line in out
    )


def test_numbers_that_are_not_finite_are_null_in_json(files: Path, run: Run, tmp_path: Path) -> None:
    state, user = load_checkpoint_file(files / "run.ortckpt")
    metrics = {"loss": math.nan, "score": -math.inf, "other": 1.5}
    save_checkpoint_file(tmp_path / "run.ortckpt", state, user, parts={"run": {"metrics": metrics}})
    code, out, _ = run("inspect", tmp_path / "run.ortckpt", "--json")
    assert code == 0 and json.loads("\n".join(out))["metrics"] == {"loss": None, "score": None, "other": 1.5}


def test_a_damaged_tensor_is_named(files: Path, run: Run, tmp_path: Path) -> None:
    name = "state/model/full_precision/fc2.weight"
    path = Path(shutil.copy(files / "run.ortckpt", tmp_path))
    damage(path, name)
    code, out, _ = run("inspect", path, "--json")
    found = json.loads("\n".join(out))
    assert code == 1 and found["checksums"] == "damaged" and found["damaged"] == [name]
    assert found["optimization_step"] == 3
    damage(path, "state/random")
    assert describe(path)["damaged"] == [name, "state/random"] or set(describe(path)["damaged"]) == {
        name,
        "state/random",
    }


def test_other_checkpoints(files: Path) -> None:
    assert describe(files / "old.ortckpt")["checksums"] == "none"
    ours = describe(files / "artifacts" / "checkpoint")
    read = read_checkpoint(files / "artifacts" / "checkpoint")
    assert (ours["optimization_step"], ours["optimizer_state"], ours["export"]) == (3, True, read.export)
    assert ours["checksums"] == "ok" and describe(files / "artifacts" / "nominal_checkpoint")["nominal"] is True
    theirs = describe(files / "upstream")
    assert theirs["optimizer_groups"]["group0"]["step"] == 3 and theirs["totals"]["tensors"] == 3 * len(read.parameters)
    legacy = describe(LEGACY)
    assert (legacy["optimizer"], legacy["optimization_step"]) == ("AdamConfig or AdamWConfig", 4)
    assert {"model/full_precision/fc1.bias", "optimizer/fc1.bias/Moment_1"} <= {t["name"] for t in legacy["tensors"]}


@pytest.mark.parametrize("name", ["training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"])
def test_onnx_models(files: Path, name: str) -> None:
    path = files / "artifacts" / name
    found, model = describe(path), onnx.load(path)
    assert found["ir_version"] == model.ir_version and found["producer"] == model.producer_name
    assert found["opsets"] == {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    assert found["artifact"]["kind"] == name.partition("_")[0].replace("eval", "evaluation")
    assert found["nodes"] == len(model.graph.node)
    counted: dict[str, int] = {}
    for node in model.graph.node:
        counted[node.op_type] = counted.get(node.op_type, 0) + 1
    assert found["operators"] == counted
    for side, values in (("inputs", model.graph.input), ("outputs", model.graph.output)):
        assert [(v["name"], v["dtype"], v["shape"]) for v in found[side]] == [
            (
                value.name,
                onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name,
                [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
            )
            for value in values
        ]
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert {t["name"]: (t["dtype"], tuple(t["shape"]), t["bytes"]) for t in found["tensors"]} == {
        key: (value.dtype.name, value.shape, value.nbytes) for key, value in arrays.items()
    }


def test_a_graph_in_several_parts(files: Path, tmp_path: Path) -> None:
    """Protobuf merges them, and messages within, such as types."""
    whole = files / "artifacts" / "eval_model.onnx"
    model = onnx.load(whole)
    first, second, third = onnx.ModelProto(), onnx.ModelProto(), onnx.ModelProto()
    first.CopyFrom(model)
    del first.graph.node[2:], first.graph.input[:], first.graph.output[:], first.graph.initializer[:]
    second.graph.node.extend(model.graph.node[2:])
    second.graph.initializer.extend(model.graph.initializer)
    third.graph.input.extend(model.graph.input)
    third.graph.output.extend(model.graph.output)
    parts = tmp_path / "parts.onnx"
    parts.write_bytes(b"".join(part.SerializeToString() for part in (first, second, third)))
    assert {**describe(parts), "file": "", "bytes": 0} == {**describe(whole), "file": "", "bytes": 0}


def test_a_type_in_several_parts(tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"]).SerializeToString()
    value += onnx.helper.make_tensor_value_info("x", onnx.TensorProto.INT64, [3]).SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x09" + field(7, field(11, value)))
    (read,) = onnx.load(path).graph.input
    assert read.type.tensor_type.elem_type == onnx.TensorProto.INT64 and len(read.type.tensor_type.shape.dim) == 2
    assert describe(path)["inputs"] == [{"name": "x", "dtype": "int64", "shape": ["n", 3]}]


def test_folders(files: Path, run: Run, tmp_path: Path) -> None:
    code, out, _ = run("inspect", files / "artifacts")
    assert code == 0 and [line.split()[0] for line in out[3:]] == [
        *("checkpoint", "eval_model.onnx", "nominal_checkpoint", "optimizer_model.onnx", "training_model.onnx")
    ]
    shutil.copy(files / "run.ortckpt", tmp_path / "step-00000003.ortckpt")
    (tmp_path / "step-00000006.ortckpt").write_bytes((files / "run.ortckpt").read_bytes()[:-1])
    (tmp_path / "latest").write_text("step-00000003.ortckpt\n")
    code, out, _ = run("inspect", tmp_path, "--json")
    found = json.loads("\n".join(out))
    assert code == 1 and found["latest"] == "step-00000003.ortckpt"
    sound, damaged = found["files"]
    assert sound["checksums"] == "ok" and "step-00000006.ortckpt" in damaged["problem"]


def test_what_is_no_file_of_ours(tmp_path: Path, run: Run) -> None:
    for content, message in (
        (b"", "is empty"),
        (b"PK\x03\x04 and more", "torch.save or pickle"),
        (b"hello", "of unknown kind"),
        (b"\x08\x07 no model", "damaged or not an ONNX model"),
        (b"\xff" * 8 + b"{}", "is damaged"),
    ):
        path = tmp_path / "file"
        path.write_bytes(content)
        code, out, err = run("inspect", path)
        assert code == 1 and not out and len(err) == 1 and err[0].startswith("error: ") and message in err[0], err
    code, out, err = run("inspect", tmp_path / "nothing")
    assert code == 1 and "does not exist" in err[0]


@pytest.mark.parametrize("size", [0x280, 0x480, 0x580])  # the first bytes of pickles in three protocols
def test_a_header_may_be_as_long_as_a_pickle_begins(tmp_path: Path, run: Run, size: int) -> None:
    path = tmp_path / "file"
    for padding in range(size - 0x80, size):
        with path.open("wb") as file:
            write(file, {}, {"padding": " " * padding})
        if path.read_bytes()[:2] == size.to_bytes(2, "little"):
            break
    code, _, err = run("inspect", path)
    assert (code, err) == (0, []) and path.read_bytes()[:2] == size.to_bytes(2, "little")


def test_names_in_files_do_not_command_the_terminal(tmp_path: Path, run: Run) -> None:
    import numpy as np

    path = tmp_path / "file"
    with path.open("wb") as file:
        write(file, {"evil\x1b[2J\u202e": ("float32", (1,), np.zeros(4, np.uint8))}, {})
    code, out, _ = run("inspect", path)
    assert code == 0 and any("evil\\x1b[2J\\u202e" in line for line in out)
    assert all(line.isprintable() for line in out)


def test_a_deep_manifest_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        write(file, {}, {"manifest": "[" * 200_000})
    with pytest.raises(CheckpointError, match="its manifest can't be read"):
        describe(path)


def test_optimizers_have_the_names_of_their_configs() -> None:
    configs: dict[str, list[str]] = {}
    for name in rules.__all__:
        configs.setdefault(getattr(rules, name)().name, []).append(name)
    assert {name: " or ".join(sorted(names)) for name, names in configs.items()} == CONFIGS
