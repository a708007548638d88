"""A residual network: SGD with momentum, a cosine schedule, label smoothing, and an average of the weights."""

import torch
import torch.nn.functional as F
from cookbook_data import batches
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ort_trainer import ORTTrainer, optim

EPOCHS = 6


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        skipped = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + skipped)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.layers = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2))
        self.fc = nn.Linear(32, 10)

    def forward(self, image):
        return self.fc(self.layers(self.stem(image)).mean((2, 3)))


@torch.no_grad()
def evaluate(model, name):
    model.eval()
    hits = sum((model(image).argmax(1) == target).sum().item() for image, target in batches(500, 0))
    print(f"{name}: {hits} of 1797 digits are recognized")


def main(steps=54):
    torch.manual_seed(1)
    model = ResNet()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS)
    model_ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    trainer = ORTTrainer(model, "auto", optim.from_torch(optimizer), loss_fn=criterion)
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        for image, target in batches(200, epoch)[: steps - len(losses)]:
            loss, _ = trainer.train_step(image, target)
            model_ema.update_parameters(model)
            losses.append(loss.item())
        scheduler.step()
    evaluate(model, "the weights")
    evaluate(model_ema, "their average")
    return losses


if __name__ == "__main__":
    main()
