"""Ray Train: two workers share each batch; if one is lost, Ray starts both again from the last checkpoint."""

import tempfile

import ray.train
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import nn


def digits():
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def train(config):
    torch.set_num_threads(1)
    images, labels = digits()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = prepare_model(model)
    losses = []
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            model.load_state_dict(torch.load(f"{folder}/model.pt"))
            optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt"))
            losses = torch.load(f"{folder}/losses.pt")
    rank = ray.train.get_context().get_world_rank()
    for step in range(len(losses), config["steps"]):
        rows = torch.randint(len(images), (32,), generator=torch.Generator().manual_seed(2 * step + rank))
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 10 == 0:
            with tempfile.TemporaryDirectory() as folder:
                torch.save(model.state_dict(), f"{folder}/model.pt")
                torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")
                torch.save(losses, f"{folder}/losses.pt")
                checkpoint = Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report({"losses": losses}, checkpoint=checkpoint)


def main(steps=60):
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            train,
            train_loop_config={"steps": steps},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        ).fit()
        losses = result.metrics["losses"]
    print(f"the last loss is {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
