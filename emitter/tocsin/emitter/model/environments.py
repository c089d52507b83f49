"""Classes of environments, in which a model that learns by reinforcement acts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

_CLASSES: Final = (
    ("gymnasium", "Env"),
    ("gymnasium.vector", "VectorEnv"),
    ("gym", "Env"),
    ("gym.vector", "VectorEnv"),
    ("stable_baselines3.common.vec_env", "VecEnv"),
    ("pettingzoo", "AECEnv"),
    ("pettingzoo", "ParallelEnv"),
    ("dm_env", "Environment"),
    ("torchrl.envs", "EnvBase"),
)
"""Module and name; those whose environments are in other processes have one for all of them."""


def environment_classes() -> Iterator[type]:
    """The classes of environments that this process has imported."""
    for module, name in _CLASSES:
        # Not `getattr`: a module may import what it is asked for.
        found = getattr(sys.modules.get(module), "__dict__", {}).get(name)
        if isinstance(found, type):
            yield found
