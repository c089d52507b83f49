"""The gradient norm before it was clipped, as `torch.nn.utils.clip_grad_norm_` computes it anyway.

At the optimizer step the gradients are those that are left: clipped to 1 on each step, they would
never be seen to explode. Frameworks (Lightning, Accelerate and the Trainer on top of it) clip with
that function, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tocsin.emitter.hooks.state import Hooks


def install(hooks: Hooks) -> None:
    """Put the hook into torch."""
    module = torch.nn.utils.clip_grad
    original = module.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: object, max_norm: float, norm_type: float = 2.0, *args: object, **kwargs: object
    ) -> object:
        if torch.compiler.is_compiling() or hooks.asleep or hooks.quick.passed.on or norm_type != 2:
            return original(parameters, max_norm, norm_type, *args, **kwargs)
        if isinstance(parameters, Iterator):
            listed = list(parameters)
            # An empty one is warned of, and stays what it is.
            parameters = listed or parameters
        norm = original(parameters, max_norm, norm_type, *args, **kwargs)
        hooks.isolation.run("clipping", hooks.clipped.add, parameters, norm, max_norm)
        return norm

    module.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
