"""The export cache: cached exports give the same numbers, and untrusted files are rebuilt."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.step.cache import ExportCache, export_cache
from tests import processes
from tests.helpers import MLP, MLP_DESC, mlp_batches, mlp_trainer

FOUND, MADE = "loaded the training graph from the cache", "exported the training graph"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an empty cache folder for the test."""
    monkeypatch.setenv("ORT_TRAINER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="ort_trainer")
    return caplog


def said(log: pytest.LogCaptureFixture) -> str:
    """Returns the log since the last call."""
    text = log.text
    log.clear()
    return text


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.export"))


def trained(
    model: nn.Module,
    batches: Sequence[tuple[torch.Tensor, ...]] | None = None,
    desc: Any = MLP_DESC,
    loss_fn: Any = F.cross_entropy,
    options: dict[str, Any] | None = None,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Returns losses and weights after some steps."""
    torch.manual_seed(5)
    config = optim.AdamConfig(lr=1e-2)
    trainer = ORTTrainer(model, desc, config, loss_fn=loss_fn, options=ORTTrainerOptions(options))
    results = [trainer.train_step(*batch) for batch in (batches or mlp_batches(5))]
    losses = [result if isinstance(result, torch.Tensor) else result[0] for result in results]
    return losses, trainer.state_dict(pytorch_format=True)


def assert_equal_bits(first: Any, second: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert first[1].keys() == second[1].keys()
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


class Tied(nn.Module):
    """Has tied weights, dropout, and buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.norm(self.embedding(ids))))


TIED_DESC = {"inputs": [("ids", ["n"]), ("label", ["n"])], "outputs": [("loss", [], True)]}


def tied_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(0, 9, (2, 7), generator=generator)) for _ in range(5)]


@pytest.mark.parametrize("isolated", [True, False], ids=["child process", "in process"])
def test_numbers_of_a_found_graph(
    isolated: bool, folder: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORT_TRAINER_EXPORT_IN_PROCESS", "" if isolated else "1")
    made = trained(Tied(), tied_batches(), TIED_DESC)
    assert MADE in (text := said(log)) and FOUND not in text and str(entries(folder)[0]) in text
    found = trained(Tied(), tied_batches(), TIED_DESC)
    assert FOUND in (text := said(log)) and MADE not in text
    assert_equal_bits(made, found)
    assert len(entries(folder)) == 1


def test_other_weights_find_the_graph(folder: Path, log: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    trained(MLP())
    said(log)
    torch.manual_seed(2)
    model = MLP()
    x, label = mlp_batches(1)[0]
    expected = F.cross_entropy(model(x), label).detach()
    (loss, *_), _ = trained(model)
    assert FOUND in said(log)
    torch.testing.assert_close(loss, expected)


class Scaled(nn.Module):
    def __init__(self, factor: float, table: Sequence[float] = (1.0, 1.0, 1.0)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 3)
        self.factor = factor
        self.table = torch.tensor(table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor * self.table


@pytest.mark.parametrize(
    ("changed", "what"),
    [(Scaled(2.5), MADE), (Scaled(2.0, (1.0, 1.0, 3.0)), FOUND)],
    ids=["a number is a constant", "a tensor is an input"],
)
def test_changed_constants_are_seen(changed: nn.Module, what: str, folder: Path, log: pytest.LogCaptureFixture) -> None:
    trained(Scaled(2.0))
    said(log)
    x, label = mlp_batches(1)[0]
    expected = F.cross_entropy(changed(x), label).detach()
    (loss, *_), _ = trained(changed)
    assert what in said(log)
    torch.testing.assert_close(loss, expected)


def test_evaluation_has_a_graph_of_its_own(folder: Path, log: pytest.LogCaptureFixture) -> None:
    x, label = mlp_batches(1)[0]
    for expected in (("exported the evaluation", MADE), ("loaded the evaluation", FOUND)):
        torch.manual_seed(0)
        trainer = mlp_trainer(model=MLP(dropout=0.5))
        first = trainer.eval_step(x, label)
        assert torch.equal(first[0], trainer.eval_step(x, label)[0])
        trainer.train_step(x, label)
        text = said(log)
        assert all(part in text for part in expected)
    assert len(entries(folder)) == 2


def test_prepare_tells(folder: Path, log: pytest.LogCaptureFixture) -> None:
    for expected in (MADE, FOUND):
        mlp_trainer().prepare(mlp_batches(1)[0])
        assert expected in said(log)


def test_another_batch_size_finds_the_graph(folder: Path, log: pytest.LogCaptureFixture) -> None:
    trained(MLP(), mlp_batches(1, size=5))
    said(log)
    trained(MLP(), mlp_batches(1, size=6))
    assert FOUND in said(log)
    trained(MLP(), mlp_batches(1, size=1))
    assert FOUND in said(log)


class Unrolled(nn.Module):
    """The export fixes its length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x[:, 0]
        for step in x.unbind(1)[1:]:
            state = torch.tanh(self.cell(state) + step)
        return state


UNROLLED_DESC = {
    "inputs": [("x", ["n", "length", 4]), ("label", ["n"])],
    "outputs": [("loss", [], True), ("y", ["n", 4])],
}


def test_the_warning_about_a_fixed_dimension_is_kept(folder: Path, log: pytest.LogCaptureFixture) -> None:
    warnings = []
    for expected in (MADE, FOUND):
        for length in (3, 5):
            trained(Unrolled(), [(torch.ones(2, length, 4), torch.tensor([0, 1]))], UNROLLED_DESC)
        text = said(log)
        assert text.count(expected) == 2
        warnings.append([line.partition("WARNING")[2] for line in text.splitlines() if "the model fixes" in line])
    assert len(warnings[0]) == 2 and warnings[0] == warnings[1]


class OfSizeOne(nn.Module):
    """Computes a batch of one differently."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1 if x.shape[0] > 1 else 3)


def test_a_graph_is_used_only_for_the_sizes_that_it_accepts(folder: Path, log: pytest.LogCaptureFixture) -> None:
    for expected in (MADE, FOUND):
        for size in (4, 1):
            model, batch = OfSizeOne(), mlp_batches(1, size=size)
            wanted = F.cross_entropy(model(batch[0][0]), batch[0][1]).detach()
            (loss,), _ = trained(model, batch)
            assert expected in said(log)
            torch.testing.assert_close(loss, wanted)


class Remembers(nn.Module):
    """Reads what the last call has left."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.last: Any = None
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.reads and self.last is not None:
            y = y + self.last.mean() * 0.5
        self.last = y.detach()
        return y


def test_a_graph_that_was_found_leaves_what_its_model_leaves(folder: Path, log: pytest.LogCaptureFixture) -> None:
    """Both models are captured as the same program, because the state that the second reads is missing at first."""
    trained(Remembers(reads=False))
    said(log)
    model, reference = Remembers(reads=True), Remembers(reads=True)
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}})
    trainer = ORTTrainer(model, MLP_DESC, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=options)
    for x, label in mlp_batches(1) * 3:
        loss = F.cross_entropy(reference(x), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.train_step(x, label)[0], loss.detach())
    assert FOUND in said(log)


def test_a_model_without_a_key_is_exported_each_time(folder: Path, log: pytest.LogCaptureFixture) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    class Custom(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Double.apply(super().forward(x))

    for _ in range(2):
        trained(Custom())
        assert MADE in (text := said(log)) and "can't be cached: the model has custom autograd functions" in text
    assert not entries(folder)


def test_a_postprocess_runs_on_what_is_found(folder: Path, log: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    for _ in range(2):
        trained(MLP(), options={"_internal_use": {"extra_postprocess": lambda model: calls.append(1)}})
    assert len(calls) == 2 and FOUND in said(log)


@pytest.mark.parametrize("value", ["off", "0", "OFF"])
def test_the_environment_switches_it_off(
    value: str, folder: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORT_TRAINER_CACHE", value)
    assert export_cache() is None


def test_the_option_switches_it_off(folder: Path, log: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        trained(MLP(), options={"utils": {"cache_exports": False}})
        assert MADE in said(log)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the folder of Linux")
def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ORT_TRAINER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert export_cache().folder == tmp_path / "ort_trainer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert export_cache().folder == tmp_path / ".cache" / "ort_trainer"


@pytest.mark.parametrize("value", ["0", "-1", "much"])
def test_a_wrong_limit(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_TRAINER_CACHE_MB", value)
    with pytest.raises(ValueError, match=f"ORT_TRAINER_CACHE_MB must be a whole number .* but is '{value}'"):
        export_cache()


DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "a flipped bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "another format": lambda data: data.replace(b"export 1", b"export 2", 1),
    "something else": lambda data: b"PK\x03\x04 not one of ours",
    "longer": lambda data: data + b"x",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(damage: str, tmp_path: Path) -> None:
    cache = ExportCache(tmp_path / "c", 1 << 20)
    assert not cache.store("key", b"content " * 100)
    path = cache.path("key")
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    content, remark = cache.load("key")
    assert content is None and remark == f"the cached export {path} is damaged, so the model is exported again"
    assert not cache.store("key", b"new")
    assert cache.load("key") == (b"new", "")


def test_a_file_of_another_key_is_not_taken(tmp_path: Path) -> None:
    cache = ExportCache(tmp_path, 1 << 20)
    cache.store("a", b"content")
    cache.path("a").rename(cache.path("b"))
    assert cache.load("b")[0] is None


def test_a_trainer_goes_on_with_a_damaged_file(folder: Path, log: pytest.LogCaptureFixture) -> None:
    made = trained(Scaled(2.0))
    said(log)
    entries(folder)[0].write_bytes(b"nothing of ours")
    assert_equal_bits(made, trained(Scaled(2.0)))
    text = said(log)
    assert "is damaged, so the model is exported again" in text and MADE in text
    trained(Scaled(2.0))
    assert FOUND in said(log)


def test_only_the_owner_may_read(folder: Path) -> None:
    trained(MLP())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert entries(folder)[0].stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_may_write_is_not_used(folder: Path, log: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    trained(MLP())
    trained(MLP(dropout=0.5))
    problem = f"cached exports in {folder} are not used: the folder is writable by others"
    warned = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert len(warned) == 1 and warned[0].startswith(problem), "one warning, not one for each export"
    assert not entries(folder)


def test_a_file_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    cache = ExportCache(tmp_path / "c", 1 << 20)
    cache.store("key", b"content")
    cache.path("key").chmod(0o666)
    content, remark = cache.load("key")
    assert content is None and "the file is writable by others" in remark


def test_a_folder_of_someone_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ExportCache(tmp_path / "c", 1 << 20)
    assert not cache.store("key", b"content")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    content, remark = cache.load("key")
    assert content is None and "the folder belongs to another user" in remark
    assert "the folder belongs to another user" in cache.store("key", b"content")


def test_a_place_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ORT_TRAINER_CACHE", str(tmp_path / "file" / "c"))
    trained(MLP())
    assert "this export is not cached" in said(log)


def test_the_size_is_bounded(tmp_path: Path) -> None:
    """The least recently used exports are evicted."""
    cache = ExportCache(tmp_path, 4000)
    for number, name in enumerate("abc"):
        assert not cache.store(name, b"x" * 1000)
        os.utime(cache.path(name), (number, number))
    assert cache.load("a")[0]  # makes it the most recently used
    assert not cache.store("d", b"x" * 1000)
    assert {path.stem for path in entries(tmp_path)} == {"a", "c", "d"}
    assert "exceed the cache limit" in cache.store("e", b"x" * 4000)


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    old, new = tmp_path / ".old.tmp", tmp_path / ".new.tmp"
    old.touch()
    new.touch()
    os.utime(old, (time.time() - 10_000,) * 2)
    ExportCache(tmp_path, 1 << 20).store("key", b"content")
    assert not old.exists() and new.exists()


def show() -> None:
    """Runs in the processes of the following test."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    torch.manual_seed(0)
    losses, weights = trained(MLP(dropout=0.5))
    print([loss.item().hex() for loss in losses], {k: v.double().sum().item().hex() for k, v in weights.items()})


def test_processes_at_once(folder: Path, tmp_path: Path) -> None:
    """Both export, or one finds the other's export; another interpreter finds it without importing the exporter."""
    together = processes.run([processes.Call(show), processes.Call(show)], timeout=300)
    heavy = ["onnxscript", "ort_trainer.export.assemble", "ort_trainer.graph.differentiate"]
    program = f"""if True:
        import sys
        from tests.step.test_cache import show
        show()
        print([name for name in {heavy} if name in sys.modules])
    """
    results = [process.output.splitlines()[-1] for process in together]
    made = heavy[1:]  # PyTorch's kernels need no translator
    for cache, done, imported in ((folder, FOUND, []), (tmp_path / "other", MADE, made)):
        environment = {**os.environ, "ORT_TRAINER_EXPORT_IN_PROCESS": "1", "ORT_TRAINER_CACHE": str(cache)}
        printed = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300, env=environment
        ).stdout
        assert done in printed and printed.splitlines()[-1] == str(imported)
        results.append(printed.splitlines()[-2])
    assert len(set(results)) == 1 and results[0].startswith("['")
    assert len(entries(folder)) == 1 and not list(folder.glob("*.tmp"))


def test_an_export_that_is_none_is_made_again(folder: Path, log: pytest.LogCaptureFixture) -> None:
    """One with a valid checksum, as the user's own programs could write it, and one that is too large to read."""
    made = trained(MLP())
    (path,) = entries(folder)
    cache = export_cache()
    assert cache is not None
    for content in (b"", b"\xff" * 100, (2).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"):
        cache.store(path.stem, content)
        said(log)
        again = trained(MLP())
        text = said(log)
        assert "is damaged, so the model is exported again: this is not an export" in text and MADE in text
    assert again[0][0].shape == made[0][0].shape
    with path.open("wb") as file:
        file.truncate(2 << 30)
    assert "is larger than the cache limit" in cache.load(path.stem)[1]


def test_a_graph_that_does_not_load_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any) -> Any:
        raise ValueError("a node that the engine refuses")

    with monkeypatch.context() as patch:
        for runner in ("SessionRunner", "ProgramRunner"):
            patch.setattr(f"ort_trainer.engine.runners.{runner}", refuses)
        with pytest.raises(RuntimeError, match="can't load the training graph: a node that the engine refuses"):
            trained(MLP())
    assert entries(folder) == []
    trained(MLP())
    assert len(entries(folder)) == 1
