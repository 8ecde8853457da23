"""Facts about packed documents for attention of transformers, without asking the device.

By itself transformers looks at the positions of every micro-batch, for which the host waits until
the device has computed all that it was given before; flash attention does so in every layer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipeline import MicroBatch
from pipeline.utils import has_values

if TYPE_CHECKING:
    from torch import Tensor, nn

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
        flash._is_packed_sequence = _none
    elif known == {True}:
        masking_utils.find_packed_sequence_indices = _numbers
    _lengths = batches[0].documents if len(batches) == 1 else None
    try:
        yield
    finally:
        _lengths, masking_utils.find_packed_sequence_indices, flash._is_packed_sequence = before


# Functions that compiled blocks refer to have to stay the same ones.


def _none(position_ids: Tensor | None, batch_size: int = 0) -> None:
    """No document but one each, and no packed sequence."""


def _numbers(position_ids: Tensor) -> Tensor:
    """The number of each token's document, shape (lines, length), as transformers has it for lines
    that are not one document each."""
    import torch

    first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=first, dim=-1) != 1).cumsum(-1)


def flash_documents(model: nn.Module, positions: Tensor) -> dict[str, Any]:
    """Arguments that tell flash attention where documents begin in the flattened lines, given
    positions of shape (lines, length), of the micro-batch in `known_documents`, if there is one;
    empty for a model with another attention. By itself it takes a batch of several packed lines
    for unpacked ones."""
    import torch

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
