"""Pipeline parallelism: ranks hold consecutive layers, and pass micro-batches on.

torch's schedules say who computes when, and send what is passed. All micro-batches of a step have
one shape, which follows from the batches alone, so only activations and their gradients are sent.
The last stage computes scores and loss in its forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from pipeline import DistContext, LossParts, Measure, MicroBatch, Scorer
from stages.batches.layout import equal_shapes
from stages.objectives.documents_compat import flash_documents, known_documents
from stages.objectives.judge import StepSums, measured
from stages.wrap.axes import FOLDED, SEVERAL_STAGES, Axes, least_microbatches
from stages.wrap.passes import Around, Backward, Passes, evaluating
from stages.wrap.pipeline import compat
from stages.wrap.pipeline.split import StageInput, stages_of

EVALUATED = 4
"""Micro-batches for each stage that an evaluation passes on at a time."""


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
        plan = self._plan
        ids = torch.empty(samples, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(
            samples, length, plan.width, dtype=plan.dtype, device="meta", requires_grad=True
        )
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = []
        for stage, number in zip(self._stages, plan.own(), strict=True):
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
            stages.append(made)
        kind = get_schedule_class(plan.schedule)
        given: Any = stages if plan.schedule in SEVERAL_STAGES else stages[0]
        return kind(given, count, loss_fn=lambda loss, _: loss, scale_grads=False)


class PipelinePasses(Passes):
    """Runs all micro-batches of a step at once; `parts` are this rank's stages."""

    def __init__(
        self, pipeline: Pipeline, parts: Sequence[nn.Module], dist: DistContext, axes: Axes
    ) -> None:
        super().__init__(parts, dist, axes)
        self._pipeline = pipeline

    def train(
        self, batches: Iterable[MicroBatch], sums: StepSums, around: Around, backward: Backward
    ) -> LossParts:
        even = self._even(batches)

        def loss(scorer: Scorer, number: int, inputs: Mapping[str, Tensor]) -> Tensor:
            whole, own = even[number]
            return sums.judge(scorer, own, whole, **inputs)

        with known_documents(*(own for _, own in even)):
            self._pipeline.run(even, loss)
        return sums.part(counted=self.counts_rows)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        rest, size = iter(batches), EVALUATED * self.axes.pipeline
        with evaluating(self.parts):
            while some := list(itertools.islice(rest, size)):
                found = self._measured(self._even(some), measure)
                yield from (found.get(number) for number in range(len(some)))

    def _measured(self, even: Sequence[Passed], measure: Measure) -> dict[int, Tensor]:
        """The rows of each micro-batch that are this rank's to give."""
        found: dict[int, Tensor] = {}

        def rows(scorer: Scorer, number: int, inputs: Mapping[str, Tensor]) -> Tensor:
            whole, own = even[number]
            found[number] = measured(measure, scorer, own, whole, **inputs)
            return torch.zeros((), device=self.device)

        with known_documents(*(own for _, own in even)):
            self._pipeline.run(even, rows)
        return found if self.counts_rows else {}

    @property
    def counts_rows(self) -> bool:
        return super().counts_rows and self._pipeline.ends_here

    def _even(self, batches: Iterable[MicroBatch]) -> list[Passed]:
        """The micro-batches and this rank's part of each, all of one shape."""
        given = list(batches)
        even = equal_shapes(given, self._pipeline.least(len(given)))
        return [self.laid_out(one) for one in even]
