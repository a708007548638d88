"""What a trainer does on a GPU besides plain steps: precision, random numbers, graphs, files, other interfaces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTModule, ORTTrainer, optim
from ort_trainer.engine.programs.cuda_graphs import CapturedRun

from ..helpers import assert_close, assert_same_state, assert_same_training, mlp_batches
from .models import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Batches = list[tuple[torch.Tensor, ...]]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def model(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 3)).cuda()


def batches(count: int, size: int = 6) -> Batches:
    return [(x.cuda(), label.cuda()) for x, label in mlp_batches(count, size)]


def trainer_of(module: nn.Module, options: dict[str, Any] | None = None, config: Any = None) -> ORTTrainer:
    config = optim.AdamWConfig(lr=1e-2) if config is None else config
    return ORTTrainer(module, "auto", config, loss_fn=F.cross_entropy, options=options)


def same(module: nn.Module, steps: Batches, **settings: Any) -> ORTTrainer:
    settings = {"relative": 1e-4, "seed": 3, **settings}
    return assert_same_training(
        module, "auto", steps, optim.AdamWConfig(lr=1e-2), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        **settings,
    )  # fmt: skip


def captured(trainer: ORTTrainer) -> int:
    return sum(CapturedRun in plan.bindings for plan in trainer.loop.started()._plans.values())


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_dropout_draws_pytorchs_masks(graphs: str) -> None:
    options = {"utils": {"random_numbers": "pytorch_global", "cuda_graphs": graphs}}
    module, steps = model(0.3), batches(12)
    reference = copy.deepcopy(module)
    trainer = trainer_of(module, options)
    state = torch.cuda.get_rng_state()
    ours = [trainer.train_step(*batch)[0].item() for batch in steps]
    torch.cuda.set_rng_state(state)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for (x, label), loss in zip(steps, ours, strict=True):
        expected = F.cross_entropy(reference(x), label)
        assert loss == pytest.approx(expected.item(), rel=1e-4)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert captured(trainer) == (graphs == "on")


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_dropout_of_attention_draws_pytorchs_masks(name: str) -> None:
    module, _ = MODELS[name]()
    config = module.model.config
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, key):
            setattr(config, key, 0.1)
    module.model = type(module.model)(config)
    steps = [tuple(value.cuda() for value in batch) for batch in MODELS[name]()[1] * 4]
    reference = copy.deepcopy(module).cuda()
    trainer = ORTTrainer(
        module.cuda(), "auto", optim.SGDConfig(lr=0.02), options={"utils": {"random_numbers": "pytorch_global"}}
    )
    trainer.prepare(steps[0])
    state = torch.cuda.get_rng_state()
    ours = [trainer.train_step(*batch).item() for batch in steps]
    torch.cuda.set_rng_state(state)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.02)
    for batch, loss in zip(steps, ours, strict=True):
        expected = reference(*batch)
        assert loss == pytest.approx(expected.item(), rel=1e-4)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_accumulation_with_clipping() -> None:
    trainer = same(model(), batches(18), accumulation=3, clip=0.5, options={
        "batch": {"gradient_accumulation_steps": 3}, "utils": {"grad_norm_clip": True, "max_grad_norm": 0.5},
    })  # fmt: skip
    assert captured(trainer) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision(dtype: str) -> None:
    module, steps = model(), batches(20)
    reference = copy.deepcopy(module)
    trainer = trainer_of(module, {"mixed_precision": {"enabled": True, "dtype": dtype}}, optim.SGDConfig(lr=0.1))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
    for x, label in steps:
        loss = trainer.train_step(x, label)[0]
        with torch.autocast("cuda", getattr(torch, dtype)):
            expected = F.cross_entropy(reference(x), label)
        assert_close(loss, expected.detach(), 2e-3, "loss")
        scaler.scale(expected).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert_close(ours.detach(), theirs.detach(), 5e-3, "weight")


def test_each_size_has_a_graph() -> None:
    trainer = same(model(), [batches(1, size)[0] for size in (4, 6, 4, 6, 9) * 5])
    assert captured(trainer) == 3 and len(trainer.loop.started().graphs(True)) == 1


def test_replaced_weights_are_used() -> None:
    module, steps = model(), batches(14)
    reference = copy.deepcopy(module)
    trainer = trainer_of(module, config=optim.SGDConfig(lr=0.1))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number, (x, label) in enumerate(steps):
        if number == 7:
            for either in (module, reference):
                either[0].weight.data = either[0].weight.data * 0.5
        loss, expected = trainer.train_step(x, label)[0], F.cross_entropy(reference(x), label)
        assert_close(loss, expected.detach(), 1e-4, f"loss of step {number}")
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()


class Counting(nn.Module):
    """A number outside tensors changes in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(8, 3), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.factor *= 0.9
        return self.layer(x) * self.factor


def test_a_number_that_changes_is_not_kept_by_a_graph() -> None:
    same(Counting().cuda(), batches(10))


def test_what_reads_values_back_runs_without_a_graph() -> None:
    module, steps = MODELS["ctc"]()
    trainer = ORTTrainer(module, "auto", optim.SGDConfig(lr=0.1))
    for _ in range(3):
        for batch in steps:
            trainer.train_step(*batch)
    assert captured(trainer) == 0
    strict = ORTTrainer(MODELS["ctc"]()[0], "auto", optim.SGDConfig(lr=0.1), options={"utils": {"cuda_graphs": "on"}})
    with pytest.raises(RuntimeError, match="utils.cuda_graphs is 'on', but the step can't be a CUDA graph"):
        for _ in range(3):
            strict.train_step(*steps[0])


def test_sizes_that_depend_on_values() -> None:
    def loss(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return logits[label > 0].pow(2).mean() + F.cross_entropy(logits, label)

    trainer = same(model(), batches(8), loss_fn=loss)
    assert captured(trainer) == 0


def test_a_model_and_batches_on_the_cpu_move_to_the_gpu() -> None:
    module = model().cpu()
    trainer = trainer_of(module)
    for x, label in mlp_batches(5):
        loss = trainer.train_step(x.pin_memory(), label)[0]
    assert {p.device.type for p in module.parameters()} == {"cuda"} and loss.device.type == "cuda"
    assert trainer.options.device.id == "cuda:0"
    with pytest.raises(IndexError, match="has the value 7"):
        trainer.train_step(x, torch.full_like(label, 7))


def test_a_checkpoint_goes_to_the_cpu_and_back(tmp_path: Path) -> None:
    steps = batches(8)
    first = trainer_of(model(0.2))
    for batch in steps[:4]:
        first.train_step(*batch)
    first.save_checkpoint(tmp_path / "gpu")
    second = trainer_of(model(0.2))
    second.load_checkpoint(tmp_path / "gpu")
    for batch in steps[4:]:
        assert torch.equal(first.train_step(*batch)[0], second.train_step(*batch)[0])
    on_cpu = trainer_of(model(0.2).cpu(), {"device": {"id": "cpu"}})
    on_cpu.load_checkpoint(tmp_path / "gpu")
    on_cpu.save_checkpoint(tmp_path / "cpu")
    third = trainer_of(model(0.2))
    third.load_checkpoint(tmp_path / "cpu")
    saved = trainer_of(model(0.2))
    saved.load_checkpoint(tmp_path / "gpu")
    ours, theirs = third.state_dict(), saved.state_dict()
    for state in (ours, theirs):
        del state["random"]  # another device's numbers can't be continued
    assert_same_state(ours, theirs)


def test_evaluation_and_files(tmp_path: Path) -> None:
    module, steps = model(0.5), batches(6)
    trainer = trainer_of(module)
    trainer.train_step(*steps[0])
    loss, prediction = trainer.eval_step(*steps[1])
    module.eval()
    assert_close(prediction, module(steps[1][0]).detach(), 1e-5, "prediction")
    assert_close(trainer.predict(steps[1][0]), prediction, 1e-5, "prediction without a label")
    assert_close(loss, F.cross_entropy(prediction, steps[1][1]), 1e-5, "loss")
    trainer.save_as_onnx(tmp_path / "model.onnx")
    trainer.export_for_inference(tmp_path / "inference.onnx")
    trainer.export_artifacts(tmp_path / "artifacts")


def test_forward_backward_with_an_own_loop() -> None:
    module, steps = model(), batches(6)
    reference = copy.deepcopy(module)
    trainer = trainer_of(module)
    for x, label in steps:
        trainer.forward_backward(x, label)
        F.cross_entropy(reference(x), label).backward()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, 1e-4, "gradient")


@pytest.mark.parametrize("config", [optim.LambConfig(lr=1e-3), optim.LionConfig(lr=1e-4), optim.AdamConfig(lr=1e-3)])
def test_optimizers_run(config: Any) -> None:
    module, steps = model(), batches(6)
    before = module[0].weight.detach().clone()
    trainer = trainer_of(module, config=config)
    losses = [trainer.train_step(*batch)[0] for batch in steps]
    assert torch.stack(losses).isfinite().all() and not torch.equal(module[0].weight, before)


def test_an_optimizer_of_pytorch() -> None:
    module, steps = model(), batches(8)
    reference = copy.deepcopy(module)
    trainer = trainer_of(module, config=torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True))
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    for x, label in steps:
        loss, expected = trainer.train_step(x, label)[0], F.cross_entropy(reference(x), label)
        assert_close(loss, expected.detach(), 1e-4, "loss")
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("wrap", [ORTModule, lambda m: torch.compile(m, backend=_backend())], ids=["module", "compile"])
def test_other_interfaces(wrap: Callable[[nn.Module], nn.Module]) -> None:
    module, steps = model(), batches(4)
    reference = copy.deepcopy(module)
    wrapped = wrap(module)
    for x, label in steps:
        F.cross_entropy(wrapped(x), label).backward()
        F.cross_entropy(reference(x), label).backward()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, 1e-4, "gradient")


def _backend() -> Any:
    from ort_trainer.export.dynamo import ort_trainer

    return ort_trainer


def test_recomputation_draws_each_mask_once() -> None:
    module, steps = MODELS["gpt2"]()
    options = {"graph_transformer": {"transformer_layer_recompute": True}}
    trainer = ORTTrainer(copy.deepcopy(module).cuda(), "auto", optim.SGDConfig(lr=0.02), options=options)
    plain = ORTTrainer(module.cuda(), "auto", optim.SGDConfig(lr=0.02))
    for batch in steps * 3:
        assert_close(trainer.train_step(*batch), plain.train_step(*batch), 1e-4, "loss")


def test_a_run_of_fit() -> None:
    trainer = trainer_of(model())
    state = trainer.fit(mlp_batches(4), epochs=2)
    assert state.steps == 8 and next(iter(trainer.loop.source.parameters.values())).device.type == "cuda"
