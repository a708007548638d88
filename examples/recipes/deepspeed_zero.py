"""DeepSpeed's ZeRO in stages 1 to 3: optimizer states, gradients and weights are divided among the processes.

Start it with `torchrun --nproc-per-node 2`.
"""

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.utils import set_z3_leaf_modules
from sklearn.datasets import load_digits
from torch import nn

from ort_trainer import ORTModule


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def trained(stage, steps):
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), Block(32), Block(32), nn.Linear(32, 10))
    model[1], model[2] = ORTModule(model[1]), ORTModule(model[2])
    set_z3_leaf_modules(model, [Block])
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(engine.global_rank)
    losses = []
    for _ in range(steps):
        rows = torch.randint(len(images), (32,), generator=generator)
        loss = F.cross_entropy(engine(images[rows]), labels[rows])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with torch.no_grad():
        hits = (engine(images).argmax(1) == labels).sum().item()
    print(f"stage {stage}: {hits} of 1797 digits are recognized")
    return losses


def main(steps=60):
    return [loss for stage in (1, 2, 3) for loss in trained(stage, steps)]


if __name__ == "__main__":
    main()
