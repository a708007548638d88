"""Distillation: a small network learns from a large one's softened answers as well as from the labels."""

import torch
import torch.nn.functional as F
from cookbook_data import batches
from torch import nn

from ort_trainer import ORTTrainer

EPOCHS, TEMPERATURE, SHARE = 6, 4.0, 0.7


def network(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def criterion(logits, label, soft):
    log_probability = F.log_softmax(logits / TEMPERATURE, dim=-1)
    distilled = F.kl_div(log_probability, soft, reduction="batchmean") * TEMPERATURE**2
    return SHARE * distilled + (1 - SHARE) * F.cross_entropy(logits, label)


def trained_teacher():
    teacher = network(256)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-2)
    for epoch in range(3):
        for image, label in batches(200, epoch):
            optimizer.zero_grad()
            F.cross_entropy(teacher(image), label).backward()
            optimizer.step()
    return teacher.eval()


@torch.no_grad()
def evaluate(model, name):
    hits = sum((model(image).argmax(1) == label).sum().item() for image, label in batches(500, 0))
    print(f"{name}: {hits} of 1797 digits are recognized")


def main(steps=54):
    torch.manual_seed(1)
    teacher, student = trained_teacher(), network(16)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    trainer = ORTTrainer(student, "auto", optimizer, loss_fn=criterion)
    losses = []
    for epoch in range(EPOCHS):
        for image, label in batches(200, epoch)[: steps - len(losses)]:
            with torch.no_grad():
                soft = F.softmax(teacher(image) / TEMPERATURE, dim=-1)
            loss, _ = trainer.train_step(image, label, soft)
            losses.append(loss.item())
    evaluate(teacher, "the teacher")
    evaluate(student, "the student")
    return losses


if __name__ == "__main__":
    main()
