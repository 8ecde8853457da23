"""Fill the parts of the weights that this rank holds from the model's source.

Every rank reads the bytes of its own parts and no others, into the memory where they stay. Ranks
that hold the same parts share the reading and send each other what they read, unless reading is
quicker than sending.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from pipeline.utils.text import Throughput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pipeline.contracts.stage import Context
    from pipeline.contracts.tensors import TensorReader

CUT = 1 << 24
"""Elements; smaller parts are read by one rank."""


class Part(NamedTuple):
    """A flat, live view of elements [start, start + its length) of a tensor of the source."""

    name: str
    start: int
    target: Tensor


def load_weights(
    parts: Iterable[Part], reader: TensorReader, ctx: Context, replicas: ProcessGroup | None = None
) -> None:
    """Overwrite every part with the reader's values, cast to its dtype.

    Each part is filled before the next is taken. With `replicas`, the ranks that hold exactly the
    same parts, it is collective over them, and all parts must stay valid. Raises StageError.
    """
    with torch.no_grad():
        if replicas is None or torch.distributed.get_world_size(replicas) == 1:
            _read(parts, reader, ctx)
            return
        shares = _shares(list(parts), torch.distributed.get_world_size(replicas))
        rank = torch.distributed.get_rank(replicas)
        if reader.as_stored and ctx.dist.device.type == "cpu":
            # gloo sends 1 GB/s, the page cache gives 10. As each begins with another share, a disk
            # gives each byte once, as fast as all of them together ask for it.
            _read(itertools.chain(*shares[rank:], *shares[:rank]), reader, ctx)
        else:
            _read(shares[rank], reader, ctx)
            _exchange(shares, replicas, ctx.dist.device)


def _read(parts: Iterable[Part], reader: TensorReader, ctx: Context) -> None:
    watch = Throughput(ctx.log, "loading weights")
    before = reader.bytes_read
    for part in parts:
        start, target = part.start, part.target
        if reader.spec(part.name).dtype == torch.uint8:  # bytes, whatever they are held in
            start, target = start * target.itemsize, target.view(torch.uint8)
        reader.read_into(part.name, start, target)
        watch.advance(reader.bytes_read - before)
        before = reader.bytes_read
    if reader.bytes_read:
        ctx.log.info("weights loaded: this process read %s", watch.summary())


def _exchange(
    shares: Sequence[Sequence[Part]], replicas: ProcessGroup, device: torch.device
) -> None:
    for number, share in enumerate(shares):
        owner = torch.distributed.get_global_rank(replicas, number)
        for part in share:
            # What is offloaded travels over the device's own network all the same.
            value = part.target.to(device)
            torch.distributed.broadcast(value, src=owner, group=replicas)
            if value is not part.target:
                part.target.copy_(value)


def _shares(parts: Sequence[Part], count: int) -> list[list[Part]]:
    """The parts in order, for `count` ranks to read about as many elements each.

    A large one is cut where a share ends; a small one goes whole to the rank in whose share its
    middle lies, as some readers make whole tensors anyway.
    """
    total = sum(part.target.numel() for part in parts)
    shares: list[list[Part]] = [[] for _ in range(count)]
    begin = 0
    for part in parts:
        end = begin + part.target.numel()
        if end - begin < CUT:
            middle = (begin + end) // 2
            shares[min(middle * count // max(total, 1), count - 1)].append(part)
        else:
            for rank in range(count):
                low = max(begin, total * rank // count)
                high = min(end, total * (rank + 1) // count)
                if low < high:
                    target = part.target[low - begin : high - begin]
                    shares[rank].append(Part(part.name, part.start + low - begin, target))
        begin = end
    return shares
