"""Networks and losses of MONAI on volumes made of digits."""

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import UNETR, SegResNet, UNet
from sklearn.datasets import load_digits

CASES = {
    "UNet": lambda: UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1),
    "SegResNet": lambda: SegResNet(init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1), blocks_up=(1,)),
    "UNETR": lambda: UNETR(1, 2, (16, 16, 16), 8, 32, 64, 4),
}


def main(steps=20, case="UNet"):
    torch.manual_seed(1)
    images = torch.tensor(load_digits().images / 16, dtype=torch.float32)
    volumes = images[:1792].view(-1, 1, 16, 8, 8).repeat_interleave(2, 3).repeat_interleave(2, 4)
    model = CASES[case]()
    loss_fn = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        volume = volumes[torch.randint(len(volumes), (4,), generator=torch.Generator().manual_seed(step))]
        loss = loss_fn(model(volume), (volume > 0.3).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(f"the loss is {main()[-1]:.3f}")
