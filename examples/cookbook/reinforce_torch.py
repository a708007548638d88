"""Policy gradients: an agent balances a pole on a cart; one update after each episode, however long it was."""

import math

import torch
import torch.nn.functional as F
from torch import nn

LONGEST, DISCOUNT = 200, 0.99


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 64), nn.Linear(64, 2)

    def forward(self, states):
        return self.head(F.relu(self.body(states))).log_softmax(-1)


def moved(state, action):
    """Returns the state 0.02 s later, of a cart of 1 kg with a pole of 1 m and 0.1 kg, pushed by 10 N."""
    place, speed, angle, turn = state
    push = (10.0 if action else -10.0) + 0.05 * turn**2 * math.sin(angle)
    turning = 9.8 * math.sin(angle) - math.cos(angle) * push / 1.1
    turning /= 0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
    gain = (push - 0.05 * turning * math.cos(angle)) / 1.1
    return [place + 0.02 * speed, speed + 0.02 * gain, angle + 0.02 * turn, turn + 0.02 * turning]


def returns_of(length):
    """Returns the standardized return of each action: every further step of the episode gives a reward of 1."""
    returns = [0.0]
    for _ in range(length):
        returns.append(1.0 + DISCOUNT * returns[-1])
    returns = torch.tensor(returns[:0:-1])
    return (returns - returns.mean()) / (returns.std() + 1e-6)


def policy_loss(log_probability, actions, returns):
    chosen = log_probability.gather(1, actions[:, None]).squeeze(1)
    return -(chosen * returns).sum()


def episode(policy):
    """Returns the states of an episode, the log-probabilities of both actions in them, and the actions."""
    state, states, actions, chances = (0.05 * (2 * torch.rand(4) - 1)).tolist(), [], [], []
    while len(states) < LONGEST and abs(state[0]) < 2.4 and abs(state[2]) < 0.21:
        states.append(state)
        chances.append(policy(torch.tensor(state)))
        actions.append(torch.multinomial(chances[-1].exp(), 1).item())
        state = moved(state, actions[-1])
    return torch.tensor(states), torch.stack(chances), torch.tensor(actions)


def main(steps=300):
    torch.manual_seed(1)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    losses, lengths = [], []
    for _ in range(steps):
        _, log_probability, actions = episode(policy)
        returns = returns_of(len(actions))
        loss = policy_loss(log_probability, actions, returns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        lengths.append(len(actions))
    print(f"the pole was up for {sum(lengths[-10:]) / 10:.0f} steps of {LONGEST} in the last ten episodes")
    return losses


if __name__ == "__main__":
    main()
