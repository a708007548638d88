"""Every example runs and does what it says."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from ort_trainer.state import load_checkpoint_file

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the script's folder on the path, as for a script, and uses one thread."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    torch.set_num_threads(1)  # on a busy machine, several threads mostly wait for each other


def example(name: str) -> ModuleType:
    """Imports an example that needs the transformers library; skips the test without it."""
    pytest.importorskip("transformers")
    return importlib.import_module(name)


def test_characters(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "characters.py", "--out", str(tmp_path), "--steps", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "fixes" not in done.stderr
    losses = dict(re.findall(r"^(ORTTrainer|PyTorch) +([\d.]+) +[\d.]+$", done.stdout, re.MULTILINE))
    assert losses["ORTTrainer"] == losses["PyTorch"] and float(losses["PyTorch"]) < 3
    first, scores = re.findall(r"by a relative (\de-\d+)", done.stdout)
    assert float(first) < 1e-5 and float(scores) < 1e-5
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"characters.{kind}" for kind in ("onnx", "ortckpt", "png")]


def test_digits(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "digits.py", "--out", str(tmp_path), "--epochs", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    scores = dict(re.findall(r"^(ORTTrainer|PyTorch|digits\.onnx).*?([\d.]+)%", done.stdout, re.MULTILINE))
    assert float(scores["ORTTrainer"]) > 93
    # PyTorch's kernels and ONNX Runtime's round otherwise, which decides an image with two equal scores: one of 360.
    assert abs(float(scores["digits.onnx"]) - float(scores["ORTTrainer"])) < 0.3
    assert abs(float(scores["PyTorch"]) - float(scores["ORTTrainer"])) < 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["digits.onnx", "digits.ortckpt", "loss.png"]
    state, user = load_checkpoint_file(tmp_path / "digits.ortckpt")
    assert state["train_step_info"]["step"] == 5 * 23 and user["accuracy"] > 0.93


@pytest.mark.engine
@pytest.mark.skipif(not hasattr(onnxruntime, "LoraAdapter"), reason="onnxruntime has adapters from 1.20 on")
def test_adapters(tmp_path: Path) -> None:
    found = importlib.import_module("adapters").main(["--out", str(tmp_path), "--steps", "20"])
    assert found.english_after < found.english_before - 0.1
    assert found.served == pytest.approx(found.english_after, rel=1e-4)
    assert found.adapter_bytes < found.base_bytes / 5
    assert len({*found.samples.values()}) == 2


def test_adapters_asks_first_for_an_engine_that_serves_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(onnxruntime, "LoraAdapter", raising=False)
    with pytest.raises(SystemExit, match=r"can't serve adapters: this example needs 1.20 or newer. .* demo-adapters"):
        importlib.import_module("adapters").main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_what_the_browser_trains_from(tmp_path: Path) -> None:
    """Checks that the page's files are written; `make test-browser` trains with them in a browser."""
    browser = ROOT / "examples" / "browser"
    importlib.import_module("browser.make_artifacts").main(["--out", str(tmp_path), "--epochs", "3"])
    fetched = re.findall(r'"([a-z_]+\.(?:onnx|json|bin)|checkpoint)"', (browser / "page.js").read_text())
    assert len(fetched) == 6 and {path.name for path in tmp_path.iterdir()} >= set(fetched)
    plan = json.loads((tmp_path / "plan.json").read_text())
    rows = plan["train_rows"] + plan["test_rows"]
    assert (tmp_path / "digits.bin").stat().st_size == rows * (64 + 1)
    assert all(sorted(order) == list(range(plan["train_rows"])) for order in plan["orders"])
    assert len(plan["losses"]) == 3 * 23 and plan["losses"][-1] < 0.5 * plan["losses"][0]
    # Packages come from the registry that npm is configured for.
    for folder in (browser, ROOT / "js"):
        assert "://" not in (folder / "package-lock.json").read_text()


def test_federated(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    federated = importlib.import_module("federated")
    monkeypatch.setattr(federated, "TROUBLE", {1: "nan:3", 4: "dies:8"})
    federated.main(["--out", str(tmp_path), "--rounds", "8", "--no-flower"])
    printed = capsys.readouterr().out
    found = dict(re.findall(r"^(one trainer|clients, averaged|clients, each).*: ([\d.]+)%$", printed, re.MULTILINE))
    scores = {name: float(score) for name, score in found.items()}
    # Each client has only two of the ten digits; only their averaged model knows all.
    assert scores["one trainer"] > 90 and scores["clients, averaged"] > 45 and scores["clients, each"] < 25
    assert "round  3: the answer of client 1 is not a number: refused" in printed
    assert "round  8: client 4 has ended with code 1" in printed
    (plot,) = re.findall(r"^plot: (.*)$", printed, re.MULTILINE)
    assert Path(plot).parent == tmp_path and Path(plot).stat().st_size


def test_federated_flower(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower is no requirement of the tests: pip install 'flwr[simulation]'."""
    for package in ("flwr", "ray"):
        pytest.importorskip(package)
    monkeypatch.setattr(importlib.import_module("federated"), "TROUBLE", {1: "nan:2", 4: "dies:3"})
    importlib.import_module("federated").main(["--out", str(tmp_path), "--rounds", "4", "--flower"])
    printed = capsys.readouterr().out
    assert "round  2: the answer of a client is not a number: refused" in printed
    assert "round  3: a client has failed" in printed and "round  4: accuracy" in printed


def test_text_data() -> None:
    text_data = example("text_data")
    data, again = text_data.load_text_data(300), text_data.load_text_data(300)
    assert (len(data.train), len(data.test)) == (240, 60)
    assert data.train == again.train and data.test == again.test
    assert data.tokenizer.get_vocab() == again.tokenizer.get_vocab()
    assert set(text_data.labelled_texts().values()) == set(range(len(text_data.PACKAGES)))
    assert not any("asyncio" in text.lower() for text in text_data.labelled_texts())
    assert 1 / len(text_data.PACKAGES) < data.baseline < 0.4

    first = [batch["input_ids"] for batch in text_data.train_batches(data, 16, seed=3, epoch=1)]
    same = [batch["input_ids"] for batch in text_data.train_batches(data, 16, seed=3, epoch=1)]
    other = [batch["input_ids"] for batch in text_data.train_batches(data, 16, seed=3, epoch=2)]
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, other, strict=True))
    before = torch.get_rng_state()
    assert sum(len(batch["labels"]) for batch in text_data.held_out_batches(data, 16)) == 60
    assert torch.equal(torch.get_rng_state(), before)


# 71 micro-batches per epoch and 2 per update: accumulation windows extend across the ends of epochs.
FINETUNE = ["--epochs", "5", "--batch-size", "8", "--limit", "710"]


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Returns the folder and the result of a fine-tuning; a copy of the folder from the fourth epoch is beside it."""
    out = tmp_path_factory.mktemp("finetuned") / "whole"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the tests: sums in another order would not be bitwise equal
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.syspath_prepend(str(ROOT / "examples"))
        script = example("finetune_text_classification")
        evaluate, evaluations = script.evaluate, []

        def copy_and_evaluate(*args: Any) -> float:
            evaluations.append(args)
            if len(evaluations) == 4:
                shutil.copytree(out, out.parent / "interrupted")
            return evaluate(*args)

        patch.setattr(script, "evaluate", copy_and_evaluate)
        result = script.main([*FINETUNE, "--out", str(out)])
    torch.set_num_threads(threads)
    return out, result


def test_finetune_text_classification(finetuned: tuple[Path, Any]) -> None:
    out, result = finetuned
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert len(result.losses) == 5 * 71
    assert max(result.accuracies) > result.baseline + 0.1
    _, best = load_checkpoint_file(out / "best.ortckpt")
    assert best["accuracies"][-1] == max(result.accuracies) and best["epoch"] == len(best["accuracies"])
    model = AutoModelForSequenceClassification.from_pretrained(out / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(out / "model", local_files_only=True)
    batch = tokenizer(["Return the event loop.", "Parse a header of a message."], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**batch).logits.numpy()
    session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
    (onnx_logits,) = session.run(["logits"], {name: values.numpy() for name, values in batch.items()})
    np.testing.assert_allclose(onnx_logits, logits, rtol=1e-4, atol=1e-4)
    assert model.config.id2label[0] == "asyncio"


def test_finetune_text_classification_resumed(finetuned: tuple[Path, Any]) -> None:
    out, result = finetuned
    parts = out.parent / "interrupted"
    assert load_checkpoint_file(parts / "last.ortckpt")[1]["epoch"] == 3
    resumed = example("finetune_text_classification").main([*FINETUNE, "--out", str(parts), "--resume"])
    assert load_checkpoint_file(parts / "last.ortckpt")[1]["epoch"] == 5
    assert resumed == result


def test_finetune_text_classification_pytorch(
    finetuned: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, result = finetuned
    twin = example("finetune_text_classification_pytorch").main([*FINETUNE, "--out", str(tmp_path)])
    np.testing.assert_allclose(twin.losses, result.losses, rtol=1e-4)
    assert twin.accuracies == result.accuracies and twin.baseline == result.baseline
    printed = [float(mean) for mean in re.findall(r"mean loss ([\d.]+)", capsys.readouterr().out)]
    np.testing.assert_allclose(printed, np.reshape(result.losses, (5, 71)).mean(1), rtol=1e-4)
    files = [sorted(path.name for path in folder.iterdir()) for folder in (out / "model", tmp_path / "model")]
    assert files[0] == files[1]


def test_language_model(tmp_path: Path) -> None:
    script = example("language_model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = ["--limit", "20", "--steps", "40", "--batch-size", "4", "--out", str(tmp_path)]
    result = script.main(settings)
    assert len(result.losses) == 40
    assert result.perplexity_after < result.perplexity_before / 2
    assert result.perplexity_in_pytorch == pytest.approx(result.perplexity_after, rel=1e-4)
    assert [sample[: len(prompt)] for sample, prompt in zip(result.samples, script.PROMPTS, strict=True)] == list(
        script.PROMPTS
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    torch.manual_seed(0)
    assert [script.write(model, tokenizer, prompt) for prompt in script.PROMPTS] == result.samples


def torchrun(*arguments: str | Path) -> str:
    """Runs a script in two processes; returns their output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# In the first run, one of the two processes dies in the second epoch, as if it were out of memory.
KILLED = """
import os, runpy, signal, sys
from ort_trainer import ORTTrainer

train_step = ORTTrainer.train_step

def dying(trainer, *batch):
    if trainer.train_step_info.step == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(trainer, *batch)

if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    ORTTrainer.train_step = dying
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.slow
def test_distributed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, whole, resumed = ROOT / "examples" / "distributed.py", tmp_path / "whole", tmp_path / "resumed"
    printed = torchrun(script, "--epochs", "3", "--checkpoint", whole)
    importlib.import_module("distributed").main(["--epochs", "3"])
    alone = capsys.readouterr().out
    losses = [line for line in alone.splitlines() if line.startswith("epoch")]
    assert len(losses) == 3 and [line for line in printed.splitlines() if line.startswith("epoch")] == losses
    accuracies = re.findall(r"^(\d) process.*?([\d.]+)%$", alone + printed, re.MULTILINE)
    assert [count for count, _ in accuracies] == ["1", "2"] and float(accuracies[0][1]) > 80

    (tmp_path / "killed.py").write_text(KILLED)
    restarts = ["--max-restarts", "3", tmp_path / "killed.py", script, "--epochs", "3"]
    again = torchrun(*restarts, "--checkpoint", resumed, "--resume")
    # Only once, before the kill.
    assert (
        len(re.findall(r"^epoch 1:", again, re.MULTILINE)) == 1 and again.splitlines()[-1:] == printed.splitlines()[-1:]
    )
    states = [load_checkpoint_file(path)[0] for path in (whole, resumed)]
    for part in ("model", "optimizer"):
        expected, found = (dict(_arrays(state[part])) for state in states)
        assert expected.keys() == found.keys() and len(found) >= 6
        assert all(np.array_equal(found[name], value) for name, value in expected.items())


def _arrays(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the arrays in nested dicts."""
    for key, inner in value.items():
        yield from _arrays(inner, f"{path}/{key}") if isinstance(inner, dict) else [(f"{path}/{key}", inner)]


def test_every_example_has_a_test() -> None:
    tested = re.findall(r"def test_(\w+)", Path(__file__).read_text())
    # The process of federated.py starts the client.
    assert {path.stem.removesuffix("_client") for path in (ROOT / "examples").glob("*.py")} <= set(tested)


NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    """They have plain Python alone, so it takes no Jupyter; what they claim is in their own assertions."""
    scope: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), scope)


def test_notebooks_are_committed_without_results() -> None:
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells), path.name
