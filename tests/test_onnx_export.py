"""save_as_onnx and export_for_inference: what a runtime of its own makes of the files."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, optim
from ort_trainer.graph.onnx_file import save_model

from .helpers import mlp_batches, mlp_trainer

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


def test_weights_are_the_current_ones_and_files_are_replaced(tmp_path: Path) -> None:
    trainer = mlp_trainer()
    x, y = mlp_batches(1)[0]
    for _ in range(2):
        trainer.train_step(x, y)
        trainer.save_as_onnx(tmp_path / "m.onnx")
        found = load(tmp_path / "m.onnx").run(["logits"], {"x": x.numpy(), "label": y.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found), trainer.eval_step(x, y)[1], rtol=1e-5, atol=1e-6)


def test_large_weights_go_into_a_second_file(tmp_path: Path) -> None:
    trainer = mlp_trainer()
    x, y = mlp_batches(1)[0]
    trainer.eval_step(x, y)
    session = trainer.session
    for _ in range(2):
        save_model(session.graphs(False)[0], session.parameters, {}, [], tmp_path / "m.onnx", limit=100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    found = load(tmp_path / "m.onnx").run(["logits"], {"x": x.numpy(), "label": y.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), trainer.eval_step(x, y)[1])
    with pytest.raises(FileNotFoundError, match="the folder .* does not exist"):
        save_model(session.graphs(False)[0], session.parameters, {}, [], tmp_path / "no" / "m.onnx", limit=100)


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
