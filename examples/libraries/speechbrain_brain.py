"""A Brain of SpeechBrain tells tones apart by their spectra."""

import speechbrain as sb
import torch
from speechbrain.lobes.features import Fbank
from speechbrain.lobes.models.Xvector import Xvector
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tones(sb.Brain):
    """Collects the loss of each batch, too."""

    losses = ()

    def compute_forward(self, batch, stage):
        sound, _ = batch
        return self.modules.head(self.modules.embed(self.hparams.features(sound)).squeeze(1))

    def compute_objectives(self, predictions, batch, stage):
        loss = nn.functional.cross_entropy(predictions, batch[1])
        self.losses = [*self.losses, loss.item()]
        return loss


def main(steps=20):
    torch.manual_seed(1)
    embed = Xvector(
        in_channels=40, lin_neurons=32, tdnn_channels=[32, 32, 64], tdnn_kernel_sizes=[5, 3, 1],
        tdnn_dilations=[1, 2, 1], tdnn_blocks=3,
    )  # fmt: skip
    head = nn.Linear(32, 10)
    brain = Tones(
        {"embed": embed, "head": head}, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        {"features": Fbank(n_mels=40)}, {"device": "cpu", "noprogressbar": True},
    )  # fmt: skip
    labels = torch.randint(10, (steps * 8,))
    sounds = torch.sin(torch.arange(4000) * 0.02 * (1 + labels[:, None]))
    brain.fit(range(1), DataLoader(TensorDataset(sounds, labels), batch_size=8))
    return list(brain.losses)


if __name__ == "__main__":
    print(f"the loss is {main()[-1]:.3f}")
