"""A CLIP of open_clip learns digits and their names."""

import torch
from open_clip import CLIP, ClipLoss, SimpleTokenizer
from sklearn.datasets import load_digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def main(steps=20):
    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1)
    images = images.repeat_interleave(4, 2).repeat_interleave(4, 3)
    texts = SimpleTokenizer()([f"a {NAMES[digit]}" for digit in digits.target], 8)
    vision = {"image_size": 32, "patch_size": 8, "width": 64, "head_width": 16, "layers": 2}
    text = {"context_length": 8, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 2}
    model = CLIP(32, vision, text)
    loss_fn = ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        rows = torch.randint(len(images), (16,), generator=torch.Generator().manual_seed(step))
        loss = loss_fn(*model(images[rows], texts[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(f"the loss is {main()[-1]:.3f}")
