"""Pipeline parallelism: ranks hold consecutive layers, and pass micro-batches on.

torch's schedules say who computes when, and send what is passed. All micro-batches of a step have
one shape, which follows from the batches alone, so only activations and their gradients are sent.
The last stage computes scores and loss in its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from pipeline import MicroBatch, Scorer
from stages.model.documents_compat import flash_documents
from stages.wrap.axes import FOLDED, least_microbatches
from stages.wrap.pipeline import compat
from stages.wrap.pipeline.split import StageInput, stages_of

ONE_STAGE = ("GPipe", "1F1B")
"""Schedules of one stage a rank; the others have two or more."""


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """The pipeline of one group of ranks."""

    schedule: str
    """Name of a schedule of torch."""
    group: ProcessGroup
    stages_per_rank: int
    width: int
    """Width of the hidden states."""
    dtype: torch.dtype
    """Dtype in which hidden states are sent."""
    device: torch.device

    @property
    def count(self) -> int:
        """Number of stages."""
        return self.group.size() * self.stages_per_rank

    def own(self) -> list[int]:
        """Numbers of this rank's stages, ascending."""
        return stages_of(
            self.group.rank(),
            self.group.size(),
            self.stages_per_rank,
            folded=self.schedule in FOLDED,
        )


Passed = tuple[MicroBatch, MicroBatch]
"""A micro-batch, whole and this rank's part of it."""
End = Callable[[Scorer, int, Mapping[str, Tensor]], Tensor]
"""What the last stage returns: a function of its scorer, the micro-batch's number and the model's
inputs."""


class Stage:
    """Gives a model, cut down to its layers, the forward method of a stage.

    The module's forward is replaced, not the module: its names and a strategy's hooks stay. It is
    called with token ids (first stage) or hidden states, and returns hidden states, or a scalar
    (last stage). `beat` is called at each forward pass, as a sign of life.
    """

    number = 0
    """The micro-batch that passes, of `batches`."""
    batches: Sequence[Passed] = ()
    end: End
    scorer: Scorer | None = None
    """Scorer of the last stage; None for others."""

    def __init__(
        self, module: Any, *, first: bool, last: bool, dtype: torch.dtype, beat: Callable[[], None]
    ) -> None:
        self.module = module
        self.last = last
        self.forward = module.forward
        """The model's own method."""
        self._first = first
        self._dtype = dtype
        self._beat = beat
        self._stage_input = next((m for m in module.modules() if isinstance(m, StageInput)), None)
        module.forward = self._forward

    def _forward(self, received: Tensor) -> Tensor:
        self._beat()
        if self.scorer is not None:
            return self.end(self.scorer, self.number, self._inputs(received))
        _, own = self.batches[self.number]
        placed: dict[str, Any] = dict(own.free) if self._first else {}
        if own.positions is not None:
            placed |= {"position_ids": own.positions, **flash_documents(self.module, own.positions)}
        output = self.module.base_model(**self._inputs(received), use_cache=False, **placed)
        hidden: Tensor = output.last_hidden_state
        return hidden.to(self._dtype).contiguous()

    def _inputs(self, received: Tensor) -> dict[str, Tensor]:
        """Arguments of the model for the tensor that this stage receives."""
        if self._first:
            return {"input_ids": received}
        if self._stage_input is not None:
            self._stage_input.received = received
        return {"inputs_embeds": received}


class Pipeline:
    """Runs the micro-batches of a step through the stages of a group of ranks (collective)."""

    def __init__(self, plan: PipelinePlan, stages: Sequence[Stage]) -> None:
        self._plan = plan
        self._stages = stages
        self._made: tuple[tuple[int, int, int], Any] | None = None

    @property
    def ends_here(self) -> bool:
        """Whether the last stage is on this rank."""
        return any(stage.last for stage in self._stages)

    def run(self, batches: Sequence[Passed], end: End) -> None:
        """Forward of all micro-batches, and backward from what `end` returns, unless gradients are
        off.

        Every rank of the group gives the same batches, all of one shape, at least as many as
        `least` says. Ranks know them, so only hidden states are sent.
        """
        ids = [own.input_ids for _, own in batches]
        schedule = self._schedule(len(batches), *ids[0].shape)
        for stage in self._stages:
            stage.batches, stage.end = batches, end
        first = (torch.cat(ids),) if 0 in self._plan.own() else ()
        passed = {"target": torch.arange(len(batches)), "return_outputs": False}
        if torch.is_grad_enabled():
            schedule.step(*first, **passed)
        else:
            with compat.forward_alone(schedule):
                schedule.eval(*first, **passed)

    def least(self, count: int) -> int:
        """Number of micro-batches that the schedule takes, `count` or a few more."""
        return least_microbatches(self._plan.schedule, self._plan.group.size(), count)

    def _schedule(self, count: int, samples: int, length: int) -> Any:
        """The schedule for `count` micro-batches of that shape. The last one is kept: it holds
        buffers for everything that is received, so others are made anew."""
        key = (count, samples, length)
        if self._made is None or self._made[0] != key:
            self._made = None  # frees its buffers first
            self._made = key, self._make(count, samples, length)
        return self._made[1]

    def _make(self, count: int, samples: int, length: int) -> Any:
        stages = [
            self._torch_stage(stage, number, samples, length)
            for stage, number in zip(self._stages, self._plan.own(), strict=True)
        ]
        given = stages[0] if self._plan.schedule in ONE_STAGE else stages
        kind = get_schedule_class(self._plan.schedule)
        return kind(given, count, loss_fn=lambda loss, _: loss, scale_grads=False)

    def _torch_stage(self, stage: Stage, number: int, samples: int, length: int) -> PipelineStage:
        plan = self._plan
        ids = torch.empty(samples, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(
            samples, length, plan.width, dtype=plan.dtype, device="meta", requires_grad=True
        )
        loss = torch.empty((), device="meta", requires_grad=True)
        made = PipelineStage(
            stage.module,
            number,
            plan.count,
            plan.device,
            # Stated, so that nobody runs the model for its shapes and sends them as pickles.
            input_args=ids if number == 0 else hidden,
            output_args=loss if number == plan.count - 1 else hidden,
            group=plan.group,
        )
        compat.mend_halves(made)
        compat.number_passes(made, stage)
        return made
