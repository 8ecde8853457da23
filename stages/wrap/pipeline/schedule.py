"""Pipeline parallelism: ranks hold consecutive layers, and pass micro-batches on.

torch's schedules say who computes when, and send what is passed. All micro-batches of a step have
one shape, which ranks know from the batches, so only activations and their gradients are sent. The
last stage computes scores and loss in its forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from pipeline import DistContext, LossParts, Measure, MicroBatch, Scorer
from stages.batches.layout import equal_shapes
from stages.objectives.compat import flash_documents, known_documents
from stages.objectives.cross_entropy import StepSums, measured
from stages.wrap.axes import FOLDED, SEVERAL_STAGES, Axes, least_microbatches, stages_of
from stages.wrap.passes import Around, Backward, Passes, evaluating
from stages.wrap.pipeline import compat
from stages.wrap.pipeline.split import StageInput

EVALUATED = 4
"""Micro-batches for each stage that an evaluation passes on at a time."""


Passed = tuple[MicroBatch, MicroBatch]
"""A micro-batch, whole and this rank's part of it."""
End = Callable[[Scorer, int, Mapping[str, Tensor]], Tensor]
"""Function of the last stage's scorer, the micro-batch's number and the model's inputs -> the
stage's output."""


class Stage:
    """Replaces the forward method of a model that is cut down to its layers; names and a strategy's
    hooks stay. It takes token ids (first stage) or hidden states, and returns hidden states, or a
    scalar (last stage). `beat` is called at each forward pass, as a sign of life."""

    number = 0
    """The micro-batch that passes, of `batches`."""
    batches: Sequence[Passed] = ()
    end: End
    scorer: Scorer | None = None
    """Scorer of the last stage; None for others."""

    def __init__(
        self, module: Any, *, first: bool, last: bool, dtype: torch.dtype, beat: Callable[[], None]
    ) -> None:
        self.module, self.last = module, last
        self.forward = module.forward
        """The model's own method."""
        self._first, self._dtype, self._beat = first, dtype, beat
        self._stage_input = next((m for m in module.modules() if isinstance(m, StageInput)), None)
        module.forward = self._forward

    def _forward(self, received: Tensor) -> Tensor:
        self._beat()
        inputs = {"input_ids" if self._first else "inputs_embeds": received}
        if self._stage_input is not None:
            self._stage_input.received = received
        if self.scorer is not None:
            return self.end(self.scorer, self.number, inputs)
        _, own = self.batches[self.number]
        placed: dict[str, Any] = dict(own.free) if self._first else {}
        if own.positions is not None:
            placed |= {"position_ids": own.positions, **flash_documents(self.module, own.positions)}
        output = self.module.base_model(**inputs, use_cache=False, **placed)
        hidden: Tensor = output.last_hidden_state
        return hidden.to(self._dtype).contiguous()


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """Runs the micro-batches of a step through the stages of a group of ranks (collective)."""

    schedule: str
    """Name of a schedule of torch."""
    group: ProcessGroup
    stages_per_rank: int
    width: int
    """Width of the hidden states."""
    dtype: torch.dtype
    """Dtype in which hidden states are sent."""
    device: torch.device
    stages: list[Stage] = field(default_factory=list)
    """This rank's, ascending."""
    _made: tuple[tuple[int, int, int], Any] | None = field(default=None, init=False)

    @property
    def count(self) -> int:
        """Number of stages."""
        return self.group.size() * self.stages_per_rank

    def own(self) -> list[int]:
        """Numbers of this rank's stages, ascending."""
        rank, ranks, folded = self.group.rank(), self.group.size(), self.schedule in FOLDED
        return stages_of(rank, ranks, self.stages_per_rank, folded=folded)

    def run(self, batches: Sequence[Passed], end: End) -> None:
        """Run forward of all micro-batches, and backward from what `end` returns unless gradients
        are off. Every rank of the group passes the same batches, all of one shape, at least as many
        as `least` says."""
        own = [one for _, one in batches]
        schedule = self._schedule(len(own), *own[0].input_ids.shape)
        for stage in self.stages:
            stage.batches, stage.end = batches, end
        first = (torch.cat([one.input_ids for one in own]),) if 0 in self.own() else ()
        passed = {"target": torch.arange(len(own)), "return_outputs": False}
        with known_documents(*own):
            if torch.is_grad_enabled():
                schedule.step(*first, **passed)
                return
            with compat.forward_only(schedule):
                schedule.eval(*first, **passed)

    def least(self, count: int) -> int:
        """Number of micro-batches that the schedule takes, `count` or a few more."""
        return least_microbatches(self.schedule, self.group.size(), count)

    def _schedule(self, count: int, samples: int, length: int) -> Any:
        """The schedule for `count` micro-batches of that shape. Only the last one is kept: it holds
        buffers for everything that is received."""
        key = count, samples, length
        if self._made is not None and self._made[0] == key:
            return self._made[1]
        self._made = None  # frees its buffers first
        # Shapes are stated, so that torch does not run the model for them and send them as pickles.
        ids = torch.empty(samples, length, dtype=torch.int64, device="meta")
        hidden = torch.empty(samples, length, self.width, dtype=self.dtype, device="meta")
        hidden.requires_grad_()
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = []
        for stage, number in zip(self.stages, self.own(), strict=True):
            made = PipelineStage(
                stage.module, number, self.count, self.device,
                input_args=ids if number == 0 else hidden,
                output_args=loss if number == self.count - 1 else hidden,
                group=self.group,
            )  # fmt: skip
            compat.adapt(made, stage)
            stages.append(made)
        kind = get_schedule_class(self.schedule)
        given: Any = stages if self.schedule in SEVERAL_STAGES else stages[0]
        schedule = kind(given, count, loss_fn=lambda loss, _: loss, scale_grads=False)
        self._made = key, schedule
        return schedule


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

        self._pipeline.run(even, loss)
        return sums.part(counted=self.counts_rows)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        rest, size = iter(batches), EVALUATED * self.axes.pipeline
        with evaluating(self.parts):
            while some := list(itertools.islice(rest, size)):
                found = self._rows(self._even(some), measure)
                yield from (found.get(number) for number in range(len(some)))

    def _rows(self, even: Sequence[Passed], measure: Measure) -> dict[int, Tensor]:
        """The rows of each micro-batch that this rank has to return."""
        found: dict[int, Tensor] = {}

        def rows(scorer: Scorer, number: int, inputs: Mapping[str, Tensor]) -> Tensor:
            whole, own = even[number]
            found[number] = measured(measure, scorer, own, whole, **inputs)
            return torch.zeros((), device=self.device)

        self._pipeline.run(even, rows)
        return found if self.counts_rows else {}

    @property
    def counts_rows(self) -> bool:
        return super().counts_rows and any(one.last for one in self._pipeline.stages)

    def _even(self, batches: Iterable[MicroBatch]) -> list[Passed]:
        """The micro-batches and this rank's part of each, all of one shape."""
        given = list(batches)
        return [self.laid_out(one) for one in equal_shapes(given, self._pipeline.least(len(given)))]
