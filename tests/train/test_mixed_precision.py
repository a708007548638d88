"""fp16: numbers, overflow, scale growth, accumulation and state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, amp, optim
from ort_trainer.train.precision import fast_dtype

from ..fidelity.layer_cases import Apply
from ..helpers import MLP, MLP_DESC, Reference, assert_close, mlp_batches, mlp_trainer
from ..zoo import Between

pytestmark = pytest.mark.engine


def fp16(scaler: amp.LossScaler | None = None, **options: Any) -> dict[str, Any]:
    return {"mixed_precision": {"enabled": True, "dtype": "float16", "loss_scaler": scaler}, **options}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_numbers_are_those_of_autocast(dtype: torch.dtype) -> None:
    model, is_half = MLP(), dtype == torch.float16
    reference = Reference(model, torch.optim.AdamW, dtype=dtype, lr=1e-2, weight_decay=0.0)
    trainer = mlp_trainer((fp16 if is_half else bf16)(utils={"grad_norm_clip": False}), model=model)
    assert (trainer.loss_scaler is not None) == is_half
    assert trainer.options.mixed_precision.dtype == str(dtype).removeprefix("torch.")
    for x, y in mlp_batches(20):
        loss, logits = trainer.train_step(x, y)
        expected = reference.backward(x, y, scale=1024 if is_half else 1)
        reference.update(divisor=1024 if is_half else 1)
        assert loss.dtype == torch.float32 and logits.dtype == reference.outputs.dtype == dtype
        assert_close(logits, reference.outputs.detach(), 1e-2, "logits")
        assert_close(loss, expected, 5e-3 if is_half else 1e-3, "loss")
    assert not torch.equal(reference.outputs.float(), reference.model(x)), "PyTorch did compute in this dtype"
    for name, value in trainer.state_dict(pytorch_format=True).items():
        assert value.dtype == torch.float32
        assert_close(value, reference.model.state_dict()[name], 2e-2 if is_half else 1e-3, name)
    state = trainer.state_dict()
    assert state["trainer_options"]["mixed_precision"] is True and ("loss_scaler" in state) == is_half


class _Turned(torch.autograd.Function):
    """Returns its input; its backward pass is a product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient @ torch.full((3, 3), 0.1)


class _PartlyInFp32(MLP):
    """Computes its last layer, of small values, in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.fc1(x))
        with torch.autocast("cpu", enabled=False):
            return F.linear(_Turned.apply(h.float()[:, :3]) * 1e-3, self.fc2.weight[:, :3], self.fc2.bias)


def _squares(prediction: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (prediction - label[:, None] * 3).square().sum()


def _backward_of_module(model: MLP, module: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = _squares(module(x), y)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("way", ["auto", "onnxruntime", "module", "compile"])
def test_the_backward_pass_is_outside_of_autocast(way: str) -> None:
    """As PyTorch's: what is computed in fp32 forward has a gradient in fp32, and so has a product in a gradient."""
    model, (x, y) = _PartlyInFp32(), mlp_batches(1)[0]
    reference = copy.deepcopy(model)
    expected = _backward_of_module(reference, reference, x, y)
    if way == "module":
        gradients = _backward_of_module(model, ORTModule(model), x, y)
    elif way == "compile":
        gradients = _backward_of_module(model, torch.compile(model, backend="ort_trainer"), x, y)
    else:
        options = {"mixed_precision": {"enabled": True, "dtype": "bfloat16"}, "utils": {"kernels": way}}
        trainer = ORTTrainer(model, "auto", optim.SGDConfig(), loss_fn=_squares, options=options)
        trainer.forward_backward(x, y)
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in expected.items():  # the first layer's product itself is in bfloat16
        assert_close(gradients[name], gradient, 1e-5 if name.startswith("fc2") else 1e-2, name)


def test_gradients_in_fp32_do_not_overflow() -> None:
    trainer = ORTTrainer(_PartlyInFp32(), "auto", optim.SGDConfig(lr=1e-4), loss_fn=_squares, options=fp16())
    scale = trainer.loss_scaler.loss_scale
    trainer.train_step(*mlp_batches(1)[0])
    assert trainer.train_step_info.all_finite and trainer.loss_scaler.loss_scale == scale


def test_default_scaler_and_one_of_the_users_own() -> None:
    assert isinstance(mlp_trainer(fp16()).loss_scaler, amp.DynamicLossScaler)

    class Shrinking(amp.LossScaler):
        def update(self, train_step_info):
            self.loss_scale *= 0.9

    trainer = mlp_trainer(fp16(Shrinking(1000.0)))
    for x, y in mlp_batches(3):
        trainer.train_step(x, y)
    assert trainer.loss_scaler.loss_scale == pytest.approx(1000 * 0.9**3)


def test_scalers_that_can_not_work_are_told_at_once() -> None:
    class Forgetful(amp.LossScaler):
        def __init__(self) -> None:
            pass

        def update(self, train_step_info):
            return 1.0

    with pytest.raises(TypeError, match=r"Forgetful has no scale yet: call super\(\).__init__\(loss_scale\)"):
        mlp_trainer(fp16(Forgetful()))


def test_what_a_scaler_of_the_users_own_gets_to_see_and_keep(tmp_path: Any) -> None:
    class Counting(amp.LossScaler):
        """Keeps its own state, sees every update, and is reset by the user."""

        def __init__(self) -> None:
            super().__init__(4.0)
            self.seen: list[tuple[int, int, bool]] = []

        def update(self, train_step_info):
            info = train_step_info
            self.seen.append((info.step, info.optimization_step, info.all_finite))
            return self.loss_scale * 2

        def state_dict(self):
            return {**super().state_dict(), "seen": self.seen}

        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            self.seen = [tuple(entry) for entry in state_dict["seen"]]

    own = Counting()
    trainer = mlp_trainer(fp16(own, batch={"gradient_accumulation_steps": 2}))
    trainer.train_step_info.fetches = ["loss"]  # with fetches as without
    for x, y in mlp_batches(5):
        trainer.train_step(x, y)
    assert trainer.loss_scaler is own and own.seen == [(2, 0, True), (4, 1, True)]
    assert trainer.loss_scaler.loss_scale == 16.0 and trainer.train_step_info.optimization_step == 2
    trainer.save_checkpoint(tmp_path / "own.ortckpt")
    other = mlp_trainer(fp16(Counting(), batch={"gradient_accumulation_steps": 2}))
    other.load_checkpoint(tmp_path / "own.ortckpt")
    assert other.loss_scaler.state_dict()["seen"] == own.seen and other.loss_scaler.loss_scale == 16.0
    other.loss_scaler.reset()
    assert other.loss_scaler.loss_scale == 4.0

    class Wrong(amp.LossScaler):
        def update(self, train_step_info):
            return -1.0

    trainer = mlp_trainer(fp16(Wrong(4.0)))
    with pytest.raises(ValueError, match="loss_scale must be positive and finite, but -1.0"):
        trainer.train_step(*mlp_batches(1)[0])


def test_accumulation_is_the_mean_in_fp32() -> None:
    """Gradients that fp16 can't sum: a large one and many that vanish beside it."""
    desc = {"inputs": [("input", ["b", 1]), ("y", ["b", 1])], "outputs": [("loss", [], True)]}
    model = nn.Linear(1, 1, bias=False)
    weight = model.weight.item()
    options = ORTTrainerOptions(fp16(amp.LossScaler(1.0), batch={"gradient_accumulation_steps": 4}))
    trainer = ORTTrainer(
        model, desc, optim.SGDConfig(lr=1.0), loss_fn=lambda p, y: (p.float() * y).mean(), options=options
    )
    for x in (1024.0, 0.25, 0.25, 0.25):
        trainer.train_step(torch.tensor([[x]]), torch.ones(1, 1))
    moved = weight - trainer.state_dict(pytorch_format=True)["weight"].item()
    assert moved == pytest.approx((1024 + 0.75) / 4, rel=1e-6)


@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
@pytest.mark.parametrize(("size", "reduction"), [(2, "mean"), (3, "mean"), (3, "weighted")])
def test_the_windows_that_overflow_are_grad_scalers(size: int, reduction: str, kernels: str, tmp_path: Any) -> None:
    """A micro-batch's gradient is the scale, up to twice what fp16 holds, and its share of the mean half or a third."""
    batch = {"gradient_accumulation_steps": size, "gradient_reduction": reduction}
    weight = {"gradient_weight": 4} if reduction == "weighted" else {}
    desc = {"inputs": [("input", ["b", 2]), ("y", ["b", 1])], "outputs": [("loss", [], True)]}
    model = nn.Linear(2, 1, bias=False)
    reference, path = copy.deepcopy(model), tmp_path / "inside.ortckpt"

    def loss_of(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (prediction.float() * y).sum()

    def make() -> ORTTrainer:
        scaler = amp.DynamicLossScaler(loss_scale=2.0**16, up_scale_window=2)
        options = ORTTrainerOptions(fp16(scaler, batch=batch, utils={"kernels": kernels}))
        return ORTTrainer(model, desc, optim.SGDConfig(lr=0.1), loss_fn=loss_of, options=options)

    trainer = make()
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    skipped = []
    for update in range(9):
        for count in range(1, size + 1):
            x, y = torch.tensor([[1.0, 0.5]]), torch.ones(1, 1)
            trainer.train_step(x, y, **weight)
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(reference(x), y)
            scaler.scale(loss / size).backward()
            if count == 1 and reference.weight.grad.isfinite().all():
                found = trainer.get_gradient("weight")
                trainer.set_gradient("weight", found)
                assert_close(found, reference.weight.grad / scaler.get_scale() * size, 1e-6, "gradient")
            if count == 1 and update == 1:
                trainer.save_checkpoint(path)
                trainer = make()
                trainer.load_checkpoint(path)
        before = reference.weight.clone()
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
        skipped.append(torch.equal(reference.weight, before))
        assert trainer.train_step_info.all_finite == (not skipped[-1])
        assert trainer.loss_scaler.loss_scale == scaler.get_scale()
        assert_close(trainer.get_parameter("weight"), reference.weight.detach(), 1e-6, f"weight after {update}")
    assert skipped[:2] == [False, False] and 0 < sum(skipped) < 4
    trainer.train_step(x, y, **weight)  # a window that ends early takes the mean of what it has
    assert trainer.optimizer_step()
    expected = reference.weight.detach() - 0.1 * x
    assert_close(trainer.get_parameter("weight"), expected, 1e-3, "after an incomplete window")


def replaced(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = layer(x)
    image = h.reshape(1, 1, 4, 6)
    volume = h.reshape(1, 1, 2, 3, 4)
    found = (
        F.multi_margin_loss(h, torch.tensor([1, 0, 2, 1]), p=2),
        F.multilabel_margin_loss(h, torch.tensor([[1, 0, -1, 2, 3, 3]] * 4)),
        F.triplet_margin_loss(h[:1], h[1:2], h[2:3]),
        torch.cdist(h[:2], h[2:]),
        F.grid_sample(image, h[:, :2].reshape(1, 2, 2, 2).tanh(), align_corners=False),
        F.adaptive_avg_pool3d(volume, 2),
        F.adaptive_max_pool3d(volume, 2),
        *(F.pad(value, (1, 1) * count, mode="replicate") for count, value in ((1, h), (2, image), (3, volume))),
        F.pad(h, (1, 1)),
        F.group_norm(h, 2),
    )
    return sum((value.float() ** 2).sum() for value in found), *found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
def test_what_replaces_an_operator_has_the_dtype_of_autocast(dtype: torch.dtype, kernels: str) -> None:
    """Autocast computes these operators in fp32; it does not see them in a graph that has others instead."""
    model = Apply(nn.Linear(6, 6), replaced)
    reference = Reference(model, loss_fn=None, dtype=dtype, lr=0.0)
    mixed = {"enabled": True, "dtype": str(dtype)[6:], "loss_scaler": amp.LossScaler(1.0)}
    options = ORTTrainerOptions({"mixed_precision": mixed, "utils": {"kernels": kernels}})
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.0), options=options)
    x = torch.randn(4, 6)
    ours = trainer.train_step(x)
    reference.backward(x)
    tolerance = 4 * torch.finfo(dtype).eps
    for number, (a, b) in enumerate(zip(ours, reference.outputs, strict=True)):
        assert a.dtype == b.dtype, number
        assert_close(a.float(), b.detach().float(), tolerance, str(number))
    expected = reference.model.module.weight.grad
    assert_close(trainer.get_gradient("module.weight"), expected, 2 * tolerance, "gradient")


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layer_norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = F.max_pool2d(F.gelu(self.norm(self.conv(image))), 2).flatten(2).transpose(1, 2)
        return self.head(self.layer_norm(self.attention(hidden, hidden, hidden)[0]).mean(1))


IMAGES_DESC = {
    "inputs": [("image", ["b", 1, 8, 8]), ("label", ["b"])],
    "outputs": [("loss", [], True), ("logits", ["b", 3])],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_convolution_attention_and_norms(dtype: torch.dtype) -> None:
    model, is_half = ConvNet(), dtype == torch.float16
    relative = 2e-2 if is_half else 1e-2
    reference = Reference(model, dtype=dtype, lr=0.05)
    scaler = None if is_half else amp.DynamicLossScaler(loss_scale=8.0)
    options = ORTTrainerOptions((fp16 if is_half else bf16)(scaler))
    trainer = ORTTrainer(model, IMAGES_DESC, optim.SGDConfig(lr=0.05), loss_fn=F.cross_entropy, options=options)
    assert trainer.loss_scaler is not None, "a scaler that is given is used"
    for _ in range(10 if is_half else 5):
        # Inputs in bfloat16 go through, too.
        x, y = torch.randn(4, 1, 8, 8).to(torch.float32 if is_half else dtype), torch.randint(0, 3, (4,))
        loss, logits = trainer.train_step(x, y)
        assert logits.dtype == dtype
        assert_close(loss, reference.step(x, y), relative, "loss")
    evaluated = trainer.eval_step(x, y)[0]
    reference.model.eval()
    assert_close(evaluated, reference.loss(x, y).detach(), relative, "evaluation")


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h.scatter_reduce(1, torch.tensor([[0, 1, 1, 2]]).expand(h.shape[0], -1), h[:, :4], "amax"),
        lambda h: F.layer_norm(h, (8,)),
        lambda h: h * h.amax(-1, keepdim=True) + h.aminmax(dim=-1, keepdim=True).min,
        lambda h: h.index_add(1, torch.tensor([0, 1, 1]), h[:, :3]),
    ],
    ids=["scatter_reduce", "layer norm without weights", "extrema", "index_add"],
)
def test_operators_that_go_wrong_in_fp16(function: Any) -> None:
    model = Between(function)
    reference = Reference(model, lr=0.0)
    scaler = amp.DynamicLossScaler(automatic_update=False, loss_scale=64.0)
    trainer = mlp_trainer(fp16(scaler, utils={"grad_norm_clip": False}), optim.SGDConfig(lr=1.0), model)
    batch = mlp_batches(1, 16)[0]
    loss, _ = trainer.train_step(*batch)
    assert_close(loss, reference.backward(*batch), 5e-3, "loss")
    assert trainer.train_step_info.all_finite
    for name, value in trainer.state_dict(pytorch_format=True).items():
        parameter = reference.model.get_parameter(name)
        assert_close(parameter.detach() - value, parameter.grad, 2e-2, name)


def bf16(scaler: amp.LossScaler | None = None, **options: Any) -> dict[str, Any]:
    return {"mixed_precision": {"enabled": True, "dtype": torch.bfloat16, "loss_scaler": scaler}, **options}


@pytest.mark.options(random_numbers="pytorch")
def test_dropout_in_bfloat16_has_the_masks_of_pytorch() -> None:
    def dropped(layers: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.dropout(layers[0](x), 0.3, layers.training)
        noisy = hidden + torch.randn_like(hidden) * 0.01
        return layers[1](noisy), hidden

    def loss_of(prediction: tuple[torch.Tensor, torch.Tensor], label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(prediction[0], label)

    model = Apply(nn.ModuleList([nn.Linear(8, 32), nn.Linear(32, 3)]), dropped)
    reference = Reference(model, loss_fn=loss_of, dtype=torch.bfloat16, lr=0.1)
    desc = {**MLP_DESC, "outputs": [("loss", [], True), ("logits", ["batch", 3]), ("hidden", ["batch", 32])]}
    torch.manual_seed(5)
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=0.1), loss_fn=loss_of, options=ORTTrainerOptions(bf16()))
    torch.manual_seed(5)
    for batch in mlp_batches(5):
        loss, _, hidden = trainer.train_step(*batch)
        assert_close(loss, reference.step(*batch), 1e-2, "loss")
        expected = reference.outputs[1]
        assert hidden.dtype == expected.dtype == torch.bfloat16
        assert torch.equal(hidden == 0, expected == 0), "the masks are the same"


def test_a_scale_that_is_assigned_inside_a_window_holds_from_the_next_on(tmp_path: Any) -> None:
    model = MLP()

    def make() -> ORTTrainer:
        options = bf16(amp.LossScaler(8.0), batch={"gradient_accumulation_steps": 3})
        return mlp_trainer(options, optim.SGDConfig(lr=0.1), model)

    plain, changed = make(), make()
    for number, (x, y) in enumerate(mlp_batches(6)):
        plain.train_step(x, y)
        changed.train_step(x, y)
        if number == 0:
            changed.loss_scaler.loss_scale = 1024.0
            torch.testing.assert_close(changed.get_gradient("fc1.bias"), plain.get_gradient("fc1.bias"))
        if number == 1:
            changed.save_checkpoint(tmp_path / "inside.ortckpt")
            changed = make()
            changed.load_checkpoint(tmp_path / "inside.ortckpt")
            assert changed.loss_scaler.loss_scale == 1024.0
    for name, value in plain.state_dict(pytorch_format=True).items():
        assert_close(changed.state_dict(pytorch_format=True)[name], value, 1e-5, name)


@pytest.mark.options(kernels="onnxruntime")
@pytest.mark.parametrize("function", [F.elu, F.selu])
def test_an_activation_that_onnx_lacks_in_bfloat16(function: Any) -> None:
    model, batch = Between(function), mlp_batches(1)[0]
    expected = Reference(model, dtype=torch.bfloat16, lr=0.0).backward(*batch)
    trainer = mlp_trainer(bf16(), optim.SGDConfig(), model)
    assert_close(trainer.train_step(*batch)[0], expected, 1e-2, "loss")


def test_bfloat16_as_it_was_translated() -> None:
    """Without the cleanup passes, fewer values have their own type."""
    options = ORTTrainerOptions(bf16(_internal_use={"enable_internal_postprocess": False}))
    model = ConvNet()
    reference = Reference(model, dtype=torch.bfloat16, lr=0.0)
    trainer = ORTTrainer(model, IMAGES_DESC, optim.SGDConfig(), loss_fn=F.cross_entropy, options=options)
    batch = torch.randn(4, 1, 8, 8), torch.randint(0, 3, (4,))
    loss, logits = trainer.train_step(*batch)
    reference.loss(*batch)
    assert_close(logits, reference.outputs.detach(), 1e-2, "logits")
    assert torch.isfinite(loss)


@pytest.mark.options(kernels="onnxruntime")
def test_the_gradient_of_a_bfloat16_number() -> None:
    """The gradient is a sum, which type promotion computes in float32 and casts back: the cast is the result."""

    def loss_fn(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), label)

    scale = nn.ParameterList([nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16))])
    model, batch = Apply(scale, lambda scale, x: x.bfloat16() * scale[0]), mlp_batches(1)[0]
    reference = Reference(model, loss_fn=loss_fn, lr=0.0)
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}})
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), loss_fn=loss_fn, options=options)
    loss, _ = trainer.train_step(*batch)
    assert_close(loss, reference.backward(*batch), 1e-4, "loss")
    gradient, theirs = trainer.get_gradient("module.0"), reference.model.module[0].grad
    assert gradient is not None and abs(float(gradient) - float(theirs)) <= 2**-7 * abs(float(theirs))


@pytest.mark.parametrize(
    ("scaler", "capability", "dtype"),
    [(None, None, "bfloat16"), (None, (8, 0), "bfloat16"), (None, (7, 5), "float16"), (True, (8, 0), "float16")],
)
def test_the_dtype_that_a_machine_computes_fast(
    scaler: bool | None, capability: tuple[int, int] | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    precision = ORTTrainerOptions(
        {"mixed_precision": {"enabled": True, "loss_scaler": amp.DynamicLossScaler() if scaler else None}}
    ).mixed_precision
    device = torch.device("cpu" if capability is None else "cuda")
    assert fast_dtype(precision, device) == dtype
    if capability is None:
        trainer = mlp_trainer({"mixed_precision": {"enabled": True}})
        assert trainer.options.mixed_precision.dtype == dtype and "0 steps in bfloat16" in repr(trainer)
        assert mlp_trainer().options.mixed_precision.dtype == "auto"
