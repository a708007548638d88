"""A2C and PPO of stable-baselines3 balance a pole; actions are drawn from the policy's distribution."""

import torch
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback

CASES = {
    "A2C": lambda: A2C("MlpPolicy", "CartPole-v1", n_steps=16, seed=1, device="cpu", use_rms_prop=False),
    "PPO": lambda: PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, seed=1, device="cpu"),
}


class Losses(BaseCallback):
    """Collects the loss of each update."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def _on_rollout_start(self):
        if "train/value_loss" in self.logger.name_to_value:
            self.losses.append(float(self.logger.name_to_value["train/value_loss"]))

    def _on_step(self):
        return True


def main(steps=20, case="A2C"):
    torch.manual_seed(1)
    agent = CASES[case]()
    policy = agent.policy
    collected = Losses()
    agent.learn(agent.n_steps * (steps + 1), collected, log_interval=1000)
    assert policy is agent.policy
    return collected.losses


if __name__ == "__main__":
    print(f"the loss is {main()[-1]:.3f}")
