"""The training API with only Python, NumPy, ONNX Runtime and xxhash installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from ort_trainer.artifacts import convert_checkpoint

from .exported import Exported, export

pytestmark = pytest.mark.engine

HAS_TRAINING = importlib.util.find_spec("onnxruntime.training") is not None
PACKAGES = ("numpy", "onnxruntime", "xxhash")
TRAIN = """
import importlib.util, json, sys
environment, artifacts = sys.argv[1:]
sys.path.append(environment)
for name in ("torch", "onnx", "cerberus", "google.protobuf", "networkx", "onnxscript", "h5py", "site"):
    assert name not in sys.modules
    assert name == "site" or importlib.util.find_spec(name.partition(".")[0]) is None, name
import numpy as np
from ort_trainer.api import CheckpointState, LinearLRScheduler, Module, Optimizer, TrainingSession

with np.load(f"{artifacts}/batches.npz") as file:
    batches = list(zip(file["x"], file["label"]))
state = CheckpointState.load_checkpoint(f"{artifacts}/checkpoint")
module = Module(f"{artifacts}/training_model.onnx", state, f"{artifacts}/eval_model.onnx")
optimizer = Optimizer(f"{artifacts}/optimizer_model.onnx", module)
losses = []
for x, label in batches:
    loss, logits = module(x, label)
    losses.append(float(loss))
    optimizer.step()
    module.lazy_reset_grad()
module.eval()
evaluated = float(module(*batches[0])[0])
module.export_model_for_inferencing(f"{artifacts}/alone.onnx", ["logits"])
CheckpointState.save_checkpoint(state, f"{artifacts}/alone", include_optimizer_state=True)
again = CheckpointState.load_checkpoint(f"{artifacts}/alone")
models = [open(f"{artifacts}/{kind}_model.onnx", "rb").read() for kind in ("training", "eval", "optimizer")]
session = TrainingSession(again, *models)
resumed = float(session.eval_step(batches[0])[0])
try:
    session.train_step([x, label - 5])
    raise AssertionError
except IndexError as error:
    assert "input 'label' has the value -" in str(error)
from ort_trainer.artifacts import convert_checkpoint, trainer_state_dict  # what converts needs no torch either
assert trainer_state_dict(f"{artifacts}/alone")["model"]["full_precision"].keys() >= set(again.parameters)
convert_checkpoint(f"{artifacts}/upstream", f"{artifacts}/converted", like=f"{artifacts}/checkpoint")
converted = CheckpointState.load_checkpoint(f"{artifacts}/converted")
Optimizer(models[2], Module(models[0], converted))
for name, parameter in CheckpointState.load_checkpoint(f"{artifacts}/checkpoint").parameters.items():
    assert np.array_equal(converted.parameters[name].data, parameter.data)
loaded = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"__main__", "__mp_main__"}
print(json.dumps({"losses": losses, "evaluated": evaluated, "resumed": resumed, "loaded": sorted(loaded)}))
"""


def make_environment(folder: Path) -> None:
    """Fills a folder with exactly what an environment with the extra [api] has and imports."""
    for name in (*PACKAGES, "ort_trainer"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        package = Path(spec.origin).parent
        libraries = package.parent / f"{name}.libs"  # libraries bundled with a wheel
        for part in (package, libraries):
            if part.exists():
                (folder / part.name).symlink_to(part)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    make_environment(folder)
    return folder


def run_alone(program: str, environment: Path, artifacts: Path) -> str:
    """Runs a program in isolation, without the folders of installed packages, and returns its output."""
    command = [sys.executable, "-I", "-S", "-c", program, str(environment), str(artifacts)]
    done = subprocess.run(command, cwd=artifacts, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def exported(tmp_path: Path) -> Exported:
    found = export(tmp_path)
    x, label = zip(*found.batches, strict=True)
    with pytest.warns(UserWarning, match="can't store the state of the random numbers"):
        convert_checkpoint(found.file("checkpoint"), found.file("upstream"))
    np.savez(found.file("batches.npz"), x=np.stack(x), label=np.stack(label))
    return found


def test_training_without_torch_and_onnx(environment: Path, exported: Exported) -> None:
    found = json.loads(run_alone(TRAIN, environment, exported.folder))
    assert found["loaded"] == ["numpy", "onnxruntime", "ort_trainer", "xxhash"]
    np.testing.assert_allclose(found["losses"], exported.train(len(exported.batches)), rtol=1e-5)
    expected = exported.loss(0)
    np.testing.assert_allclose([found["evaluated"], found["resumed"]], [expected, expected], rtol=1e-5)
    session = onnxruntime.InferenceSession(str(exported.file("alone.onnx")), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"]
    with_torch = exported.model(torch.from_numpy(exported.batches[0][0])).detach().numpy()
    np.testing.assert_allclose(session.run(None, {"x": exported.batches[0][0]})[0], with_torch, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(HAS_TRAINING, reason="onnxruntime.training of this engine needs onnx")
def test_an_unchanged_script_without_torch(environment: Path, exported: Exported) -> None:
    script = Path(__file__).parent.parent / "compat" / "scripts" / "on_device_like.py"
    program = f"""if True:
        import runpy, sys
        sys.path.append(sys.argv.pop(1))
        import ort_trainer.compat as compat
        compat.install()
        compat.install()
        runpy.run_path({str(script)!r}, run_name='__main__')
        for name in ('ORTTrainer', 'artifacts'):
            try:
                exec('from onnxruntime.training import ' + name)
                raise AssertionError
            except ImportError as error:
                assert f'onnxruntime.training.{{name}} ' in str(error) and 'torch is not installed' in str(error)
        compat.uninstall()
        assert not [name for name in sys.modules if name.startswith('onnxruntime.training')]
        assert 'torch' not in sys.modules
    """
    said = run_alone(program, environment, exported.folder)
    assert said.startswith(f"loss {exported.loss(0):.5f}") and said.endswith("epoch 1 4\n")
