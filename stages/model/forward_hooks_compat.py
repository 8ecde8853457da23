"""Hooks around a module's forward, which its recomputation in backward repeats; private names of
torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

SHARED = -1
"""Key of these hooks on every module; torch counts its own from 0."""
INSIDE = "_hooks_inside_of_forward"
"""Attribute of modules whose forward calls these hooks itself: a list, empty or of one pair."""

Hook = Callable[..., Any]


def around_forward(module: nn.Module, before: Hook, after: Hook) -> None:
    """Call `before` ahead of `module`'s forward, and `after` behind it, even if forward raises.
    A forward that `with_hooks` has made calls them itself.

    torch's own registration numbers hooks, and compiled graphs look up the numbers: each block
    would get a graph of its own, up to a limit beyond which blocks are not compiled.
    """
    if hasattr(module, INSIDE):
        getattr(module, INSIDE)[:] = [(before, after)]
        return
    module._forward_pre_hooks[SHARED] = before
    module._forward_hooks[SHARED] = after
    module._forward_hooks_always_called[SHARED] = True


def hooks_before(module: nn.Module) -> Iterator[Hook]:
    """Hooks ahead of `module`'s forward: those that torch calls, and those that it calls itself."""
    yield from module._forward_pre_hooks.values()
    yield from (before for before, _ in getattr(module, INSIDE, ()))


def with_hooks(module: nn.Module, forward: Hook) -> Hook:
    """A forward of `module` that calls the hooks that `around_forward` will put on it, so that a
    recomputation, outside of which torch calls hooks, repeats them."""
    hooks: list[tuple[Hook, Hook]] = []
    setattr(module, INSIDE, hooks)

    @functools.wraps(forward)
    def between(*args: Any, **kwargs: Any) -> Any:
        if not hooks:
            return forward(*args, **kwargs)
        ((before, after),) = hooks
        before(module, args)
        try:
            return forward(*args, **kwargs)
        finally:
            after(module, args, None)

    return between
