"""As it was written for onnxruntime.capi.ort_trainer in 2020: nothing in here knows of ort_trainer."""

import sys

import onnxruntime.capi.ort_trainer as ort
import torch
from onnxruntime.capi.ort_trainer import IODescription, ModelDescription, ORTTrainer


class NeuralNet(torch.nn.Module):
    def __init__(self):
        super(NeuralNet, self).__init__()
        self.fc1 = torch.nn.Linear(12, 16)
        self.fc2 = torch.nn.Linear(16, 10)

    def forward(self, input1):
        return self.fc2(torch.relu(self.fc1(input1)))


def my_loss(x, target):
    return torch.nn.CrossEntropyLoss()(x, target)


def map_optimizer_attributes(name):
    no_decay = any(key in name for key in ["bias", "gamma", "beta"])
    return {"alpha": 0.9, "beta": 0.999, "lambda": 0.0 if no_decay else 0.01, "epsilon": 1e-8, "do_bias_correction": 1}


input_desc = IODescription("input1", ["batch", 12], torch.float32)
label_desc = IODescription("label", ["batch"], torch.int64, num_classes=10)
loss_desc = IODescription("loss", [], torch.float32)
probability_desc = IODescription("probability", ["batch", 10], torch.float32)
model_desc = ModelDescription([input_desc, label_desc], [loss_desc, probability_desc])
lr_desc = IODescription("Learning_Rate", [1], torch.float32)

torch.manual_seed(1)
device = torch.device("cpu")
model = ORTTrainer(
    NeuralNet(),
    my_loss,
    model_desc,
    "AdamOptimizer",
    map_optimizer_attributes,
    lr_desc,
    device,
    gradient_accumulation_steps=2,
    enable_grad_norm_clip=False,
    _opset_version=12,
)
assert ort.generate_sample(label_desc, device).shape == (1,)

generator = torch.Generator().manual_seed(2)
model.train()
for step in range(8):
    data = torch.randn(5, 12, generator=generator)
    target = torch.randint(0, 10, (5,), generator=generator)
    learning_rate = torch.tensor([0.01 * (step // 2 + 1)])
    loss, probability = model(data, target, learning_rate)
    print("loss", loss.item())

model.eval()
print("probability", *model(data, fetches=["probability"]).flatten().tolist())

ort.save_checkpoint(model, sys.argv[1], "old", {"epoch": 1})
assert ort.load_checkpoint(model, sys.argv[1], "old") == {"epoch": 1}
state = model.state_dict()
print("norm", *[state[name].norm().item() for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")])
assert state["Moment_1_fc1.weight"].shape == (16, 12)
