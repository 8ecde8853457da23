"""Average gradients over ranks in another dtype than they are kept in."""

# No postponed annotations here: DDP compares the hook's annotations with its own classes.
from typing import cast

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future


class ReduceIn:
    """A DDP communication hook: cast a bucket, average it over all ranks, cast it back.

    torch's own hooks do the same for NCCL only.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.__qualname__ = f"{type(self).__qualname__}({dtype})"  # DDP logs a hook by this name

    def __call__(
        self, group: torch.distributed.ProcessGroup, bucket: GradBucket
    ) -> Future[Tensor]:
        gradient = bucket.buffer()
        # Dividing first keeps the sum in the range of fp16.
        narrow = gradient.to(self.dtype).div_(group.size())
        work = torch.distributed.all_reduce(narrow, group=group, async_op=True)
        assert work is not None

        def widen(future: Future[list[Tensor]]) -> Tensor:
            return gradient.copy_(future.value()[0])

        return cast(Future[Tensor], work.get_future().then(widen))
