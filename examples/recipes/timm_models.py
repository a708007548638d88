"""Classifiers of timm on handwritten digits: a ResNet and a vision transformer, with timm's optimizer and schedule."""

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

from ort_trainer import ORTTrainer

MODELS = {
    "resnet10t": {},
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2},
}


def batches(size, epoch):
    images, labels = load_digits(return_X_y=True)
    images = F.interpolate(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, size=32)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    return [(images[rows], torch.tensor(labels)[rows]) for rows in order.split(size)]


@torch.no_grad()
def evaluate(model, name):
    model.eval()
    hits = sum((model(image).argmax(1) == label).sum().item() for image, label in batches(300, 0))
    print(f"{name}: {hits} of 1797 digits are recognized")


def trained(name, arguments, steps):
    torch.manual_seed(1)
    model = timm.create_model(name, num_classes=10, in_chans=1, **arguments)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=steps, warmup_t=5, warmup_lr_init=1e-4)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    trainer = ORTTrainer(model, "auto", optimizer, loss_fn=criterion)
    losses = []
    while len(losses) < steps:
        model.train()
        for image, label in batches(64, len(losses))[: steps - len(losses)]:
            loss, _ = trainer.train_step(image, label)
            losses.append(loss.item())
            scheduler.step(len(losses))
    evaluate(model, name)
    return losses


def main(steps=112):
    return [loss for name, arguments in MODELS.items() for loss in trained(name, arguments, steps // 2)]


if __name__ == "__main__":
    main()
