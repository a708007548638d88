"""What other systems lack is not needed, and text files have the same encoding everywhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Libraries are imported first, because they have code of their own for each system.
ELSEWHERE = """
import _signal, multiprocessing, os, pkgutil, signal, sys, tempfile, types
from pathlib import Path
import numpy, onnx, onnxruntime, onnxscript, torch
import torch._dynamo, torch._functorch.aot_autograd, torch.export, torch.onnx

for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("fork", "kill", "register_at_fork", "sched_getaffinity", "set_blocking", "sysconf", "waitpid"):
    delattr(os, name)
for name in ("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "pthread_sigmask", "setitimer"):
    delattr(signal, name)
    delattr(_signal, name)
torch._C._has_mkldnn = False
torch.ops.mkldnn._linear_pointwise = torch.ops.aten.mkldnn_rnn_layer = types.SimpleNamespace(
    op_overloads=list, default=torch.ops.aten.mkldnn_rnn_layer.default
)  # which PyTorch's C++ code calls here
sys.platform = "win32"

import ort_trainer
from ort_trainer import ORTTrainer, ORTTrainerOptions, StopSignals, optim
from torch import nn

for module in pkgutil.walk_packages(ort_trainer.__path__, "ort_trainer."):
    if not module.name.endswith(("__main__", "integrations.transformers")):
        __import__(module.name)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 256)
        self.hidden, self.last = nn.Linear(256, 512), nn.Linear(512, 3)

    def forward(self, x):
        return self.last(self.hidden(self.lstm(x)[0][-1]).relu())

torch.manual_seed(0)
model, x, label = Model(), torch.randn(4, 80, 8), torch.randint(3, (80,))
expected = nn.functional.cross_entropy(model(x), label)
expected.backward()
gradients = [parameter.grad.clone() for parameter in model.parameters()]
before = [parameter.detach().clone() for parameter in model.parameters()]
model.zero_grad()
options = ORTTrainerOptions({"utils": {"kernels": "pytorch"}})
trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=1.0), nn.functional.cross_entropy, options)
with StopSignals() as stop:
    loss = trainer.train_step(x, label)[0]
torch.testing.assert_close(loss, expected.detach())
for now, weight, gradient in zip(model.parameters(), before, gradients):
    torch.testing.assert_close(weight - now.detach(), gradient, atol=1e-5, rtol=1e-3)
with tempfile.TemporaryDirectory() as folder:
    for _ in range(2):
        trainer.save_checkpoint(Path(folder, "a.ortckpt"), overwrite=True)
    trainer.export_artifacts(Path(folder, "artifacts"))
    trainer.load_checkpoint(Path(folder, "a.ortckpt"))
    print(sorted(os.listdir(folder)))
"""


def test_without_what_other_systems_lack() -> None:
    """Without fork, file locks, Unix's signals and oneDNN a model is exported, trained as in PyTorch, and saved."""
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "['a.ortckpt', 'artifacts']", done.stdout


@pytest.mark.parametrize("folder", ["ort_trainer", "examples", "docs"])
def test_text_files_have_an_encoding(folder: str) -> None:
    """Without one, Windows reads and writes them in the encoding of its language."""
    found = [place for path in (ROOT / folder).rglob("*.py") for place in unencoded(path)]
    assert not found


def unencoded(path: Path) -> list[str]:
    """Returns the calls that read or write text in the system's encoding."""
    found = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.Call) or "/proc/" in ast.unparse(node):  # which Linux alone has
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        module = getattr(getattr(node.func, "value", None), "id", "")
        if name not in ("open", "read_text", "write_text") or module in ("os", "tokenize", "webbrowser"):
            continue
        given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
        is_binary = any(isinstance(value, ast.Constant) and str(value.value).endswith("b") for value in given)
        if not is_binary and all(keyword.arg != "encoding" for keyword in node.keywords):
            found.append(f"{path}:{node.lineno}")
    return found
