"""Fields of train stages that say which samples a step has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt

from pipeline import PlanView, Problem

Count = Annotated[int, Gt(0)]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The samples of each optimizer step, and their division into micro-batches."""

    one_of: ClassVar[Sequence[Sequence[str]]] = (
        ("steps", "epochs"),
        ("micro_batch_size", "accumulation"),
    )
    """At most one of these fields is set, for hints."""

    global_batch_size: Count
    """Samples in one optimizer step, over all ranks and micro-batches."""

    steps: Count | None = None
    """Optimizer steps to train for. Exactly one of `steps` and `epochs`."""

    epochs: Annotated[float, Gt(0)] | None = None
    """Passes over the training samples, may be a fraction. Exactly one of `steps` and `epochs`."""

    micro_batch_size: Count | None = None
    """Samples of one forward pass on one rank; null derives it from `accumulation`."""

    accumulation: Count | None = None
    """Micro-batches of one step on one rank; null derives it from `micro_batch_size`, or is 1.
    Where the samples do not divide evenly, fewer can be enough."""

    shuffle: bool = True
    """Shuffle again every epoch, by the recipe's seed; false trains in file order."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if (self.steps is None) == (self.epochs is None):
            slot = plan.slot(self) or "train"
            both = f"remove one of the two lines, or add {slot}.epochs=null to the command line"
            hint = "such as `epochs: 3`" if self.steps is None else both
            message = "give exactly one of steps and epochs"
            yield Problem(key="steps", message=message, hint=hint)
        ranks = plan.data_ranks(self)
        if self.micro_batch_size is not None and self.accumulation is not None:
            given = self.micro_batch_size * self.accumulation * ranks
            if ranks and given != self.global_batch_size:
                what = "processes" if ranks == plan.procs else "data-parallel ranks"
                yield Problem(
                    key="global_batch_size",
                    message=f"is {self.global_batch_size}, but micro_batch_size x accumulation x "
                    f"{what} = {self.micro_batch_size} x {self.accumulation} x {ranks} = {given}",
                    hint="leave out one of micro_batch_size and accumulation",
                )
        share = -(-self.global_batch_size // (ranks or 1))
        if self.micro_batch_size is not None and self.micro_batch_size > share:
            yield Problem(
                key="micro_batch_size",
                message=f"{self.micro_batch_size} is more than the {share} samples of a step on a "
                f"rank: micro-batches have {share}",
                hint="raise global_batch_size for larger ones",
                warning=True,
            )

    def microbatch_size(self, ranks: int) -> int:
        """Samples of one forward pass, given or derived, on `ranks` data-parallel ranks."""
        if self.micro_batch_size is not None:
            return self.micro_batch_size
        return -(-self.global_batch_size // (ranks * (self.accumulation or 1)))
