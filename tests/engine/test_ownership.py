"""Parameters and buffers that share memory without being one tensor: as in PyTorch, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ExportError, ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.engine.ownership import own_copies, shared_groups

from ..helpers import assert_close, assert_same_weights

DESC = {"inputs": [("x", ["b", 8]), ("y", ["b"])], "outputs": [("loss", [], True)]}


class Sharing(nn.Module):
    """An encoder, and a tensor that shares memory with its weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.encoder = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 3)
        weight = self.encoder.weight.data
        if kind == "buffer":
            self.register_buffer("seen", weight)
            return
        self.decoder = nn.Linear(8, 8, bias=False)
        if kind == "same":
            self.decoder.weight = nn.Parameter(weight)
        elif kind == "transposed":
            self.decoder.weight.data = weight.t()
        elif kind == "slices":
            base = torch.randn(12, 8) * 0.3
            self.encoder.weight, self.decoder.weight = nn.Parameter(base[:8]), nn.Parameter(base[4:])
        elif kind == "apart":
            base = torch.randn(8, 16) * 0.3
            self.encoder.weight, self.decoder.weight = nn.Parameter(base[:, :8]), nn.Parameter(base[:, 8:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.encoder(x))
        return self.head(F.linear(hidden, self.seen) if self.kind == "buffer" else self.decoder(hidden))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(count)]


def sharing_copy(kind: str) -> Sharing:
    torch.manual_seed(3)
    return Sharing(kind)


@pytest.mark.parametrize("kind", ["same", "slices", "buffer", "apart"])
@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        (optim.SGDConfig(lr=0.1), lambda m: torch.optim.SGD(m.parameters(), 0.1)),
        (
            optim.AdamConfig(lr=0.01, lambda_coef=0.01),
            lambda m: torch.optim.AdamW(m.parameters(), 0.01, weight_decay=0.01),
        ),
    ],
    ids=["sgd", "adam"],
)
def test_memory_in_common_is_kept_in_common(kind: str, config, optimizer) -> None:
    # deepcopy would give each parameter its own memory.
    reference = sharing_copy(kind)
    stepper = optimizer(reference)
    options = ORTTrainerOptions({"utils": {"max_grad_norm": 0.5}})
    trainer = ORTTrainer(sharing_copy(kind), DESC, config, loss_fn=F.cross_entropy, options=options)
    for x, y in batches(6):
        loss = F.cross_entropy(reference(x), y)
        assert_close(trainer.train_step(x, y), loss.detach(), 1e-6, "loss")
        stepper.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        stepper.step()
    assert_same_weights(trainer, reference, 1e-6)
    # A loaded state keeps the sharing, too.
    other = ORTTrainer(sharing_copy(kind), DESC, config, loss_fn=F.cross_entropy, options=options)
    other.load_state_dict(trainer.state_dict())
    for batch in batches(3):
        assert torch.equal(trainer.train_step(*batch), other.train_step(*batch))


def test_a_transposed_twin_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['encoder.weight', 'decoder.weight'\] are different tensors in the"):
        ORTTrainer(sharing_copy("transposed"), DESC, optim.SGDConfig(), loss_fn=F.cross_entropy)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)
        self.register_buffer("counts", torch.zeros(2, 3))
        self.register_buffer("first", self.counts[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts.add_(torch.tensor([1.0, 2.0, 3.0]))
        return self.fc(x) + self.first


def test_a_view_of_a_changing_buffer_is_refused() -> None:
    trainer = ORTTrainer(Counted(), DESC, optim.SGDConfig(), loss_fn=F.cross_entropy)
    with pytest.raises(ExportError, match="in a graph the change would not reach the other tensor"):
        trainer.train_step(*batches(1)[0])


def test_groups_and_copies() -> None:
    base = torch.arange(24.0)
    tensors = {
        "a": base[:8],
        "b": base[8:16],
        "c": base[12:20].view(2, 4),
        "d": torch.ones(3),
        "e": base[20:],
        "f": base[18:22],
        "empty": base[:0],
    }
    assert shared_groups(tensors, ["b"]) == [["b", "c", "e", "f"]]
    copies = own_copies(tensors, ["b"], torch.device("cpu"))
    assert all(torch.equal(copies[name], tensors[name]) for name in tensors)
    copies["c"].zero_()
    assert copies["b"].tolist() == [8, 9, 10, 11, 0, 0, 0, 0]
    copies["a"].fill_(-1)
    assert base.tolist() == list(range(24)), "the given tensors do not change"
    assert shared_groups({"x": base[::2], "y": base[1::2]}, ["x"]) == []
    assert shared_groups({"x": base[::2], "y": base[:1]}, []) == [], "buffers that nothing changes"
    with pytest.raises(ValueError, match=r"\['x'\] not contiguous"):
        shared_groups({"x": base[::2], "y": base[:1]}, ["y"])
    with pytest.raises(ValueError, match="with different dtypes"):
        shared_groups({"x": base, "y": base.view(torch.int32)}, ["x"])
    narrow = torch.ones(4, dtype=torch.bfloat16)
    wide = own_copies({"x": narrow, "y": narrow[1:]}, (), torch.device("cpu"))
    wide["x"][2] = 5
    assert wide["y"].tolist() == [1, 5, 1] and wide["y"].dtype == torch.float32
