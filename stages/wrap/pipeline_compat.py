"""Pipeline parallelism by torch: ranks hold consecutive layers, and pass micro-batches on.

torch's schedules say who computes when, and send what is passed. All micro-batches of a step have
one shape, which ranks know from the batches, so only activations and their gradients are sent. The
last stage computes scores and loss in its forward.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
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
from stages.wrap.axes import SEVERAL_STAGES, Axes, PipelineParallel, least_microbatches
from stages.wrap.pipeline_split import StageInput
from stages.wrap.torch_compat import sum_in_reduce_dtype
from stages.wrap.torch_engine import Around, Backward, Passes, evaluating

EVALUATED = 4
"""Micro-batches for each stage that an evaluation passes on at a time."""

End = Callable[..., Tensor]
"""Function of a micro-batch's number, the last stage's scorer, this rank's part of the micro-batch,
all of it, and the model's inputs by name -> the stage's output."""


class Stage:
    """Replaces the forward method of a model that is cut down to its layers; names and a strategy's
    hooks stay. It takes token ids (first stage) or hidden states, and returns hidden states, or a
    scalar (last stage), in `dtype`. `beat` is called at each forward pass, as a sign of life."""

    number = 0
    """The micro-batch that passes, of `batches`."""
    batches: Sequence[tuple[MicroBatch, MicroBatch]] = ()
    """Micro-batches, whole and this rank's part of each."""
    end: End
    scorer: Scorer | None = None
    """Scorer of the last stage; None for others."""

    def __init__(
        self, module: Any, *, first: bool, last: bool, dtype: torch.dtype, beat: Callable[[], None]
    ) -> None:
        self.module, self.last = module, last
        self.forward = module.forward
        """The model's own method."""
        self.dtype, self._first, self._beat = dtype, first, beat
        self._stage_input = next((m for m in module.modules() if isinstance(m, StageInput)), None)
        module.forward = self._forward

    def _forward(self, received: Tensor) -> Tensor:
        self._beat()
        inputs = {"input_ids" if self._first else "inputs_embeds": received}
        if self._stage_input is not None:
            self._stage_input.received = received
        whole, own = self.batches[self.number]
        if self.scorer is not None:
            return self.end(self.number, self.scorer, own, whole, **inputs)
        placed: dict[str, Any] = dict(own.free) if self._first else {}
        if own.positions is not None:
            placed |= {"position_ids": own.positions, **flash_documents(self.module, own.positions)}
        output = self.module.base_model(**inputs, use_cache=False, **placed)
        hidden: Tensor = output.last_hidden_state
        return hidden.to(self.dtype).contiguous()


class PipelinePasses(Passes):
    """Runs all micro-batches of a step at once through the stages of a group of ranks."""

    def __init__(
        self, asked: PipelineParallel, group: ProcessGroup, stages: Mapping[int, Stage],
        width: int, dist: DistContext, axes: Axes,
    ) -> None:  # fmt: skip
        """`stages` are this rank's by number, ascending; hidden states have `width` elements."""
        super().__init__([stage.module for stage in stages.values()], dist, axes)
        self.counts_rows &= any(stage.last for stage in stages.values())
        self._asked, self._group, self._stages, self._width = asked, group, stages, width
        self._made: tuple[tuple[int, int, int], Any] | None = None

    def train(
        self, batches: Iterable[MicroBatch], sums: StepSums, around: Around, backward: Backward
    ) -> LossParts:
        self._run(batches, lambda _, *given, **inputs: sums.judge(*given, **inputs))
        return sums.part(counted=self.counts_rows)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], measure: Measure) -> Generator[Tensor | None]:
        rest, size = iter(batches), EVALUATED * self.axes.pipeline
        found: dict[int, Tensor] = {}

        def end(
            number: int, scorer: Scorer, own: MicroBatch, whole: MicroBatch, **inputs: Tensor
        ) -> Tensor:
            found[number] = measured(measure, scorer, own, whole, **inputs)
            return torch.zeros((), device=self.device)

        with evaluating(self.parts):
            while some := list(itertools.islice(rest, size)):
                self._run(some, end)
                for number in range(len(some)):
                    yield found[number] if self.counts_rows else None

    def _run(self, batches: Iterable[MicroBatch], end: End) -> None:
        """Run forward of all micro-batches, and backward from what `end` returns unless gradients
        are off (collective). Every rank of the group passes the same batches."""
        given = list(batches)
        least = least_microbatches(self._asked.schedule, self._group.size(), len(given))
        even = [self.laid_out(one) for one in equal_shapes(given, least)]
        own = [one for _, one in even]
        schedule = self._schedule(len(own), *own[0].input_ids.shape)
        for stage in self._stages.values():
            stage.batches, stage.end = even, end
        first = (torch.cat([one.input_ids for one in own]),) if 0 in self._stages else ()
        passed = {"target": torch.arange(len(own)), "return_outputs": False}
        with known_documents(*own):
            if torch.is_grad_enabled():
                schedule.step(*first, **passed)
                return
            with forward_only(schedule):
                schedule.eval(*first, **passed)

    def _schedule(self, count: int, samples: int, length: int) -> Any:
        """The schedule for `count` micro-batches of that shape. Only the last one is kept: it holds
        buffers for everything that is received."""
        key = count, samples, length
        if self._made is not None and self._made[0] == key:
            return self._made[1]
        self._made = None  # frees its buffers first
        # Shapes are stated, so that torch does not run the model for them and send them as pickles.
        ids = torch.empty(samples, length, dtype=torch.int64, device="meta")
        dtype = next(iter(self._stages.values())).dtype
        hidden = torch.empty(samples, length, self._width, dtype=dtype, device="meta")
        hidden.requires_grad_()
        loss = torch.empty((), device="meta", requires_grad=True)
        total, stages = self._group.size() * self._asked.per_rank, []
        for number, stage in self._stages.items():
            made = PipelineStage(
                stage.module, number, total, self.device,
                input_args=ids if number == 0 else hidden,
                output_args=loss if stage.last else hidden,
                group=self._group,
            )  # fmt: skip
            adapt(made, stage)
            stages.append(made)
        kind = get_schedule_class(self._asked.schedule)
        given: Any = stages if self._asked.schedule in SEVERAL_STAGES else stages[0]
        schedule = kind(given, count, loss_fn=lambda loss, _: loss, scale_grads=False)
        self._made = key, schedule
        return schedule


BACKWARD = {"SEND_B", "RECV_B", "I", "W", "B", "BW", "REDUCE_GRAD"}
"""Actions of a schedule that take part in backward only."""
KINDS = {
    "F": "forward", "B": "backward", "I": "inputs", "W": "weights", "REDUCE_GRAD": "reduce",
}  # fmt: skip
"""Actions of torch's schedules that compute or reduce; a plan takes stages as gathered."""


@contextlib.contextmanager
def forward_only(schedule: Any) -> Iterator[None]:
    """Leave actions of backward out of a schedule of several stages a rank in the body. `eval` of
    torch 2.13 runs them as if they did nothing, which fails where two neighbouring stages are on
    one rank."""
    whole = getattr(schedule, "pipeline_order_with_comms", None)
    if whole is None:
        yield
        return
    schedule.pipeline_order_with_comms = {
        rank: [
            part
            for action in actions
            for part in action.sub_actions or (action,)
            if part.computation_type.value not in BACKWARD
        ]
        for rank, actions in whole.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = whole


def adapt(stage: Any, numbered: Any) -> None:
    """Number the micro-batches that pass a stage of torch (`numbered.number`), and mend two faults
    of torch 2.13 where backward runs in two halves. The half for inputs keeps their gradients until
    the next step, which takes as much memory as all that was received. The half for weights is
    hidden from FSDP, so that gradients of several micro-batches might be summed in the compute
    dtype."""
    # No cycle of references: the buffers of a stage go with the last one.
    kind, alive = type(stage), weakref.ref(stage)

    def forward_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> Any:
        numbered.number = chunk
        return kind.forward_one_chunk(alive(), chunk, *args, **kwargs)

    def backward_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> None:
        stage: Any = alive()
        _, inputs = stage.fwd_cache[chunk]
        kind.backward_one_chunk(stage, chunk, *args, **kwargs)
        for one in inputs:
            one.grad = None

    def backward_weight_one_chunk(chunk: int, *args: Any, **kwargs: Any) -> None:
        stage: Any = alive()
        kind.backward_weight_one_chunk(stage, chunk, *args, **kwargs)
        sum_in_reduce_dtype(stage.submod)

    stage.forward_one_chunk = forward_one_chunk
    stage.backward_one_chunk = backward_one_chunk
    stage.backward_weight_one_chunk = backward_weight_one_chunk


def orders(
    schedule: str, ranks: int, per_rank: int, count: int
) -> list[list[tuple[Any, int, int, int]]]:
    """The passes of each rank under a schedule of several stages a rank: kind, number of the stage
    on its rank and among all, micro-batch."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * per_rank, group_size=ranks, group_rank=0, stage_index=ranks * number,
            submod=nn.Module(), has_backward=True, is_last=False,
        )
        for number in range(per_rank)
    ]  # fmt: skip
    made: Any = get_schedule_class(schedule)(stages, count)
    # The first stage has no gradients of inputs: torch skips that half there, and runs all of
    # backward as the half for weights.
    of_first = {**KINDS, "I": "", "W": "backward"}
    found = []
    for rank in range(ranks):
        rows = [
            (kind, one.stage_index, one.microbatch_index or 0)
            for one in made.pipeline_order_with_comms[rank]
            if (kind := (KINDS if one.stage_index else of_first).get(one.computation_type.value))
        ]
        numbers = sorted({stage for _, stage, _ in rows})
        found.append([(kind, numbers.index(stage), stage, batch) for kind, stage, batch in rows])
    return found
