"""A generative adversarial network of images: two optimizers, and one discriminator in both losses."""

import torch
from cookbook_data import batches
from torch import nn

from ort_trainer import ORTTrainer

NOISE, WIDTH = 16, 8


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * WIDTH, 2, 1, 0, bias=False),
            nn.BatchNorm2d(2 * WIDTH),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, WIDTH, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * WIDTH),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * WIDTH, 1, 2, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, image):
        return self.main(image).view(-1)


def main(steps=200):
    torch.manual_seed(1)
    netG, netD = Generator(), Discriminator()
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    trainerD = ORTTrainer(netD, "auto", optimizerD, loss_fn=criterion)
    trainerG = ORTTrainer(nn.Sequential(netG, netD), "auto", optimizerG, loss_fn=criterion)
    losses = []
    while len(losses) < 3 * steps:
        for real, _ in batches(64, len(losses))[: steps - len(losses) // 3]:
            ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
            noise = torch.randn(len(real), NOISE, 1, 1)
            # The discriminator: real images are real, and made ones are not.
            netD.zero_grad()
            errD_real, _ = trainerD.forward_backward(real, ones)
            fake = netG(noise)
            errD_fake, _ = trainerD.forward_backward(fake.detach(), zeros)
            trainerD.optimizer_step()
            # The generator: made images pass for real ones.
            errG, _ = trainerG.train_step(noise, ones)
            losses += [errD_real.item(), errD_fake.item(), errG.item()]
    print(f"losses of the discriminator: {losses[-3]:.3f} and {losses[-2]:.3f}, of the generator: {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
