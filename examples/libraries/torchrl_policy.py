"""A policy and a value network of torchrl, trained by its PPO loss on a control task made here."""

import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss


def main(steps=20):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2), NormalParamExtractor())
    values = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(values, in_keys=["observation"])
    loss_module = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.AdamW(loss_module.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        batch = TensorDict({"observation": torch.randn(64, 4)}, [64])
        with torch.no_grad():
            actor(batch)
        distance = (batch["action"] - batch["observation"].mean(-1, keepdim=True)).pow(2)  # the wanted action
        batch["advantage"], batch["value_target"] = 1 - distance, -distance
        terms = loss_module(batch)
        loss = terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(f"the loss is {main()[-1]:.3f}")
