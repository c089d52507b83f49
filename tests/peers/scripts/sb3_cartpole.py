"""The quick start of stable-baselines3: PPO or DQN learns to balance a pole.

`--nan-at K` makes the reward of call K of the environment NaN.
"""

import argparse
from typing import Any

import gymnasium as gym
from stable_baselines3 import DQN, PPO

parser = argparse.ArgumentParser()
parser.add_argument("algorithm", choices=["ppo", "dqn"])
parser.add_argument("--timesteps", type=int)
parser.add_argument("--nan-at", type=int, metavar="K")
arguments = parser.parse_args()


class Spoiled(gym.Wrapper):
    """The environment, with one reward that is NaN."""

    calls = 0

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step of it."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self.calls == arguments.nan_at:
            reward = float("nan")
        self.calls += 1
        return observation, reward, terminated, truncated, info


env = Spoiled(gym.make("CartPole-v1"))
if arguments.algorithm == "ppo":
    model = PPO("MlpPolicy", env, n_steps=512, verbose=1, seed=0, device="cpu")
    model.learn(total_timesteps=arguments.timesteps or 6144)
else:
    model = DQN("MlpPolicy", env, verbose=1, seed=0, device="cpu")
    model.learn(total_timesteps=arguments.timesteps or 1300, log_interval=20)

env.close()
