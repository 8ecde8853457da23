"""Private names of torch for hooks of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

SHARED = -1
"""The key of these hooks on every module; torch counts its own from 0."""


def around_forward(
    module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    """Have `before` called ahead of `module`'s forward, and `after` behind it, even where that
    raises.

    torch's own registration numbers hooks, and what it compiles looks up their numbers: each block
    would have a graph of its own, up to a limit from which on blocks are not compiled.
    """
    module._forward_pre_hooks[SHARED] = before
    module._forward_hooks[SHARED] = after
    module._forward_hooks_always_called[SHARED] = True
