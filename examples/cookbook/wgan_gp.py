"""A Wasserstein GAN with a gradient penalty: a loss that differentiates the critic, in PyTorch, beside the graph."""

import torch
from cookbook_data import batches
from torch import nn

from ort_trainer import ORTTrainer

NOISE, WIDTH, PENALTY = 16, 64, 5.0


def critic_loss(score, sign):
    return (score.view(-1) * sign).mean()


def generator_loss(score):
    return -score.mean()


def gradient_penalty(critic, real, fake):
    """The critic's gradient has the norm 1 between real and made images (Gulrajani et al., 2017)."""
    share = torch.rand(len(real), 1, 1, 1)
    between = torch.lerp(real, fake, share).requires_grad_(True)
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def main(steps=200):
    torch.manual_seed(1)
    generator = nn.Sequential(
        nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8))
    )
    critic = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    trainer_c = ORTTrainer(critic, "auto", optimizer_c, loss_fn=critic_loss)
    trainer_g = ORTTrainer(nn.Sequential(generator, critic), "auto", optimizer_g, loss_fn=generator_loss)
    losses = []
    while len(losses) < 3 * steps:
        for real, _ in batches(64, len(losses))[: steps - len(losses) // 3]:
            noise = torch.randn(len(real), NOISE)
            fake = generator(noise).detach()
            sign = torch.cat([torch.ones(len(real)), -torch.ones(len(real))])
            # The critic: made images score low, real ones high, and the score changes evenly in between.
            critic.zero_grad()
            loss_c, _ = trainer_c.forward_backward(torch.cat([fake, real]), sign)
            penalty = PENALTY * gradient_penalty(critic, real, fake)
            penalty.backward()
            trainer_c.optimizer_step()
            # The generator: made images score high.
            loss_g, _ = trainer_g.train_step(noise)
            losses += [loss_c.item(), penalty.item(), loss_g.item()]
    print(f"loss of the critic: {losses[-3]:.3f}, penalty: {losses[-2]:.3f}, loss of the generator: {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
