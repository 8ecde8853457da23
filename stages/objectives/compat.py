"""Private names of torch's compiler, and of transformers' attention for packed documents.

By itself transformers looks at the positions of every micro-batch, for which the host waits until
the device has computed all that it was given before; flash attention does so in every layer.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from pipeline import MicroBatch
from pipeline.utils import has_values

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
    """Filter of torch's log: all records pass, and the run's log gets what concerns its user."""
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


@dataclass(eq=False)
class CompiledBlocks:
    """Blocks that are compiled each by itself, and what they are given.

    Left to itself, torch takes one size after another for one that varies, and compiles each time.
    Here all of them vary from the second shape of samples on, if `finds_lengths`.
    """

    finds_lengths: bool
    _first: torch.Size | None = None
    _vary: bool = False
    _ran: bool = False

    def forward(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """A block's forward, compiled with these options of torch.compile. The run's log says if
        the first one to run is compiled in pieces, and why."""
        block = compiled(function, **options)

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.finds_lengths:
                self._mark([one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)])
            output = block(*args, **kwargs)
            if not self._ran:
                self._ran = True
                from torch._dynamo.utils import counters  # takes seconds: not at the start

                if broken := counters["graph_break"]:
                    first = " ".join(next(iter(broken)).split())
                    LOG.warning("torch compiles a block in pieces, which is slower: %s", first)
            return output

        return forward

    def _mark(self, tensors: Sequence[Tensor]) -> None:
        """Mark the dimensions of samples and tokens of what a block is given, hidden states first.
        The last one of numbers is features, but for an attention mask of shape (samples, heads,
        tokens, tokens)."""
        shape = tensors[0].shape
        self._first = self._first or shape
        self._vary = self._vary or shape != self._first
        for tensor in tensors if self._vary else ():
            features = tensor.is_floating_point() and tensor.ndim < 4
            sizes = tensor.shape[:-1] if features else tensor.shape
            for place, size in enumerate(sizes):
                if size == shape[1 if place else 0]:
                    torch._dynamo.maybe_mark_dynamic(tensor, place)


def rows_vary(*tensors: Tensor) -> None:
    """Tell the compiler that the first dimension of these tensors has any length."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


_lengths: Sequence[Sequence[int]] | None = None
"""Lengths of the documents of the micro-batch that is computed; None: not known."""


def has_several(batch: MicroBatch) -> bool | None:
    """Whether a line has several documents; None if only the device knows."""
    if batch.positions is None:
        return False
    if batch.documents is None:
        return None
    return any(len(line) > 1 for line in batch.documents)


@contextlib.contextmanager
def known_documents(*batches: MicroBatch) -> Iterator[None]:
    """Compute one or several micro-batches in the body, forward and backward: models that are
    called there get what the host knows of their documents."""
    from transformers import masking_utils
    from transformers import modeling_flash_attention_utils as flash

    global _lengths
    before = _lengths, masking_utils.find_packed_sequence_indices, flash._is_packed_sequence
    known = {has_several(batch) for batch in batches}
    if known == {False}:
        masking_utils.find_packed_sequence_indices = _none
        flash._is_packed_sequence = _no
    elif known == {True}:
        masking_utils.find_packed_sequence_indices = _numbers
    _lengths = batches[0].documents if len(batches) == 1 else None
    try:
        yield
    finally:
        _lengths, masking_utils.find_packed_sequence_indices, flash._is_packed_sequence = before


# Functions that compiled blocks refer to have to stay the same ones.


def _none(position_ids: Tensor | None) -> None:
    """No document but one each."""


def _no(position_ids: Tensor | None, batch_size: int) -> bool:
    return False


def _numbers(position_ids: Tensor) -> Tensor:
    """The number of each token's document, shape (lines, length), as transformers has it for lines
    that are not one document each."""
    first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)


def flash_documents(model: nn.Module, positions: Tensor) -> dict[str, Any]:
    """Arguments that tell flash attention where documents begin in the flattened lines, given
    positions of shape (lines, length), of the micro-batch in `known_documents`, if there is one;
    empty for a model with another attention. By itself it takes a batch of several packed lines
    for unpacked ones."""
    configs = (getattr(one, "config", None) for one in model.modules())
    config = next((one for one in configs if hasattr(one, "_attn_implementation")), None)
    if config is None or "flash" not in str(config._attn_implementation):
        return {}
    if _lengths:
        sizes = list(itertools.chain.from_iterable(_lengths))
        on_gpu = positions.is_cuda and has_values(positions)
        places = [0, *itertools.accumulate(sizes)]
        bounds = torch.tensor(places, dtype=torch.int32, pin_memory=on_gpu)
        bounds, longest = bounds.to(positions.device, non_blocking=True), max(sizes)
    else:  # waits for the device
        starts = (positions.flatten() == 0).nonzero().flatten()
        end = torch.tensor([positions.numel()], device=positions.device)
        bounds = torch.cat([starts, end]).to(torch.int32)
        longest = int(bounds.diff().max())
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
