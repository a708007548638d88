"""Segmentation of digits from their background with segmentation_models_pytorch."""

import segmentation_models_pytorch as smp
import torch
from sklearn.datasets import load_digits

CASES = {
    "Unet": (smp.Unet, {}),
    "FPN": (smp.FPN, {"decoder_dropout": 0.0}),
    "DeepLabV3Plus": (smp.DeepLabV3Plus, {"decoder_aspp_dropout": 0.0}),
}


def main(steps=20, case="Unet"):
    torch.manual_seed(1)
    images = torch.tensor(load_digits().images / 16, dtype=torch.float32)[:, None]
    images = images.repeat_interleave(4, 2).repeat_interleave(4, 3)
    kind, options = CASES[case]
    model = kind("resnet18", encoder_weights=None, in_channels=1, classes=1, **options)
    loss_fn = smp.losses.DiceLoss("binary")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        image = images[torch.randint(len(images), (8,), generator=torch.Generator().manual_seed(step))]
        loss = loss_fn(model(image), (image > 0.3).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(f"the loss is {main()[-1]:.3f}")
