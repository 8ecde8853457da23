"""This rank's shards of the weights, and how they are loaded from the model's source.

Every rank reads the bytes of its own shards and no others, into the memory where they stay. Ranks
that hold the same shards share the reading and send each other what they read, unless reading is
faster than sending.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn

from pipeline.utils import BYTES, activity, local_part
from stages.wrap.shards import tiles_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from pipeline import Context, TensorReader


class LocalShard(NamedTuple):
    """A flat, live view of elements of a tensor of the source: a range of them from `start` on, or
    `count` runs of equal length that begin `stride` apart."""

    name: str
    start: int
    target: Tensor
    stride: int = 0
    count: int = 1  # type: ignore[assignment]  # hides tuple.count


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of all that a checkpoint of the model holds, tied ones once: parameters, then
    persistent buffers."""
    yield from module.named_parameters()
    persistent = module.state_dict(keep_vars=True)
    yield from (pair for pair in module.named_buffers() if pair[0] in persistent)


def aliases(module: nn.Module) -> dict[str, str]:
    """Tied parameter's name -> the name under which `named_parameters` lists it."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[one] for name, one in every if first[one] != name}


def flat(tensor: Tensor) -> Tensor:
    """This process's elements as a live, flat view."""
    return local_part(tensor).detach().view(-1)


def local_shards(module: nn.Module) -> Iterator[LocalShard]:
    """This rank's shards of every parameter and stored buffer that it has elements of. Raises
    StageError for one whose shards have no regular place in it."""
    for name, tensor in stored_tensors(module):
        end = 0
        for tile in tiles_of(name, tensor):
            begin, end = end, end + tile.numel
            yield LocalShard(name, tile.start, flat(tensor)[begin:end], tile.stride, tile.count)


def load_weights(
    shards: Iterable[LocalShard],
    reader: TensorReader,
    ctx: Context,
    replicas: ProcessGroup | None = None,
) -> None:
    """Overwrite every shard with the reader's values, cast to its dtype.

    Each shard is filled before the next is taken. With `replicas`, the ranks that hold exactly the
    same shards, it is collective over them, and all shards must stay valid. Raises StageError for
    files that cannot be read.
    """
    device, count = ctx.dist.device, 1 if replicas is None else replicas.size()
    if replicas is None or count == 1:
        _read(shards, reader, ctx)
        return
    # Shares of about as many elements: a shard is in the share that its middle lies in.
    listed, rank, begin = list(shards), replicas.rank(), 0
    total = sum(shard.target.numel() for shard in listed)
    shares: list[list[LocalShard]] = [[] for _ in range(count)]
    for shard in listed:
        middle = begin + shard.target.numel() // 2
        shares[min(middle * count // max(total, 1), count - 1)].append(shard)
        begin += shard.target.numel()
    if reader.as_stored and device.type == "cpu":
        # gloo sends 1 GB/s, the page cache 10. Each rank begins with another share, so that all of
        # them together read each byte from the disk once.
        _read(itertools.chain(*shares[rank:], *shares[:rank]), reader, ctx)
        return
    _read(shares[rank], reader, ctx)
    with torch.no_grad():
        for number, share in enumerate(shares):
            owner = torch.distributed.get_global_rank(replicas, number)
            for shard in share:
                # Offloaded values travel over the device's network too.
                value = shard.target.to(device)
                torch.distributed.broadcast(value, src=owner, group=replicas)
                if value is not shard.target:
                    shard.target.copy_(value)


@torch.no_grad()
def _read(shards: Iterable[LocalShard], reader: TensorReader, ctx: Context) -> None:
    before = reader.bytes_read
    with activity("loading weights", unit=BYTES) as loading:
        for name, start, target, stride, count in shards:
            ctx.dist.heartbeat.beat()
            if reader.spec(name).dtype == torch.uint8:  # packed bytes, whatever dtype holds them
                start, stride = start * target.itemsize, stride * target.itemsize
                target = target.view(torch.uint8)
            for row, run in enumerate(target.view(count, -1)):
                reader.read_into(name, start + row * stride, run)
            loading.advance(reader.bytes_read - before)
            before = reader.bytes_read
    if reader.bytes_read:
        ctx.log.info("weights loaded: this process read %s", loading.summary())
