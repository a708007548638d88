"""Old scripts, unchanged, in separate processes: their results equal PyTorch's."""

from __future__ import annotations

import contextlib
import importlib
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from ort_trainer import compat

from .. import processes
from ..api.exported import export

SCRIPTS = Path(__file__).parent / "scripts"
Update = Callable[[int], None]


def run_installed(script: Path, argument: Path, printed: Path) -> None:
    """Runs a script after install(), in the current process."""
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), str(argument)]
    compat.install()
    with printed.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(script), run_name="__main__")


def run(script: str, argument: Path) -> dict[str, list[list[float]]]:
    """Runs a script after install() and returns the numbers of each line that it prints, by the line's first word."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        call = processes.Call(run_installed, (SCRIPTS / script, argument, printed))
        (ended,) = processes.run([call], timeout=300)
        assert ended.code == 0, ended.output
        text = printed.read_text()
    lines: dict[str, list[list[float]]] = {}
    for word, *numbers in map(str.split, text.splitlines()):
        lines.setdefault(word, []).append([float(number) for number in numbers])
    return lines


def reference(rates: list[float]) -> dict[str, list[list[float]]]:
    """Trains in PyTorch, with the learning rate of each update."""
    torch.manual_seed(1)
    fc1, fc2 = nn.Linear(12, 16), nn.Linear(16, 10)
    groups = [
        {"params": [fc1.weight, fc2.weight], "weight_decay": 0.01},
        {"params": [fc1.bias, fc2.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    generator = torch.Generator().manual_seed(2)
    lines: dict[str, list[list[float]]] = {"loss": []}
    for step in range(8):
        data = torch.randn(5, 12, generator=generator)
        target = torch.randint(0, 10, (5,), generator=generator)
        loss = nn.functional.cross_entropy(fc2(torch.relu(fc1(data))), target)
        lines["loss"].append([loss.item()])
        (loss / 2).backward()
        if step % 2:
            for group in optimizer.param_groups:
                group["lr"] = rates[step // 2]
            optimizer.step()
            optimizer.zero_grad()
    lines["probability"] = [fc2(torch.relu(fc1(data))).flatten().tolist()]
    lines["norm"] = [[p.norm().item() for p in (fc1.weight, fc1.bias, fc2.weight, fc2.bias)]]
    return lines


@pytest.mark.engine
def test_the_mnist_example(tmp_path: Path) -> None:
    # A warm-up over 2 of 10 updates, then linear to 0: the factor is s / 2, then (10 - s) / 8.
    rates = [0.0, 0.01 / 2, 0.01, 0.01 * 7 / 8]
    assert_same_lines(run("mnist_like.py", tmp_path / "checkpoint"), reference(rates))


@pytest.fixture
def old_models(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("old_models")


def losses_of(
    loss_of: Callable[..., torch.Tensor], batches: Iterable[tuple[torch.Tensor, ...]], model: nn.Module, step: Update
) -> list[list[float]]:
    """Two micro-batches a window, and clipping; ``step`` gets the number of the update."""
    losses: list[list[float]] = []
    for batch in batches:
        loss = loss_of(*batch)
        losses.append([loss.item()])
        (loss / 2).backward()
        if len(losses) % 2 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step(len(losses) // 2 - 1)
            model.zero_grad()
    return losses


def assert_same_lines(found: dict[str, list[list[float]]], expected: dict[str, list[list[float]]]) -> None:
    assert found.keys() == expected.keys()
    for word, lines in expected.items():
        for ours, theirs in zip(found[word], lines, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), word


def test_the_getting_started_example(tmp_path: Path, old_models: ModuleType) -> None:
    torch.manual_seed(1)
    model = old_models.TransformerModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expected: dict[str, list[list[float]]] = {"loss": []}
    for number, tokens in enumerate(old_models.token_batches(8, 7, 3)):
        loss = old_models.transformer_loss(model(tokens[:-1]), tokens[1:].reshape(-1))
        expected["loss"].append([loss.item()])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.01 * (number / 2 if number < 2 else (20 - number) / 18)
        optimizer.step()
    with torch.no_grad():
        loss = old_models.transformer_loss(model.eval()(tokens[:-1]), tokens[1:].reshape(-1))
    expected["evaluated"] = [[loss.item()]]
    assert_same_lines(run("getting_started_like.py", tmp_path / "weights.pt"), expected)
    kept = torch.load(tmp_path / "weights.pt", weights_only=False)
    assert set(kept) == set(dict(model.named_parameters()))


def test_the_gpt2_example(tmp_path: Path, old_models: ModuleType) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = old_models.gpt2()
    decayed = {n: not any(key in n for key in ("bias", "ln_")) for n, _ in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 * decayed[n]} for n, p in model.named_parameters()], lr=0.01
    )

    def step(number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (10 - number) / 10
        optimizer.step()

    batches = [(tokens,) for tokens in old_models.token_batches(8, 3, 9)]
    losses = losses_of(lambda tokens: model(tokens, labels=tokens).loss, batches, model, step)
    written = model.eval().generate(batches[-1][0][:1, :4], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert_same_lines(run("gpt2_like.py", tmp_path), {"loss": losses, "generated": written.tolist()})


def test_the_bert_example(tmp_path: Path, old_models: ModuleType) -> None:
    """LAMB as in its paper (algorithm 2), without bias correction, which was legacy's default."""
    pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = old_models.BertForPreTraining()
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}

    @torch.no_grad()
    def step(number: int) -> None:
        rate = 0.02 * (number / 2 if number < 2 else (1 - number / 10) ** 0.5)
        for name, weight in model.named_parameters():
            first, second = moments[name]
            first.mul_(0.9).add_(weight.grad, alpha=0.1)
            second.mul_(0.999).addcmul_(weight.grad, weight.grad, value=0.001)
            decay = 0.0 if any(key in name for key in ("bias", "gamma", "beta", "LayerNorm")) else 0.01
            direction = first / (second.sqrt() + 1e-6) + decay * weight
            norms = weight.norm(), direction.norm()
            ratio = norms[0] / norms[1] if all(norms) else 1.0
            weight.sub_(rate * ratio * direction)

    losses = losses_of(model, old_models.bert_batches(8), model, step)
    names = sorted(n for n, _ in model.named_parameters() if n.startswith("model.cls.predictions.tr"))
    norms = [model.get_parameter(name).norm().item() for name in names]
    assert_same_lines(run("bert_like.py", tmp_path), {"loss": losses, "norm": [norms]})


@pytest.mark.engine
def test_on_device_training(tmp_path: Path) -> None:
    exported = export(tmp_path)
    x, label = (np.stack(values) for values in zip(*exported.batches, strict=True))
    np.savez(tmp_path / "batches.npz", x=x, label=label)
    said = run("on_device_like.py", tmp_path)
    losses, tests = [], []
    for epoch in range(2):
        for number in range(len(x)):
            losses.append([exported.loss(number)])
            done = epoch * len(x) + number
            exported.optimizer.param_groups[0]["lr"] = 0.1 * (done / 2 if done < 2 else (12 - done) / 10)
            exported.optimizer.step()
        tests.append([sum(exported.loss(number) for number in range(len(x))) / len(x)])
    np.testing.assert_allclose(said["loss"], losses, rtol=1e-4)
    np.testing.assert_allclose(said["test"], tests, rtol=1e-4)
    logits = exported.model(torch.from_numpy(x[0])).detach().numpy()
    np.testing.assert_allclose(said["logits"], [logits.ravel()], rtol=1e-3, atol=1e-4)
    assert said["epoch"] == [[1, 4]]
