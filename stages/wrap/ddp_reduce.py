"""Average gradients over ranks in another dtype than they are kept in."""

# No postponed annotations here: DDP compares the hook's annotations with its own classes.
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future


@dataclass(frozen=True)
class ReduceIn:
    """What the hook is registered with: the dtype to reduce in, among which processes."""

    dtype: torch.dtype
    group: torch.distributed.ProcessGroup


def reduce_in(state: ReduceIn, bucket: GradBucket) -> Future[Tensor]:
    """A DDP communication hook: cast a bucket, average it over all ranks, cast it back.

    torch's own hooks do the same for NCCL only.
    """
    gradient = bucket.buffer()
    # Dividing first keeps the sum in the range of fp16.
    narrow = gradient.to(state.dtype).div_(state.group.size())
    work = torch.distributed.all_reduce(narrow, group=state.group, async_op=True)
    assert work is not None

    def widen(future: Future[list[Tensor]]) -> Tensor:
        return gradient.copy_(future.value()[0])

    return cast(Future[Tensor], work.get_future().then(widen))
