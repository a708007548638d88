"""Steps on PyTorch's kernels and on ONNX Runtime's: the same numbers, and the kernels that were chosen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.core.errors import ExportError
from ort_trainer.engine.ort import has_cuda
from ort_trainer.export import export
from ort_trainer.export.model import ModelSource
from ort_trainer.kernels.kinds import ONNX_RUNTIME, PROGRAMS
from ort_trainer.options import ModelDescription

from ..helpers import MLP, MLP_DESC, Reference, assert_close, mlp_batches, mlp_trainer, train_both
from ..zoo import Between


class Convolutions(nn.Module):
    """Convolutions, batch norm, both kinds of pooling, and a mask that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = F.dropout(self.second(x).transpose(1, 3), 0.3, self.training).transpose(1, 3)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Texts(nn.Module):
    """Embedding, LSTM, attention with dropout, a GELU written out, and a split whose parts are used far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True)
        self.both, self.norm, self.head = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embedding(tokens))
        query, key, value = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.both(x).split(8, 2))
        p = 0.2 if self.training else 0.0
        x = F.scaled_dot_product_attention(query, key, value, dropout_p=p).transpose(1, 2).flatten(2)
        x = 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
        return self.head(self.norm(x).mean(1))


def images(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(size)
    return torch.randn(size, 3, 8, 8, generator=draw), torch.randint(0, 3, (size,), generator=draw)


def texts(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(size)
    return torch.randint(0, 20, (size, 6), generator=draw), torch.randint(0, 3, (size,), generator=draw)


MODELS: dict[str, tuple[type[nn.Module], Any, list[Any]]] = {
    "mlp": (lambda: MLP(dropout=0.25), lambda size: mlp_batches(1, size)[0], ["batch", 8]),
    "convolutions": (Convolutions, images, ["batch", 3, 8, 8]),
    "texts": (Texts, texts, ["batch", 6]),
}


def trainer(model: nn.Module, shape: list[Any], **utils: Any) -> ORTTrainer:
    desc = {"inputs": [("x", shape), ("label", ["batch"])], "outputs": [("loss", [], True), ("out", ["batch", 3])]}
    desc["inputs"][0] = ("tokens" if isinstance(model, Texts) else "x", shape)
    options = ORTTrainerOptions({"utils": utils, "batch": {"gradient_accumulation_steps": 2}})
    return ORTTrainer(model, desc, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=options)


def calls_pytorch(trained: ORTTrainer) -> bool:
    return bool(trained.session.graphs(True)[0].programs)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "numbers"), [("mlp", "fast"), ("mlp", "pytorch"), ("convolutions", "pytorch"), ("texts", "fast")]
)
def test_both_kinds_of_kernels_give_the_same_numbers(name: str, numbers: str) -> None:
    """The masks too, because they follow from the seed. Batch sizes differ and gradients are accumulated."""
    make, batch, shape = MODELS[name]
    model = make()
    trained = []
    for kernels in ("pytorch", "onnxruntime"):
        torch.manual_seed(3)
        ours = trainer(copy.deepcopy(model), shape, kernels=kernels, random_numbers=numbers)
        losses = [ours.train_step(*batch(size))[0] for size in (4, 4, 6, 3, 1, 2)]
        trained.append((ours, losses))
    assert [repr(ours) for ours, _ in trained] == [
        f"<ORTTrainer of {type(model).__name__}: 6 steps, on {whose} kernels>"
        for whose in ("PyTorch's", "ONNX Runtime's")
    ]
    for ours, theirs in zip(trained[0][1], trained[1][1], strict=True):
        assert_close(ours, theirs, 1e-5, "loss")
    states = [ours.state_dict(pytorch_format=True) for ours, _ in trained]
    for key, value in states[0].items():
        assert_close(value, states[1][key], 1e-5, key)
    assert_close(trained[0][0].eval_step(*batch(5))[1], trained[1][0].eval_step(*batch(5))[1], 1e-5, "evaluation")


@pytest.mark.parametrize(
    ("kernels", "error", "message"),
    [
        ("pytorch", IndexError, "Target 7 is out of bounds"),
        ("onnxruntime", RuntimeError, r"aten\.nll_loss\w*.default/.*often, an index .* that the model computes"),
    ],
)
def test_an_error_in_an_operator_is_raised_and_nothing_is_changed(
    kernels: str, error: type[Exception], message: str
) -> None:
    """The labels are computed, so the check of a batch can't find a wrong one."""
    model = MLP(dropout=0.5)
    options = ORTTrainerOptions({"utils": {"kernels": kernels}})
    ours, theirs = (
        ORTTrainer(copy.deepcopy(model), MLP_DESC, optim.SGDConfig(lr=0.1), of_computed_labels, options)
        for _ in range(2)
    )
    (x, y), later = mlp_batches(2)
    for one in (ours, theirs):
        torch.manual_seed(0)
        one.train_step(x, y)
    with pytest.raises(error, match=message):
        ours.train_step(x, torch.full_like(y, 7))
    assert torch.equal(ours.train_step(*later)[0], theirs.train_step(*later)[0]), "the masks too"


def of_computed_labels(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, labels.abs())


def test_gradient_modes_and_casts_of_the_caller_change_nothing() -> None:
    batches = mlp_batches(3)
    model = MLP()
    plain, within = (mlp_trainer({"utils": {"kernels": "pytorch"}}, model=copy.deepcopy(model)) for _ in range(2))
    expected = [plain.train_step(*batch)[0] for batch in batches]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = [within.train_step(*batch)[0] for batch in batches]
        assert torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
    assert torch.equal(torch.stack(expected), torch.stack(found))


class Doubled(MLP):
    """Returns one tensor twice, a view of it, and an input; the caller may change all of them."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, y, y.t(), x, y > 0


def test_outputs_are_the_callers_own() -> None:
    names = [("a", ["batch", 3]), ("b", ["batch", 3]), ("c", [3, "batch"]), ("d", ["batch", 8]), ("e", ["batch", 3])]
    desc = {"inputs": MLP_DESC["inputs"], "outputs": [("loss", [], True), *names]}
    ours = ORTTrainer(
        Doubled(),
        desc,
        optim.SGDConfig(lr=0.0),
        loss_fn=lambda outputs, label: F.cross_entropy(outputs[0], label),
        options=ORTTrainerOptions({"utils": {"kernels": "pytorch"}}),
    )
    x, label = mlp_batches(1)[0]
    before = x.clone()
    _, a, b, c, d, e = ours.train_step(x, label)
    assert torch.equal(a, b) and torch.equal(a, c.t()) and torch.equal(d, x) and torch.equal(e, a > 0)
    a.zero_(), d.zero_()
    assert b.any() and c.any() and torch.equal(x, before) and e.dtype == torch.bool


class Checkpointed(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "session": ({"session_options": onnxruntime.SessionOptions()}, "session_options requires"),
    "postprocess": ({"_internal_use": {"extra_postprocess": lambda model: None}}, "extra_postprocess requires"),
    "simplification": ({"_internal_use": {"enable_internal_postprocess": False}}, "enable_internal_postprocess False"),
}


@pytest.mark.parametrize("name", REASONS)
def test_where_pytorchs_kernels_can_not_be_had(name: str) -> None:
    options, reason = REASONS[name]
    assert not calls_pytorch(prepared(mlp_trainer(options)))
    wanted = {**options, "utils": {**options.get("utils", {}), "kernels": "pytorch"}}
    with pytest.raises(Exception, match=reason):
        prepared(mlp_trainer(wanted))


def prepared(ours: ORTTrainer) -> ORTTrainer:
    ours.train_step(*mlp_batches(1)[0])
    return ours


def test_compiled_loops_refuse_recomputation() -> None:
    with pytest.raises(ExportError, match="compiled loops decide by themselves what"):
        prepared(mlp_trainer({"utils": {"kernels": "compiled"}}, model=Checkpointed()))


def test_a_program_that_reads_nothing() -> None:
    """Computations without inputs take so long here that they form a program of their own."""

    def offset(y: torch.Tensor) -> torch.Tensor:
        return y + torch.full((3, 9_000_000), 0.5).amax()

    model = Between(offset)
    reference = Reference(model, lr=0.1)
    train_both(mlp_trainer(config=optim.SGDConfig(lr=0.1), model=model), reference, mlp_batches(3))


@pytest.mark.parametrize(
    ("device", "kernels", "message"),
    [
        (
            *("cuda", "onnxruntime"),
            "ONNX Runtime .* lacks CUDAExecutionProvider, and training runs on cuda.*: set it to 'auto', or install a "
            "build of ONNX Runtime for this device$",
        ),
        ("xpu", "compiled", "compiled loops run on CPUs and CUDA, and training runs on xpu.*: set it to 'auto'$"),
    ],
)
def test_kernels_that_a_gpu_lacks_are_refused(device: str, kernels: str, message: str) -> None:
    """As far as this can be tested without a GPU; PyTorch's kernels run there."""
    if has_cuda():
        pytest.skip("ONNX Runtime has kernels for the GPU")
    for name in (kernels, "pytorch", "auto"):
        options = ORTTrainerOptions({"device": {"id": device}, "utils": {"kernels": name}})
        source = ModelSource(MLP(), F.cross_entropy, optim.SGDConfig(), options)
        if name != kernels:
            source.builder(ModelDescription(MLP_DESC))
            continue
        with pytest.raises(ValueError, match=f"utils.kernels is '{kernels}', but {message}"):
            source.builder(ModelDescription(MLP_DESC))


class FlatAndBack(nn.Module):
    """A flattened size is the stride of a tensor, from which PyTorch reads it; one of them is a quotient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.conv, self.head = nn.Embedding(13, 8), nn.Conv1d(8, 8, 3, stride=2), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = (x.reshape(x.shape[0], -1).view(x.shape) ** 2 + 1).sqrt()
        y = self.conv(x.transpose(1, 2))
        return self.head((y.reshape(y.shape[0], -1).view(y.shape) ** 2 + 1).sqrt().mean(2))


def test_sizes_that_pytorch_reads_from_strides_are_translated() -> None:
    model = FlatAndBack()
    reference = Reference(model, lr=0.1)
    ours = ORTTrainer(
        model,
        {"inputs": [("ids", ["n", "t"]), ("label", ["n"])], "outputs": [("loss", [], True), ("logits", ["n", 3])]},
        optim.SGDConfig(lr=0.1),
        loss_fn=F.cross_entropy,
        options=ORTTrainerOptions({"utils": {"kernels": "onnxruntime", "grad_norm_clip": False}}),
    )
    sizes = ((4, 9), (3, 7), (1, 5))
    train_both(ours, reference, [(torch.randint(13, size), torch.randint(3, size[:1])) for size in sizes])
    assert len(ours.session.graphs(True)) == 1


def test_where_onnx_runtime_lacks_the_device_evaluation_runs_on_pytorchs_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a GPU for which ONNX Runtime has no provider; files are written for any device."""
    kinds = {ONNX_RUNTIME.name: [ONNX_RUNTIME]}  # for files
    monkeypatch.setattr(export, "_usable_kinds", lambda step, *_: kinds.get(step.kernels, [PROGRAMS]))
    model, (batch, *_) = MLP(dropout=0.5), mlp_batches(1)
    ours = mlp_trainer(model=model)
    ours.train_step(*batch)
    loss, logits = ours.eval_step(*batch)
    model.eval()
    assert_close(logits, model(batch[0]).detach(), 1e-5, "logits")
    assert_close(loss, F.cross_entropy(logits, batch[1]), 1e-5, "loss")
    assert torch.equal(ours.predict(batch[0]), logits), "the label is not needed"
    assert all(step.programs is not None for step in ours.loop.started().graphs(False))
    ours.save_as_onnx(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    written = session.run(["logits"], {"x": batch[0].numpy(), "label": batch[1].numpy()})[0]
    assert_close(torch.from_numpy(written), logits, 1e-5, "the file's logits")


def test_cuda_graphs_are_refused_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="utils.cuda_graphs is 'on', but training runs on cpu: set it to 'auto'"):
        mlp_trainer({"utils": {"cuda_graphs": "on"}, "device": {"id": "cpu"}})
