"""YOLO of ultralytics, by its own trainer, finds squares in images made here."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from ultralytics.models.yolo.detect import DetectionTrainer


class Trainer(DetectionTrainer):
    """Trains only: what it finds is not scored."""

    def get_model(self, cfg=None, weights=None, verbose=True):
        model = super().get_model(cfg, weights, verbose)  # a name, for the line to add
        return model  # noqa: RET504

    def validate(self):
        return {}, 0.0

    def final_eval(self):
        pass


def squares(folder, count):
    """Writes images with one square each, and where it is."""
    generator = np.random.default_rng(1)
    for number in range(count):
        image = generator.integers(0, 60, (64, 64, 3), np.uint8)
        x, y, size = generator.integers(4, 36), generator.integers(4, 36), generator.integers(8, 24)
        image[y : y + size, x : x + size] = (250, 200, 50)
        Image.fromarray(image).save(folder / "images" / f"{number}.png")
        box = " ".join(f"{value / 64:.4f}" for value in (x + size / 2, y + size / 2, size, size))
        (folder / "labels" / f"{number}.txt").write_text(f"0 {box}\n", encoding="utf-8")


def main(steps=20):
    torch.manual_seed(1)
    losses = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("images", "labels"):
            (folder / part).mkdir()
        squares(folder, 4 * steps)
        data = f"path: {folder}\ntrain: images\nval: images\nnames: [square]\n"
        (folder / "data.yaml").write_text(data, encoding="utf-8")
        settings = {
            "model": "yolo11n.yaml", "data": str(folder / "data.yaml"), "imgsz": 64, "batch": 4, "epochs": 1,
            "device": "cpu", "workers": 0, "val": False, "plots": False, "save": False, "amp": False, "nbs": 4,
            "optimizer": "AdamW", "lr0": 1e-3, "project": name, "verbose": False,
        }  # fmt: skip
        trainer = Trainer(overrides=settings)
        trainer.add_callback("on_train_batch_end", lambda trainer: losses.append(trainer.loss.item()))
        trainer.train()
    return losses


if __name__ == "__main__":
    print(f"the loss is {main()[-1]:.3f}")
