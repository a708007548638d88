"""On-device training as ONNX Runtime's documentation shows it: a folder with artifacts and data, two epochs."""

import sys

import numpy as np
from onnxruntime import InferenceSession
from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer

path_to_artifacts = sys.argv[1]
data = np.load(f"{path_to_artifacts}/batches.npz")

# Load the checkpoint state
state = CheckpointState.load_checkpoint(f"{path_to_artifacts}/checkpoint")

# Create the module
model = Module(
    f"{path_to_artifacts}/training_model.onnx",
    state,
    f"{path_to_artifacts}/eval_model.onnx",
    device="cpu",
)
optimizer = Optimizer(f"{path_to_artifacts}/optimizer_model.onnx", model)
scheduler = LinearLRScheduler(optimizer, warmup_step_count=2, total_step_count=12, initial_lr=0.1)


def trainEpoch():
    model.train()
    for x, label in zip(data["x"], data["label"], strict=True):
        forward_inputs = [x, label]
        train_loss, _ = model(*forward_inputs)
        optimizer.step()
        scheduler.step()
        model.lazy_reset_grad()
        print("loss", train_loss)


def testEpoch():
    model.eval()
    losses = []
    for x, label in zip(data["x"], data["label"], strict=True):
        test_loss, _ = model(x, label)
        losses.append(test_loss)
    print("test", sum(losses) / len(losses))


for epoch in range(2):
    trainEpoch()
    testEpoch()
    state.properties["epoch"] = epoch

model.export_model_for_inferencing(f"{path_to_artifacts}/inference_model.onnx", ["logits"])
CheckpointState.save_checkpoint(state, f"{path_to_artifacts}/checkpoint", include_optimizer_state=True)

session = InferenceSession(f"{path_to_artifacts}/inference_model.onnx", providers=["CPUExecutionProvider"])
output = session.run(["logits"], {session.get_inputs()[0].name: data["x"][0]})
print("logits", *output[0].ravel())

from onnxruntime.training.api.checkpoint_state import Parameters, Properties  # noqa: E402

state = CheckpointState.load_checkpoint(f"{path_to_artifacts}/checkpoint")
assert isinstance(state.parameters, Parameters) and isinstance(state.properties, Properties)
for name, parameter in state.parameters:
    assert parameter.name == name and state.parameters[name] is parameter
assert list(state.properties) == list(state.properties.items()) == [("epoch", 1)]
assert list(dict(state.parameters)) == [name for name, _ in state.parameters]
print("epoch", state.properties["epoch"], len(state.parameters))
