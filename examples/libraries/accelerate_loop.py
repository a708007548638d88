"""A loop of accelerate: accumulation, clipping, a schedule, and the model's own weights at the end."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(steps=20):
    set_seed(1)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, DataLoader(data, batch_size=32, shuffle=True)
    )
    losses = []
    for image, label in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(image), label)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == 2 * steps:
            break
    weights = accelerator.unwrap_model(model).state_dict()
    assert list(weights) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    return losses


if __name__ == "__main__":
    print(f"the loss is {main()[-1]:.3f}")
