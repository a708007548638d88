"""A convolutional network for handwritten digits: Adadelta, and a rate that falls after each epoch."""

import torch
import torch.nn.functional as F
from cookbook_data import batches
from torch import nn
from torch.optim.lr_scheduler import StepLR

from ort_trainer import ORTTrainer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, image):
        x = F.relu(self.conv1(image))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(model, trainer, epoch, steps, losses):
    model.train()
    for data, target in batches(200, epoch)[: steps - len(losses)]:
        loss, _ = trainer.train_step(data, target)
        losses.append(loss.item())


@torch.no_grad()
def test(model):
    model.eval()
    hits = sum((model(data).argmax(1) == target).sum().item() for data, target in batches(500, 0))
    print(f"{hits} of 1797 digits are recognized")


def main(steps=90):
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    trainer = ORTTrainer(model, "auto", optimizer, loss_fn=F.nll_loss)
    losses = []
    epoch = 0
    while len(losses) < steps:
        train(model, trainer, epoch, steps, losses)
        test(model)
        scheduler.step()
        epoch += 1
    return losses


if __name__ == "__main__":
    main()
