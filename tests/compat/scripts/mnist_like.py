"""As it was written for onnxruntime.training in 2021: nothing in here knows of ort_trainer."""

import sys

import torch
from onnxruntime.training import ORTTrainer, ORTTrainerOptions, amp, checkpoint, optim
from onnxruntime.training.optim import AdamConfig, LinearWarmupLRScheduler


class NeuralNet(torch.nn.Module):
    def __init__(self, input_size, hidden_size, num_classes):
        super(NeuralNet, self).__init__()
        self.fc1 = torch.nn.Linear(input_size, hidden_size)
        self.relu = torch.nn.ReLU()
        self.fc2 = torch.nn.Linear(hidden_size, num_classes)

    def forward(self, input1):
        out = self.fc1(input1)
        out = self.relu(out)
        out = self.fc2(out)
        return out


def my_loss(x, target):
    return torch.nn.CrossEntropyLoss()(x, target)


def mnist_model_description():
    return {
        "inputs": [("input1", ["batch", 12]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("probability", ["batch", 10])],
    }


torch.manual_seed(1)
model = NeuralNet(12, 16, 10)
optim_config = AdamConfig(
    params=[{"params": ["fc1.bias", "fc2.bias"], "lambda_coef": 0.0}], lr=1e-2, alpha=0.9, beta=0.999, lambda_coef=0.01
)
opts = ORTTrainerOptions(
    {
        "batch": {"gradient_accumulation_steps": 2},
        "device": {"id": "cpu"},
        "lr_scheduler": LinearWarmupLRScheduler(total_steps=10, warmup=0.2),
        "mixed_precision": {"enabled": False},
        "utils": {"grad_norm_clip": False},
        "graph_transformer": {"propagate_cast_ops_config": {"propagate_cast_ops_level": 1}},
        "_internal_use": {"onnx_opset_version": 14},
    }
)
assert not opts.mixed_precision.enabled
assert opts._validated_opts["batch"]["gradient_accumulation_steps"] == 2
assert isinstance(amp.DynamicLossScaler(), amp.LossScaler) and isinstance(optim_config, optim.AdamConfig)

trainer = ORTTrainer(model, mnist_model_description(), optim_config, my_loss, opts)
generator = torch.Generator().manual_seed(2)
for step in range(8):
    data = torch.randn(5, 12, generator=generator)
    target = torch.randint(0, 10, (5,), generator=generator)
    loss, probability = trainer.train_step(data, target)
    print("loss", loss.item())

trainer._train_step_info.fetches = ["probability"]
print("probability", *trainer.eval_step(data).flatten().tolist())
trainer._train_step_info.fetches = []

trainer.save_checkpoint(sys.argv[1], {"step": step})
assert trainer.load_checkpoint(sys.argv[1]) == {"step": 7}
state = checkpoint.experimental_state_dict(trainer)
print("norm", *[state[name].norm().item() for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")])
assert int(state["Update_Count_fc1.weight"]) == 5
trainer.save_as_onnx(sys.argv[1] + ".onnx")
