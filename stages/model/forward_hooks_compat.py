"""Hooks around a module's forward, which its recomputation in backward repeats; private names of
torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SHARED = -1
"""Key of these hooks on every module; torch counts its own from 0."""


def around_forward(
    module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    """Call `before` ahead of `module`'s forward, and `after` behind it, even if forward raises.

    torch's own registration numbers hooks, and compiled graphs look up the numbers: each block
    would get a graph of its own, up to a limit beyond which blocks are not compiled.
    """
    module._forward_pre_hooks[SHARED] = before
    module._forward_hooks[SHARED] = after
    module._forward_hooks_always_called[SHARED] = True


def with_hooks(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of `module` that calls its hooks of `around_forward`, if it has any by then: for
    a recomputation, to which they lie outside. Compiled code repeats what they did."""

    @functools.wraps(forward)
    def between(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or SHARED not in module._forward_pre_hooks:
            return forward(*args, **kwargs)
        module._forward_pre_hooks[SHARED](module, args)
        try:
            return forward(*args, **kwargs)
        finally:
            module._forward_hooks[SHARED](module, args, None)

    return between
