"""Pipeline parallelism: ranks hold consecutive layers, and pass micro-batches on.

torch's schedules say who computes when, and send what is passed. All micro-batches of a step have
one shape, which follows from the batches alone, so nothing but activations and their gradients is
sent. The last stage computes the loss in its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from pipeline import MicroBatch, Objective
from stages.model.documents_compat import flash_documents
from stages.wrap.axes import FOLDED
from stages.wrap.pipeline import compat
from stages.wrap.pipeline.batches import least_microbatches
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


class Stage:
    """Gives a model, cut down to its layers, the forward method of a stage.

    The module's forward is replaced, not the module: its names and a strategy's hooks stay. It is
    called with token ids (first stage) or hidden states, and returns hidden states, or the summed
    loss (last stage). `beat` is called at each forward pass, as a sign of life.
    """

    objective: Objective | None = None

    def __init__(
        self, module: Any, *, first: bool, last: bool, dtype: torch.dtype, beat: Callable[[], None]
    ) -> None:
        self.module = module
        self._first = first
        self._dtype = dtype
        self._beat = beat
        self._stage_input = next((m for m in module.modules() if isinstance(m, StageInput)), None)
        self._rest = _Rest(module, self) if last else None
        module.forward = self._forward

    def _forward(
        self, received: Tensor, *, labels: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        self._beat()
        if self._rest is not None:
            assert self.objective is not None
            batch = MicroBatch(input_ids=received, labels=labels, positions=positions)
            return self.objective(self._rest, batch)
        placed: dict[str, Any] = {}
        if positions is not None:
            placed = {"position_ids": positions, **flash_documents(self.module, positions)}
        output = self.module.base_model(**self.inputs(received), use_cache=False, **placed)
        hidden: Tensor = output.last_hidden_state
        return hidden.to(self._dtype).contiguous()

    def inputs(self, received: Tensor) -> dict[str, Tensor]:
        """Arguments of the model for the tensor that this stage receives."""
        if self._first:
            return {"input_ids": received}
        if self._stage_input is not None:
            self._stage_input.received = received
        return {"inputs_embeds": received}


class _Rest(nn.Module):
    """The last stage as an objective calls a whole model; its `input_ids` are hidden states."""

    def __init__(self, module: nn.Module, stage: Stage) -> None:
        super().__init__()
        self.module = module
        self._forward = module.forward
        self._inputs = stage.inputs

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return self._forward(**self._inputs(input_ids), **kwargs)


class Pipeline:
    """Runs the micro-batches of a step through the stages of a group of ranks (collective)."""

    def __init__(self, plan: PipelinePlan, stages: Sequence[Stage]) -> None:
        self._plan = plan
        self._stages = stages
        self._scale = 1.0
        self._total = torch.zeros((), device=plan.device)
        self._made: tuple[tuple[int, int, int], Any] | None = None

    def run(
        self,
        batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        scale: float | None = None,
    ) -> Tensor:
        """Forward of all `batches`, and backward of `scale` times the summed loss; without `scale`,
        forward alone. Returns the summed loss on the rank of the last stage, 0 on others.

        Every rank of the group gives the same batches, all of one shape, at least as many as
        `least` says.
        """
        samples, length = batches[0].input_ids.shape
        schedule = self._schedule(len(batches), samples, length)
        for stage in self._stages:
            stage.objective = objective
        self._scale, self._total = scale or 1.0, torch.zeros((), device=self._plan.device)
        labels = torch.cat([batch.labels for batch in batches])
        first = 0 in self._plan.own()
        args = (torch.cat([batch.input_ids for batch in batches]),) if first else ()
        kwargs = {"labels": labels}
        positions = [batch.positions for batch in batches if batch.positions is not None]
        if positions:
            kwargs["positions"] = torch.cat(positions)
        step = self._step if scale is not None else self._evaluate
        step(schedule, *args, target=labels, return_outputs=False, **kwargs)
        return self._total

    def _step(self, schedule: Any, *args: Tensor, **kwargs: Any) -> None:
        schedule.step(*args, **kwargs)

    def _evaluate(self, schedule: Any, *args: Tensor, **kwargs: Any) -> None:
        with torch.no_grad(), compat.forward_alone(schedule):
            schedule.eval(*args, **kwargs)

    def _loss(self, loss: Tensor, _: Tensor) -> Tensor:
        """Called by the schedule with what the last stage returns: note the loss, and scale it."""
        self._total += loss.detach()
        return loss * self._scale

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
        return kind(given, count, loss_fn=self._loss, scale_grads=False)

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
        return made
