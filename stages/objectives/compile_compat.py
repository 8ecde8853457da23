"""torch's compiler: its settings, and what it says to its log only; private names of torch."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

LOG = logging.getLogger("pipe")
GRAPHS = 64
"""Graphs of one function that are compiled before torch stops compiling it. Its own limit of 8 is
passed by an ordinary training: kinds of blocks, times training and evaluation, times inputs that
need a gradient or none (the first block's, with frozen embeddings), times the first shape, others,
and those with a single sample."""
GIVEN_UP = re.compile(r"torch\._dynamo hit config\.\w+ \((\d+)\)\s+function: '(\w+)'")
"""Beginning of the message with which torch stops to compile a function."""


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`function` compiled by torch.compile with these options, so that many blocks, recomputed ones
    too, share its graphs; the log says if torch does not compile it any more."""
    config = torch._dynamo.config
    # By default torch compiles no recomputed part that assigns to anything, as modules do that a
    # strategy casts and casts back while they run (`stages/wrap/build.py`).
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    logging.getLogger("torch._dynamo.convert_frame").addFilter(tell)  # once, however often
    return torch.compile(function, **options)


def tell(record: logging.LogRecord) -> bool:
    """Filter of torch's log, which lets every record pass, and repeats to the run's log what
    concerns its user."""
    found = GIVEN_UP.match(record.getMessage())
    if found:
        limit, function = found.groups()
        LOG.warning(
            "torch has compiled %s %s times, and computes what is new without compiling from here "
            "on, slower and with the same numbers (model.compile.dynamic: true takes all lengths "
            "at once; the rank's log has the reason)",
            function,
            limit,
        )
    return True


class CompiledBlocks:
    """Blocks that are compiled each by itself, and what they are given.

    Left to itself, torch takes one size after another for one that varies, and compiles each time.
    Here all of them vary from the second shape of samples on, if `finds_lengths`.
    """

    def __init__(self, *, finds_lengths: bool) -> None:
        self._finds_lengths = finds_lengths
        self._first: torch.Size | None = None
        self._vary = False
        self._ran = False

    def forward(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """A block's forward, compiled with these options of torch.compile."""
        block = compiled(function, **options)

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._finds_lengths:
                self._mark(args, kwargs)
            output = block(*args, **kwargs)
            if not self._ran:
                self._ran = True
                tell_breaks()
            return output

        return forward

    def _mark(self, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else next(tensors_in(kwargs))
        self._first = self._first or hidden.shape
        self._vary = self._vary or hidden.shape != self._first
        if self._vary:
            for one in tensors_in((args, kwargs)):
                _mark(one, *hidden.shape[:2])


def tell_breaks() -> None:
    """Say in the run's log if blocks are compiled in pieces, and why."""
    from torch._dynamo.utils import counters  # takes seconds, which others need not wait for

    broken = counters["graph_break"]
    if broken:
        first = " ".join(next(iter(broken)).split())
        LOG.warning("torch compiles a block in pieces, which is slower: %s", first)


def _mark(tensor: Tensor, samples: int, length: int) -> None:
    """Mark the dimensions of samples and tokens. The last one of numbers is features, but for an
    attention mask of shape (samples, heads, tokens, tokens)."""
    features = tensor.is_floating_point() and tensor.ndim < 4
    sizes = tensor.shape[:-1] if features else tensor.shape
    for place, size in enumerate(sizes):
        if size == (length if place else samples):
            torch._dynamo.maybe_mark_dynamic(tensor, place)


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Tensors in a nested structure."""
    return (one for one in tree_iter(given) if isinstance(one, Tensor))


def rows_vary(*tensors: Tensor) -> None:
    """Tell the compiler that the first dimension of these tensors has any length."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
