"""save_as_onnx and export_for_inference: the files' results in a separate runtime."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, optim
from ort_trainer.compat.options import ORTTrainerOptions as OldOptions
from ort_trainer.step.onnx_file import save_model, with_weights

from .helpers import MLP, MLP_DESC, mlp_batches, mlp_trainer

pytestmark = pytest.mark.engine


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)
        self.tied = nn.Linear(4, 3)
        self.tied.weight = self.head.weight

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(F.relu(self.norm(self.conv(image)))).mean((2, 3))
        return self.head(hidden) + self.tied(hidden)


DESC = {
    "inputs": [("image", ["batch", 1, "height", "width"]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}


def load(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def test_file_gives_what_eval_step_gives(tmp_path: Path) -> None:
    model = Net()
    trainer = ORTTrainer(model, DESC, optim.AdamConfig(lr=0.05), loss_fn=F.cross_entropy)
    for size in (4, 1, 3):
        trainer.train_step(torch.randn(size, 1, 6, 5), torch.randint(0, 3, (size,)))
    trainer.save_as_onnx(tmp_path / "model.onnx")
    trainer.export_for_inference(str(tmp_path / "inference.onnx"))
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    whole, inference = load(tmp_path / "model.onnx"), load(tmp_path / "inference.onnx")
    assert [(i.name, i.shape) for i in whole.get_inputs()] == [
        ("image", ["batch", 1, "height", "width"]),
        ("label", ["batch"]),
    ]
    assert [(o.name, o.shape) for o in whole.get_outputs()] == [("loss", []), ("logits", ["batch", 3])]
    assert [i.name for i in inference.get_inputs()] == ["image"]
    assert [o.name for o in inference.get_outputs()] == ["logits"]
    proto = onnx.load(tmp_path / "model.onnx")
    used = set(model.state_dict()) - {"norm.num_batches_tracked", "tied.weight"}  # evaluation needs no count
    for file in (proto, onnx.load(tmp_path / "inference.onnx")):
        assert {i.name for i in file.graph.initializer} == used
        assert any(node.op_type == "Constant" for node in file.graph.node)
    assert not {n.op_type for n in proto.graph.node} & {"Dropout", "RandomUniform"}
    model.load_state_dict(trainer.state_dict(pytorch_format=True))
    model.eval()
    for shape in ((2, 1, 4, 7), (1, 1, 3, 3)):
        x, y = torch.randn(shape), torch.randint(0, 3, shape[:1])
        loss, logits = trainer.eval_step(x, y)
        found = whole.run(None, {"image": x.numpy(), "label": y.numpy()})
        torch.testing.assert_close(torch.from_numpy(found[0]), loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.from_numpy(found[1]), logits, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.from_numpy(inference.run(None, {"image": x.numpy()})[0]), logits)
        torch.testing.assert_close(model(x).detach(), logits, rtol=1e-5, atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["inference.onnx", "model.onnx"]


def test_a_trainer_of_the_file_writes_the_file_again(tmp_path: Path) -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("places", torch.randn(8))
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((x + self.places).clamp(min=-1.0))

    trainer = mlp_trainer(model=Placed())
    trainer.eval_step(*mlp_batches(1)[0])
    trainer.save_as_onnx(tmp_path / "first.onnx")
    again = ORTTrainer(tmp_path / "first.onnx", trainer.model_desc.to_dict(), optim.SGDConfig())
    again.prepare()
    again.save_as_onnx(tmp_path / "second.onnx")
    first, second = (onnx.load(tmp_path / f"{name}.onnx") for name in ("first", "second"))
    assert [tensor.name for tensor in first.graph.initializer] == ["head.weight", "head.bias", "places"]
    for part in ("node", "initializer", "input", "output"):
        assert list(getattr(first.graph, part)) == list(getattr(second.graph, part))
    assert first.metadata_props == second.metadata_props


def test_weights_are_the_current_ones_and_files_are_replaced(tmp_path: Path) -> None:
    trainer = mlp_trainer()
    x, y = mlp_batches(1)[0]
    for _ in range(2):
        trainer.train_step(x, y)
        trainer.save_as_onnx(tmp_path / "m.onnx")
        found = load(tmp_path / "m.onnx").run(["logits"], {"x": x.numpy(), "label": y.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found), trainer.eval_step(x, y)[1], rtol=1e-5, atol=1e-6)


def test_an_older_operator_set(tmp_path: Path) -> None:
    x, y = mlp_batches(1)[0]
    trainer = mlp_trainer({"_internal_use": {"onnx_opset_version": 13}})
    trainer.train_step(x, y)
    assert trainer.loop.kernels == "PyTorch's"
    trainer.save_as_onnx(tmp_path / "m.onnx")
    assert {entry.domain: entry.version for entry in onnx.load(tmp_path / "m.onnx").opset_import} == {"": 13}
    found = load(tmp_path / "m.onnx").run(["logits"], {"x": x.numpy(), "label": y.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), trainer.eval_step(x, y)[1], rtol=1e-5, atol=1e-6)


class Halves(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.trunc(super().forward(x)) + torch.bitwise_not(x[:, :1].int())


def test_what_can_not_have_the_operator_set(tmp_path: Path) -> None:
    options = {"_internal_use": {"onnx_opset_version": 12}}
    trainer = mlp_trainer(options, model=Halves())
    trainer.eval_step(*mlp_batches(1)[0])
    with pytest.raises(
        ValueError, match=r"_internal_use.onnx_opset_version 12: .* newer are .*BitwiseNot.* Files have op"
    ):
        trainer.save_as_onnx(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
    old = ORTTrainer(Halves(), MLP_DESC, optim.AdamConfig(), loss_fn=F.cross_entropy, options=OldOptions(options))
    old.eval_step(*mlp_batches(1)[0])
    with pytest.warns(UserWarning, match="onnx_opset_version 12"):
        old.save_as_onnx(tmp_path / "m.onnx")
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == 18


def test_large_weights_go_into_a_second_file(tmp_path: Path) -> None:
    trainer = mlp_trainer({"utils": {"kernels": "onnxruntime"}})
    x, y = mlp_batches(1)[0]
    trainer.eval_step(x, y)
    session = trainer.session
    model = with_weights(session.graphs(False)[0], session.parameters, {}, [])
    left = tmp_path / ".m.onnx.abcdefgh.tmp.ort_trainer"  # from a process that was killed while writing
    left.mkdir()
    (left / "m.onnx.data").write_text("half")
    for _ in range(2):
        save_model(model, tmp_path / "m.onnx", limit=100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    found = load(tmp_path / "m.onnx").run(["logits"], {"x": x.numpy(), "label": y.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), trainer.eval_step(x, y)[1])
    with pytest.raises(FileNotFoundError, match="the folder .* does not exist"):
        save_model(model, tmp_path / "no" / "m.onnx", limit=100)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        save_model(model, tmp_path / "folder", limit=100)
    assert not (tmp_path / "folder.data").exists()


class Heads(nn.Module):
    """Three outputs, the last of which needs a separate input."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(8, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden), hidden, self.other(hidden) * gate


def test_outputs_can_be_chosen(tmp_path: Path) -> None:
    desc = {
        "inputs": [("x", ["batch", 8]), ("gate", ["batch", 1]), ("label", ["batch"])],
        "outputs": [
            ("loss", [], True),
            ("logits", ["batch", 3]),
            ("hidden", ["batch", 6]),
            ("gated", ["batch", 2]),
        ],
    }
    model = Heads()
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=0.1), loss_fn=lambda out, y: F.cross_entropy(out[0], y))
    x, gate, y = torch.randn(4, 8), torch.rand(4, 1), torch.randint(0, 3, (4,))
    trainer.train_step(x, gate, y)
    expected = dict(zip(("logits", "hidden", "gated"), model(x, gate), strict=True))
    weights = {"body.weight", "body.bias"}
    chosen: dict[tuple[str, ...] | None, tuple[set[str], set[str]]] = {
        ("hidden",): ({"x"}, weights),
        ("gated", "logits"): ({"x", "gate"}, set(model.state_dict())),
        ("hidden", "logits"): ({"x"}, {*weights, "head.weight", "head.bias"}),
        None: ({"x", "gate"}, set(model.state_dict())),
    }
    for names, (inputs, initializers) in chosen.items():
        trainer.export_for_inference(tmp_path / "m.onnx", names)
        onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
        assert {i.name for i in onnx.load(tmp_path / "m.onnx").graph.initializer} == initializers
        session = load(tmp_path / "m.onnx")
        assert {entry.name for entry in session.get_inputs()} == inputs
        assert [entry.name for entry in session.get_outputs()] == list(names or expected)
        found = session.run(None, {k: v.numpy() for k, v in {"x": x, "gate": gate}.items() if k in inputs})
        for name, value in zip(names or expected, found, strict=True):
            torch.testing.assert_close(torch.from_numpy(value), expected[name].detach(), rtol=1e-5, atol=1e-6)
    before = (tmp_path / "m.onnx").read_bytes()
    for wrong, error, message in (
        (["logit"], ValueError, r"has unknown names \['logit'\]: choose from \['logits'"),
        ([], ValueError, "output_names is empty: name at least one of"),
        (
            ["loss", "logits"],
            ValueError,
            "has the loss, 'loss', which needs the label .* or write all outputs with save_as_onnx",
        ),
        (["hidden", "hidden"], ValueError, "has a repeated name"),
        ("hidden", TypeError, "must be a list of names, but 'hidden' was given"),
        ([1], TypeError, r"must be a list of names, but \[1\] was given"),
    ):
        with pytest.raises(error, match=message):
            trainer.export_for_inference(tmp_path / "m.onnx", wrong)
    assert (tmp_path / "m.onnx").read_bytes() == before
    # Outputs that are fetched in a different order than described.
    trainer.train_step_info.fetches = ["gated", "logits"]
    for found, name in zip(trainer.eval_step(x, gate), ("gated", "logits"), strict=True):
        torch.testing.assert_close(found, expected[name].detach(), rtol=1e-5, atol=1e-6)


class Positions(nn.Module):
    """Uses as many positions as there are words; with labels, PyTorch reads their number from the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.register_buffer("positions", torch.randn(32, 8), persistent=False)

    def forward(self, ids: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.words(ids) + self.positions[: label.shape[1]]
        logits = self.head(hidden)
        return F.cross_entropy(logits.transpose(1, 2), label), logits


@pytest.mark.parametrize("inputs", [["ids", "label"], ["label", "ids"]], ids=lambda names: "-".join(names))
def test_a_size_that_inputs_share_is_no_reason_to_feed_the_label(inputs: list[str], tmp_path: Path) -> None:
    desc = {
        "inputs": [(name, ["batch", "length"]) for name in inputs],
        "outputs": [("loss", [], True), ("logits", ["batch", "length", 20])],
    }
    model = Positions()
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=0.1))
    ids = torch.randint(0, 20, (3, 5))
    trainer.train_step(ids=ids, label=ids)
    trainer.export_for_inference(tmp_path / "m.onnx")
    session = load(tmp_path / "m.onnx")
    assert [entry.name for entry in session.get_inputs()] == ["ids"]
    for shape in ((3, 5), (1, 7), (2, 1)):
        ids = torch.randint(0, 20, shape)
        expected = model(ids, ids)[1].detach()
        torch.testing.assert_close(torch.from_numpy(session.run(None, {"ids": ids.numpy()})[0]), expected)
        torch.testing.assert_close(trainer.predict(ids=ids), expected)


class TwoInputs(nn.Module):
    """Two outputs use the number of rows, and each alone must read it from its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.second(y)
        return self.first(x) * x.shape[0], hidden * y.shape[0], hidden.tanh()


@pytest.mark.parametrize("names", [["x", "y"], ["y", "x"]], ids=lambda names: "-".join(names))
def test_a_shared_size_asks_for_no_input_that_was_not_needed(names: list[str]) -> None:
    desc = {
        "inputs": [*((name, ["batch", 4]) for name in names), ("label", ["batch"])],
        "outputs": [("loss", [], True), *((name, ["batch", 4]) for name in "abc")],
    }
    trainer = ORTTrainer(
        TwoInputs(), desc, optim.SGDConfig(lr=0.1), loss_fn=lambda outs, label: F.cross_entropy(sum(outs), label)
    )
    batch = {"x": torch.randn(5, 4), "y": torch.randn(5, 4), "label": torch.arange(5) % 4}
    trainer.train_step(**batch)
    for output, own in (("c", "y"), ("a" if names[0] == "x" else "b", names[0])):
        given = [batch[name] if name == own else None for name in (*names, "label")]
        trainer.session.eval_step(given, names=[output])


def test_bad_paths(tmp_path: Path) -> None:
    trainer = mlp_trainer()
    trainer.eval_step(*mlp_batches(1)[0])
    for save in (trainer.save_as_onnx, trainer.export_for_inference):
        with pytest.raises(ValueError, match="path must not be empty"):
            save("")
        with pytest.raises(TypeError, match="path must be a str or a path, but a int"):
            save(3)
        with pytest.raises(FileNotFoundError, match="the folder .* does not exist"):
            save(tmp_path / "no" / "m.onnx")
        with pytest.raises(IsADirectoryError, match="it is a folder"):
            save(tmp_path)
