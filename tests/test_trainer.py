"""The interface of ORTTrainer: calls, return values, counters, and every error before anything has changed."""

from __future__ import annotations

import copy
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ExportError, ORTModule, ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.engine.ort import maximum_opset

from .helpers import MLP, MLP_DESC, mlp_batches, mlp_trainer

pytestmark = pytest.mark.engine

X, Y = mlp_batches(1)[0]


@pytest.fixture
def trainer() -> ORTTrainer:
    return mlp_trainer()


def test_return_values_counters_and_phase() -> None:
    trainer = mlp_trainer({"batch": {"gradient_accumulation_steps": 3}})
    kept = []
    for number in range(1, 8):
        outputs = trainer.train_step(X, Y)
        assert isinstance(outputs, list) and [o.shape for o in outputs] == [(), (5, 3)]
        assert not outputs[0].requires_grad
        kept.append(outputs[0])
        assert trainer.train_step_info.step == number
        assert trainer.train_step_info.optimization_step == number // 3
        assert trainer.train_step_info.all_finite is True
    values = [loss.item() for loss in kept]
    assert len(set(values)) == 3, "weights change only at the end of a window, and returned tensors are not reused"
    before = trainer.train_step_info.step
    assert trainer.eval_step(X, Y)[0].item() == trainer.eval_step({"label": Y, "x": X})[0].item()
    assert trainer.train_step_info.step == before


def test_report() -> None:
    trainer = mlp_trainer()
    assert "none yet" in str(trainer.report()) and not trainer.report().graphs
    for batch in (*mlp_batches(3), (X[:2], Y[:2])):
        trainer.train_step(*batch)
    trainer.eval_step(X, Y)
    report = trainer.report()
    assert [(graph.name, graph.runs) for graph in report.graphs] == [("training", 4), ("evaluation", 1)]
    assert all(graph.seconds > 0 for graph in report.graphs) and report.verified == 4
    size = 4 * sum(parameter.numel() for parameter in MLP().parameters())
    assert report.memory["weights"] == size and report.memory["gradients"] >= size


def test_ways_to_call(trainer: ORTTrainer) -> None:
    trainer.prepare((X, Y))
    assert trainer.train_step_info.step == 0
    expected = trainer.eval_step(X, Y)[0]
    for args, kwargs in (
        ((), {"label": Y, "x": X}),
        ((X,), {"label": Y}),
        (([X, Y],), {}),
        (({"x": X, "label": Y},), {}),
    ):
        assert torch.equal(trainer.eval_step(*args, **kwargs)[0], expected)
    trainer.train_step({"x": X, "label": Y})
    assert trainer.train_step_info.step == 1


def test_a_single_output_comes_bare() -> None:
    desc = {**MLP_DESC, "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(MLP(), desc, optim.AdamConfig(), loss_fn=F.cross_entropy)
    assert isinstance(trainer.train_step(X, Y), torch.Tensor)
    assert trainer.eval_step(X, Y).shape == ()
    with pytest.raises(ValueError, match="describes only the loss"):
        trainer.export_for_inference("unused.onnx")


def test_fetches(trainer: ORTTrainer) -> None:
    trainer.train_step_info.fetches = ["logits", "loss"]
    assert [o.shape for o in trainer.train_step(X, Y)] == [(5, 3), ()]
    assert [o.shape for o in trainer.eval_step(X, Y)] == [(5, 3), ()]
    trainer.train_step_info.fetches = ["logits"]
    assert trainer.train_step(X, Y).shape == (5, 3)
    assert trainer.train_step_info.optimization_step == 2
    full = trainer.eval_step(X, Y)
    assert torch.equal(trainer.eval_step(X), full), "the label is not needed for the prediction"
    trainer.train_step_info.fetches = ["loss"]
    with pytest.raises(TypeError, match=r"inputs \['label'\] are missing: outputs \['loss'\] need them"):
        trainer.eval_step(X)
    for wrong in (["other"], ["loss", "loss"]):
        trainer.train_step_info.fetches = wrong
        with pytest.raises(RuntimeError, match="The specified fetches list contains invalid output names"):
            trainer.train_step(X, Y)
    assert trainer.train_step_info.step == 2


BAD_BATCHES = [
    ((X,), TypeError, r"inputs \['label'\] are missing"),
    ((X, Y, Y), TypeError, "3 inputs were given"),
    ((X[:, :5], Y), ValueError, "input 'x' has size 5 in dimension 1"),
    ((X[0], Y), ValueError, "input 'x' has 1 dimensions"),
    ((X[:2], Y), ValueError, "Mismatch in dynamic shape batch"),
    ((X.double(), Y), TypeError, "input 'x' has dtype torch.float64, but training began with torch.float32"),
    ((X, Y.to("meta")), TypeError, "on the device 'meta', which holds no values"),
    (("text", Y), TypeError, "must be a torch.Tensor or a numpy array"),
]


def test_a_bad_batch_changes_nothing(trainer: ORTTrainer) -> None:
    trainer.train_step(X, Y)
    before = repr(trainer.state_dict())
    for batch, error, message in BAD_BATCHES:
        for step in (trainer.train_step, trainer.eval_step):
            with pytest.raises(error, match=message):
                step(*batch)
    with pytest.raises(TypeError, match=r"unknown inputs \['labels'\]"):
        trainer.train_step(X, labels=Y)
    assert repr(trainer.state_dict()) == before


def test_a_run_that_fails_changes_nothing() -> None:
    trainer = mlp_trainer(model=MLP(dropout=0.5))
    trainer.train_step(X, Y)
    before = repr(trainer.state_dict())
    with pytest.raises(Exception, match=r"indices|out of bounds|index"):
        trainer.train_step(X, Y + 100)  # a class that does not exist
    assert repr(trainer.state_dict()) == before
    trainer.train_step(X, Y)
    assert trainer.train_step_info.step == 2


class OnlyWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.rand(6, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self) -> torch.Tensor:
        return self.scores


@pytest.mark.parametrize("described", [False, True])
def test_a_model_whose_only_input_is_the_label(described: bool) -> None:
    description = {"inputs": [("label", [6])], "outputs": [("loss", [], True), ("scores", [6, 3])]}
    model, label = OnlyWeights(), torch.tensor([0, 1, 2, 2, 1, 0])
    scores = model.scores.detach().clone().requires_grad_()
    trainer = ORTTrainer(
        model,
        description if described else "auto",
        optim.SGDConfig(lr=0.5),
        loss_fn=F.cross_entropy,
        options=ORTTrainerOptions({"utils": {"grad_norm_clip": False}}),
    )
    for _ in range(2):
        expected = F.cross_entropy(scores, label)
        torch.testing.assert_close(trainer.train_step(label)[0], expected.detach())
        scores.data -= 0.5 * torch.autograd.grad(expected, scores)[0]


class NoForwardName(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": None}, TypeError, "an onnx.ModelProto or the path of an ONNX file, but None was"),
        ({"model": object()}, TypeError, "an onnx.ModelProto or the path of an ONNX file, but <object object"),
        ({"model_desc": 3}, TypeError, "model_desc must be a dict"),
        (
            {"optim_config": {}},
            TypeError,
            r"optim_config must be a config of ort_trainer.optim \(AdamConfig, .*SGDConfig\)",
        ),
        ({"model": MLP}, TypeError, r"but the class MLP was given: pass an object, MLP\(...\)"),
        ({"model": ORTModule(MLP())}, TypeError, "model is an ORTModule, .*: use the module inside, model.module"),
        ({"optim_config": torch.optim.Adam}, TypeError, r"but the class Adam was given: pass an object, Adam\(...\)"),
        ({"loss_fn": 3}, TypeError, "loss_fn must be a function"),
        ({"loss_fn": nn.CrossEntropyLoss}, TypeError, r"the class CrossEntropyLoss was given: pass an object"),
        ({"loss_fn": lambda p: p}, TypeError, r"loss_fn must take two arguments, \(prediction, label\)"),
        ({"options": 3}, TypeError, "options must be ORTTrainerOptions, a dict"),
        (
            {"model": NoForwardName()},
            ValueError,
            r"inputs \['x'\], but forward\(\) of NoForwardName takes \['a', 'b'\]",
        ),
        (
            {"model_desc": {**MLP_DESC, "inputs": [("label", ["b"])]}},
            ValueError,
            "with a loss_fn the last input is its label",
        ),
        (
            {"model_desc": {**MLP_DESC, "outputs": [("logits", ["b", 3]), ("loss", [], True)]}},
            ValueError,
            "with a loss_fn the first output must be the loss",
        ),
        (
            {"model": NoForwardName(), "model_desc": {**MLP_DESC, "inputs": [("a", ["n"]), ("y", [])]}},
            ValueError,
            r"requires \['b'\], which the inputs of model_desc lack",
        ),
        (
            {"options": ORTTrainerOptions({"utils": {"frozen_weights": ["fc9.weight"]}})},
            ValueError,
            r"unknown parameters \['fc9.weight'\] in utils.frozen_weights: .*fc1.bias",
        ),
        (
            {"optim_config": optim.AdamConfig([{"params": ["fc9"], "alpha": 0.5}])},
            ValueError,
            r"unknown parameters \['fc9'\] in a parameter group",
        ),
        (
            {"options": ORTTrainerOptions({"device": {"id": "cuda"}})},
            ValueError,
            "device.id 'cuda' was asked for, but PyTorch .* sees no CUDA device: set device.id to 'cpu'",
        ),
    ],
)
def test_constructor_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    if "cuda" in message and torch.cuda.is_available():
        pytest.skip("CUDA is available")
    defaults = {"model": MLP(), "model_desc": MLP_DESC, "optim_config": optim.AdamConfig(), "loss_fn": F.cross_entropy}
    with pytest.raises(error, match=message):
        ORTTrainer(**{**defaults, **arguments})


class Cased(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x)
        if self.case == "control flow" and float(y.sum()) > 0:  # the branch
            return y * 2
        if self.case == "inside PyTorch":
            return y + F.one_hot(x.argmax(1))[:, :1]  # the call
        if self.case == "gradient":
            return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0].sum()
        if self.case == "function's gradient":
            return y + torch.func.grad(lambda value: self.fc(value).sum())(x).sum()
        if self.case == "numpy":
            return y + int(y.detach().numpy().argmax())
        if self.case == "string":
            return {"a": y, "b": "text"}
        if self.case == "untranslated":
            return y + torch.linalg.pinv(y.T @ y).sum()  # the line of the error
        if self.case == "constant":
            return y.detach()
        if self.case == "in place":
            with torch.no_grad():
                self.fc.weight.mul_(0.5)
        return y


@pytest.mark.parametrize(
    ("case", "desc", "loss_fn", "message"),
    [
        (
            "control flow",
            {},
            F.cross_entropy,
            "could not capture Cased.*depends on the values.*test_trainer.py.*the branch.*For an 'if'",
        ),
        (
            "inside PyTorch",
            {},
            F.cross_entropy,
            "depends on the values.*test_trainer.py.*the call.*which calls.*in one_hot.*This function of PyTorch",
        ),
        *(
            (
                case,
                {},
                F.cross_entropy,
                r"Cased can't be captured: it differentiates in its own.*docs/usage.md#a-penalty-on-gradients\)",
            )
            for case in ("gradient", "function's gradient")
        ),
        ("numpy", {}, F.cross_entropy, r"reads the values of a tensor with .numpy\(\).*or before the step, in PyTorch"),
        (
            "string",
            {"outputs": [("loss", [], True), ("a", ["b", 3]), ("c", [])]},
            lambda p, y: F.cross_entropy(p["a"], y),
            r"must return tensors.*'b' is a str: 'text'.*test_trainer.py.*in forward",
        ),
        (
            "untranslated",
            {},
            F.cross_entropy,
            r"aten\.\S+ has no ONNX translation.*test_trainer.py.*the line of the error",
        ),
        ("constant", {}, F.cross_entropy, "the loss depends on no trainable parameter.*test_trainer.py"),
        ("in place", {}, F.cross_entropy, r"forward\(\) changes parameter 'fc.weight' in place"),
        (
            "",
            {},
            lambda p, y: F.cross_entropy(p, y, reduction="none"),
            r"the loss must be a scalar, but its shape is \[",
        ),
        ("", {}, lambda p, y: (p.argmax(1) == y).sum(), "the loss must be a floating-point tensor"),
        ("", {}, lambda p, y: 3.0, "loss_fn must return a tensor, but it returned a float"),
        (
            "",
            {"outputs": [("loss", [], True), ("a", ["b", 3]), ("c", [])]},
            F.cross_entropy,
            "3 outputs.*return only 2 tensors",
        ),
        (
            "",
            {"outputs": [("loss", [], True), ("a", ["b", 4])]},
            F.cross_entropy,
            "output 'a' has size 3 in dimension 1, but model_desc says 4",
        ),
        ("", {"outputs": [("loss", [], True), ("a", ["b"])]}, F.cross_entropy, "output 'a' has 2 dimensions"),
    ],
)
@pytest.mark.options(kernels="onnxruntime")
def test_what_can_not_be_exported(case: str, desc: dict[str, Any], loss_fn: Any, message: str) -> None:
    model = Cased(case).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = ORTTrainer(model, {**MLP_DESC, **desc}, optim.AdamConfig(), loss_fn=loss_fn)
    with pytest.raises(ExportError, match=f"(?s){message}"):
        trainer.train_step(X, Y)
    assert trainer.session is None and trainer.train_step_info.step == 0
    assert not model.training and all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_a_graph_would_lose_is_refused() -> None:
    model = MLP()
    weight = model.fc1.weight
    trainer = ORTTrainer(
        model, MLP_DESC, optim.SGDConfig(), loss_fn=lambda p, y: F.cross_entropy(p, y) + weight.square().sum()
    )
    with pytest.raises(ExportError, match="uses parameter 'fc1.weight' as a Python variable"):
        trainer.train_step(X, Y)

    model = MLP()
    model.fc1.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(ExportError, match="parameter 'fc1.weight' has a backward hook"):
        mlp_trainer(model=model).train_step(X, Y)
    model = MLP()
    model.fc1.register_full_backward_hook(lambda *_: None)
    with pytest.raises(ExportError, match="module 'fc1' has a backward hook"):
        mlp_trainer(model=model).train_step(X, Y)

    class LearnedLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(logits * self.temperature, label)

    with pytest.raises(ValueError, match=r"loss_fn has its own trainable parameters, \['temperature'\]"):
        ORTTrainer(MLP(), MLP_DESC, optim.SGDConfig(), loss_fn=LearnedLoss())


def test_nothing_to_train() -> None:
    model = MLP().requires_grad_(False)
    trainer = mlp_trainer(model=model)
    with pytest.raises(RuntimeError, match="MLP has no parameter to train.*eval_step still works"):
        trainer.train_step(X, Y)
    torch.testing.assert_close(trainer.eval_step(X, Y)[1], model.eval()(X))


def test_a_model_without_parameters_evaluates() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    trainer = ORTTrainer(Mean(), {"inputs": [("x", ["n"])], "outputs": [("loss", [], True)]}, optim.SGDConfig())
    assert trainer.eval_step(torch.ones(3)).item() == 1.0
    with pytest.raises(RuntimeError, match="Mean has no parameter to train"):
        trainer.train_step(torch.ones(3))


def test_integer_parameters_are_left_alone() -> None:
    class Offset(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.arange(8), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.offset)

    model = Offset()
    trainer = mlp_trainer(model=model)
    expected = F.cross_entropy(model(X), Y).detach()
    loss, _ = trainer.train_step(X, Y)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(trainer.state_dict(pytorch_format=True)["offset"], torch.arange(8))


def test_memory_limit_is_for_cuda() -> None:
    trainer = mlp_trainer({"device": {"id": "cpu", "mem_limit": 1 << 30}})
    with pytest.raises(ValueError, match="device.mem_limit 1073741824 was set, but it limits CUDA memory only"):
        trainer.train_step(X, Y)


def test_session_and_provider_options() -> None:
    own = onnxruntime.SessionOptions()
    own.intra_op_num_threads = 1
    trainer = mlp_trainer({"session_options": own, "provider_options": {"CPUExecutionProvider": {}}})
    trainer.train_step(X, Y)
    assert own.intra_op_num_threads == 1 and not own.use_deterministic_compute
    with pytest.raises(
        ValueError, match="session_options are used as they are and have use_deterministic_compute = False"
    ):
        mlp_trainer({"session_options": own, "debug": {"deterministic_compute": True}}).train_step(X, Y)
    with pytest.raises(
        ValueError, match=r"provider_options names \['Other'\], but the installed ONNX Runtime has only"
    ):
        mlp_trainer({"provider_options": {"Other": {}}}).train_step(X, Y)
    mlp_trainer({"debug": {"deterministic_compute": True}}).train_step(X, Y)


class Counting(MLP):
    """Counts its calls, including evaluation, in two ways."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("other", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.other = self.other + 1
        return super().forward(x)


def test_check_model_export() -> None:
    model = Counting()
    trainer = mlp_trainer({"debug": {"check_model_export": True}}, model=model)
    trainer.prepare((X, Y))
    assert (model.steps, model.other) == (0, 0), "the user's model does not change"  # type: ignore[comparison-overlap]
    trainer.train_step(X, Y)
    assert trainer.train_step_info.step == 1
    assert trainer.state_dict(pytorch_format=True)["steps"] == 1

    # A trainer with its own weights, which are a checkpoint's.
    resumed = mlp_trainer({"debug": {"check_model_export": True}, "utils": {"share_weights": False}})
    resumed.load_state_dict(trainer.state_dict(), strict=False)
    resumed.train_step(X, Y)

    def spoil(model: onnx.ModelProto) -> onnx.ModelProto:
        for node in model.graph.node:
            if node.op_type == "Tanh":
                node.op_type = "Sigmoid"
        return model

    trainer = mlp_trainer({"debug": {"check_model_export": True}, "_internal_use": {"extra_postprocess": spoil}})
    with pytest.raises(RuntimeError, match="output 'loss' of the exported graph differs from PyTorch's by up to"):
        trainer.train_step(X, Y)
    assert trainer.session is None


def test_check_model_export_of_a_transformer_in_mixed_precision() -> None:
    """The fast path of PyTorch's layer does not see autocast while something watches its operators."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 4, dropout=0.0, batch_first=True))
    options = {"debug": {"check_model_export": True}, "mixed_precision": {"enabled": True, "dtype": "bfloat16"}}
    loss_fn = nn.MSELoss()
    trainer = ORTTrainer(layer, "auto", optim.SGDConfig(), loss_fn=loss_fn, options=ORTTrainerOptions(options))
    trainer.prepare((X[:, None], X[:, None]))
    assert torch.backends.mha.get_fastpath_enabled()


def test_extra_postprocess() -> None:
    seen = []

    def look(model: onnx.ModelProto) -> None:
        seen.append([node.op_type for node in model.graph.node])

    trainer = mlp_trainer({"_internal_use": {"extra_postprocess": look}})
    trainer.train_step(X, Y)
    trainer.eval_step(X, Y)
    assert len(seen) == 2 and all("Tanh" in ops for ops in seen)

    def rename(model: onnx.ModelProto) -> onnx.ModelProto:
        model.graph.input[0].name = "other"
        return model

    with pytest.raises(ValueError, match="extra_postprocess must keep the inputs of the model"):
        mlp_trainer({"_internal_use": {"extra_postprocess": rename}}).train_step(X, Y)
    with pytest.raises(TypeError, match="extra_postprocess must return an onnx.ModelProto or None"):
        mlp_trainer({"_internal_use": {"extra_postprocess": lambda model: 3}}).train_step(X, Y)


def test_opset() -> None:
    model = MLP()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    opset = {"onnx_opset_version": maximum_opset()}
    options = {"_internal_use": opset, "utils": {"grad_norm_clip": False, "kernels": "onnxruntime"}}
    trainer = mlp_trainer(options, optim.SGDConfig(lr=0.1), model)
    for _ in range(3):
        expected = F.cross_entropy(reference(X), Y)
        torch.testing.assert_close(trainer.train_step(X, Y)[0], expected.detach())
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert trainer.session.graphs(True)[0].model.opset_imports[""] == maximum_opset()
    if maximum_opset() < 23:
        with pytest.raises(
            ValueError, match="onnx_opset_version is 23, but the installed ONNX Runtime and ONNX support at most"
        ):
            mlp_trainer({"_internal_use": {"onnx_opset_version": 23}})


def test_too_many_sizes_of_a_fixed_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([self.fc(row) for row in x]).mean(0, keepdim=True)

    monkeypatch.setattr("ort_trainer.train.step_graphs._MAXIMUM_GRAPHS", 2)
    desc = {"inputs": [("x", ["rows", 8]), ("y", [1])], "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(Flat(), desc, optim.SGDConfig(), loss_fn=F.cross_entropy)
    for rows in (2, 1, 2):
        trainer.train_step(torch.randn(rows, 8), torch.tensor([1]))
    assert [g.fixed for g in trainer.session.graphs(True)] == [{"rows": 2}, {"rows": 1}]
    with pytest.raises(
        RuntimeError, match=r"the model fixes dimensions \(\['rows'\]\) and has been exported for 2 sizes"
    ):
        trainer.train_step(torch.randn(3, 8), torch.tensor([1]))
    assert trainer.train_step_info.step == 3


@pytest.mark.parametrize("training", [True, False])
def test_without_internal_postprocess_the_graph_is_larger_and_computes_the_same(training: bool) -> None:
    sizes, results = [], []
    model = Block()
    for enabled in (True, False):
        options = {
            "_internal_use": {"enable_internal_postprocess": enabled},
            "utils": {"grad_norm_clip": False, "kernels": "onnxruntime"},
        }
        trainer = mlp_trainer(options, optim.SGDConfig(lr=0.1), copy.deepcopy(model))
        step = trainer.train_step if training else trainer.eval_step
        results.append([step(X, Y)[1] for _ in range(3)])
        sizes.append(len(trainer.session.graphs(training)[0].model.graph))
    assert sizes[0] < sizes[1]
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    """Large enough that the exporter leaves something to simplify: of the choice of rows, an idle transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.stack((x, -x), 1)[torch.arange(len(x)), (x[:, 0] > 0).long()]
        hidden = F.gelu(self.norm(torch.sigmoid(self.fc(chosen))))[:, None]
        return self.attention(hidden, hidden, hidden)[0][:, 0, :3]


def test_contrib_ops_are_refused_where_they_are_not_wanted() -> None:
    def fuse(model):
        (node,) = [n for n in model.graph.node if n.op_type == "Tanh"][:1]
        node.op_type, node.domain = "Gelu", "com.microsoft"
        model.opset_import.add(domain="com.microsoft", version=1)

    x, y = mlp_batches(1)[0]
    trainer = mlp_trainer({"_internal_use": {"extra_postprocess": fuse}})
    wanted = trainer.eval_step(x, y)[0]
    refused = mlp_trainer({"_internal_use": {"extra_postprocess": fuse, "enable_onnx_contrib_ops": False}})
    with pytest.raises(
        ValueError, match=r"enable_onnx_contrib_ops is False, but the graph has \['com.microsoft::Gelu'\]"
    ):
        refused.eval_step(x, y)
    assert refused.session is None
    plain = mlp_trainer({"_internal_use": {"enable_onnx_contrib_ops": False}})
    assert not torch.equal(plain.eval_step(x, y)[0], wanted)
    plain.train_step(x, y)  # on PyTorch's kernels, which have no such operators
