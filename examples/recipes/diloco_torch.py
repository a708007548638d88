"""DiLoCo: each process takes steps of its own, and now and then an outer optimizer follows their mean.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023. Start it with
`torchrun --nproc-per-node 2`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

OWN_STEPS = 5


def main(steps=100):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    common = [parameter.detach().clone() for parameter in model.parameters()]
    outer = torch.optim.SGD(common, lr=0.7, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(1, steps + 1):
        rows = torch.randint(len(images), (64,), generator=generator)
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        inner.step()
        inner.zero_grad()
        losses.append(loss.item())
        if step % OWN_STEPS == 0:
            with torch.no_grad():
                for weight, parameter in zip(common, model.parameters(), strict=True):
                    weight.grad = (weight - parameter) / size
                    dist.all_reduce(weight.grad)
                outer.step()
                for weight, parameter in zip(common, model.parameters(), strict=True):
                    parameter.copy_(weight)
    with torch.no_grad():
        hits = (model(images).argmax(1) == labels).sum().item()
    print(f"{hits} of 1797 digits are recognized")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
