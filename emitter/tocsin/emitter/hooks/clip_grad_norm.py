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
from torch.compiler import is_compiling, is_dynamo_compiling

from tocsin.emitter.process.transparent_frames import transparent

if TYPE_CHECKING:
    from tocsin.emitter.hooks.training_hooks import Hooks


def install(hooks: Hooks) -> None:
    """Put the hook into torch."""
    module, passed = torch.nn.utils.clip_grad, hooks.fast_path.passed
    original = module.clip_grad_norm_

    @transparent
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: object, max_norm: float, norm_type: float = 2.0, *args: object, **kwargs: object
    ) -> object:
        # First of all what a compiler sees as a constant.
        if is_dynamo_compiling() or passed.on or norm_type != 2 or hooks.asleep or is_compiling():
            return original(parameters, max_norm, norm_type, *args, **kwargs)
        if isinstance(parameters, Iterator):
            listed = list(parameters)
            # An empty one is warned of, and stays what it is.
            parameters = listed or parameters
        norm = original(parameters, max_norm, norm_type, *args, **kwargs)
        hooks.isolation.run("clipping", hooks.clipped.add, parameters, norm, max_norm)
        return norm

    module.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
