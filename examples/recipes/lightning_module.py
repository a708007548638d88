"""A LightningModule: Trainer, logs, checkpoints and schedules are Lightning's."""

import tempfile

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ort_trainer import ORTTrainer


def digits():
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.automatic_optimization = False
        self.losses = []

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]

    def on_fit_start(self):
        self.ort = ORTTrainer(self.model, "auto", self.optimizers().optimizer, loss_fn=F.cross_entropy)

    def training_step(self, batch):
        image, label = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss, _ = self.ort.forward_backward(image, label)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("loss", loss)
        self.losses.append(loss.item())

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def validation_step(self, batch):
        image, label = batch
        self.log("accuracy", (self.model(image).argmax(1) == label).float().mean())


def main(steps=90):
    lightning.seed_everything(1, verbose=False)
    module = Digits()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=steps,
            max_epochs=-1,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(digits(), batch_size=64, shuffle=True))
        (found,) = trainer.validate(module, DataLoader(digits(), batch_size=599), verbose=False)
    print(f"{trainer.global_step} steps, accuracy {found['accuracy']:.3f}")
    return module.losses


if __name__ == "__main__":
    main()
