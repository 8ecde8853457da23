"""wrap.fsdp in a pipeline, by the source of torch.distributed.pipelining (2.13): the order in which
ranks take their passes, how long they wait, and the memory of their stages."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipeline.planning import (
    IN_BACKWARD,
    Gradients,
    Item,
    Kind,
    ModelShape,
    Moment,
    OptimizerShape,
    Pass,
    PipelineRank,
    PipelineStage,
    Profile,
    SampleShape,
    Sizes,
    StrategyMemory,
    Topology,
    Traffic,
)
from stages.wrap.axes import FOLDED, least_microbatches, required
from stages.wrap.fsdp import Fsdp
from stages.wrap.fsdp_memory import Sharded
from stages.wrap.pipeline.split import layer_ranges, stages_of
from stages.wrap.torch_planner import EMBEDDINGS, ROOT

TOKEN = 8
"""Bytes of a token's number."""
TIMES: dict[Kind, int] = {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}
"""Time of a pass, in that of a forward: backward has twice the products."""


class GlobalPass(NamedTuple):
    """A pass, and the number of its stage among those of all ranks."""

    local: Pass
    stage: int


Orders = Sequence[Sequence[GlobalPass]]
"""The passes of each rank."""


class PipelinedShards(StrategyMemory):
    """Stages of a model on every rank of a pipeline, each sharded over the data-parallel ranks."""

    def __init__(
        self, topology: Topology, profile: Profile, optimizer: OptimizerShape, sizes: Sizes,
        samples: SampleShape, *, config: Fsdp,
    ) -> None:  # fmt: skip
        axes, asked = required(config, topology.ranks), config.pipeline_parallel
        assert asked is not None
        self._axes, self._asked = axes, asked
        multiple = axes.context * axes.tensor
        whole = -(-samples.length // multiple) * multiple
        length, model = whole // axes.context, profile.model
        width = (model.embedding.whole or model.embedding.shape)[-1]
        hidden = length * width * sizes.compute
        positions = whole * TOKEN * (samples.packed or axes.context > 1)
        last = axes.pipeline * asked.per_rank - 1

        def stage(number: int, blocks: range) -> PipelineStage:
            shape = stage_shape(model, blocks, first=number == 0, last=number == last)
            memory = StageShards(topology, shape, optimizer, sizes, config=config)
            return PipelineStage(
                blocks=blocks,
                first=number == 0,
                last=number == last,
                stays=memory.stays,
                memory=memory,
                hidden=hidden,
                tokens=0,
            )

        self._tokens = 2 * length * TOKEN + positions
        block = sum(one.all_elements for one in model.kinds[model.blocks[0]])
        ranges = layer_ranges(len(model.blocks), last + 1, model.embedding.all_elements, block)
        stages = [stage(*one) for one in enumerate(ranges)]
        folded = asked.schedule in FOLDED
        own = (
            stages_of(rank, axes.pipeline, asked.per_rank, folded=folded)
            for rank in range(axes.pipeline)
        )
        self._ranks = [[stages[number] for number in numbers] for numbers in own]
        fullest = max(self._ranks, key=lambda some: sum(one.memory.masters[0] for one in some))
        self.ranks = axes.data * axes.context
        self.masters = sum(one.memory.masters[0] for one in fullest), fullest[0].memory.masters[1]
        self.updated = sum(one.memory.updated for one in fullest)
        self._fullest = fullest

    def held(self, moment: Moment) -> Iterator[Item]:
        for stage in self._fullest:
            yield from stage.memory.held(moment)

    def gradients(self, moment: Moment) -> Gradients:
        return self._fullest[0].memory.gradients(moment)

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        for stage in self._fullest:
            yield from stage.memory.traffic(microbatches)

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def pipeline(self, microbatches: int) -> Sequence[PipelineRank]:
        axes, asked = self._axes, self._asked
        count, orders = passes_of(asked.schedule, axes.pipeline, asked.per_rank, microbatches)
        idle = idle_shares(orders, axes.pipeline * asked.per_rank)
        return [
            PipelineRank(
                ranks=axes.pipeline,
                apart=axes.ranks // axes.pipeline,
                stages=[replace(own[0], tokens=self._tokens), *own[1:]],
                passes=[one.local for one in order],
                idle=share,
                microbatches=count,
            )
            for own, order, share in zip(self._ranks, orders, idle, strict=True)
        ]


def passes_of(schedule: str, ranks: int, per_rank: int, count: int) -> tuple[int, Orders]:
    """Number of micro-batches of a step of `count` ones, which a schedule may round up, and the
    passes of each rank."""
    count = least_microbatches(schedule, ranks, count)
    if schedule in ("GPipe", "1F1B"):
        ahead = [count if schedule == "GPipe" else ranks - rank for rank in range(ranks)]
        return count, [[*_by_turns(rank, count, most)] for rank, most in enumerate(ahead)]
    from stages.wrap.pipeline.compat import orders

    return count, [
        [GlobalPass(Pass(kind, local, batch), stage) for kind, local, stage, batch in passes]
        for passes in orders(schedule, ranks, per_rank, count)
    ]


def _by_turns(rank: int, count: int, ahead: int) -> Iterator[GlobalPass]:
    """Forward of `ahead` micro-batches, then a backward and a forward in turn."""
    for batch in range(-ahead, count):
        if batch >= 0:
            yield GlobalPass(Pass("backward", 0, batch), rank)
        if batch + ahead < count:
            yield GlobalPass(Pass("forward", 0, batch + ahead), rank)
    yield GlobalPass(Pass("reduce", 0), rank)


def idle_shares(orders: Orders, stages: int) -> list[float]:
    """Share of a step in which each rank waits, if all stages take the same time and sending takes
    none."""
    over: dict[tuple[str, int, int], int] = {}
    clocks = [0] * len(orders)
    left = [deque(one for one in order if one.local.kind in TIMES) for order in orders]
    while any(left):
        for rank, order in enumerate(left):
            while order and (ready := _ready(over, order[0], stages)) is not None:
                (kind, _, batch, _), stage = order.popleft()
                clocks[rank] = max(clocks[rank], ready) + TIMES[kind]
                over["backward" if kind == "inputs" else kind, stage, batch] = clocks[rank]
    busy = [sum(TIMES.get(one.local.kind, 0) for one in order) for order in orders]
    return [1 - one / max(clocks) for one in busy]


def _ready(over: Mapping[tuple[str, int, int], int], one: GlobalPass, stages: int) -> int | None:
    """Time from which a pass can begin; None before what it needs has ended."""
    (kind, _, batch, _), stage = one
    if kind == "forward":
        return 0 if stage == 0 else over.get(("forward", stage - 1, batch))
    if kind == "weights":
        return 0
    if stage == stages - 1:
        return over.get(("forward", stage, batch))
    return over.get(("backward", stage + 1, batch))


def stage_shape(model: ModelShape, blocks: range, *, first: bool, last: bool) -> ModelShape:
    """The weights of a stage. The last has a copy of the embedding that a head is tied to."""
    copied = (model.embedding.name,) * (model.tied and last)
    behind = (*model.behind, *copied)
    root = tuple(
        one
        for one in model.root
        if (last and one.name in behind) or (first and one.name not in model.behind)
    )
    embedding, head = model.ends
    apart = last and set(embedding).isdisjoint(head)
    return replace(
        model,
        root=root,
        ends=(embedding if first else (), head if apart else ()),
        blocks=tuple(model.blocks[number] for number in blocks),
        late=tuple(name for name in model.late if last and name in behind),
        tied=False,
    )


class StageShards(Sharded):
    """Memory of one pipeline stage. Its gradients stay whole until the step's last backward. Units
    that a backward gathered stay gathered until the next forward uses them, or until they are
    reduced."""

    def __init__(
        self, topology: Topology, model: ModelShape, optimizer: OptimizerShape, sizes: Sizes, *,
        config: Fsdp,
    ) -> None:  # fmt: skip
        super().__init__(topology, model, optimizer, sizes, config=config)
        self._late = True

    def _gathered(self, moment: Moment, place: int) -> int:
        whole, end = self._whole, len(self._model.blocks) + 1
        root = whole.between(ROOT, 0)  # the embeddings stay as well
        kept = 0 if moment.whole else self._kept
        if moment.event == "rest":
            return 0 if moment.last else root + whole.between(kept, end)
        if moment.last:  # reduced: the root first, then units in order
            return whole.between(max(place + 1, EMBEDDINGS), end)
        if moment.event in IN_BACKWARD or moment.event in ("begin", "weights"):
            return root + whole.between(min(max(place, 0), kept), end)
        low = 0 if self.stays else max(min(place, self._kept), 0)
        if moment.whole:
            return root + whole.between(low, end)
        # The forward before it left units for its backward.
        behind = whole.between(max(place + 1, self._kept), end)
        return root + whole.between(low, place + 1) + behind

    def _gathering(self, moment: Moment, place: int) -> int:
        if moment.whole or moment.last or moment.event == "rest":
            return 0
        if moment.event == "regather" and moment.unit == "head":  # all of the stage at once
            return 0 if self._shards == 1 else self._whole.all
        if moment.event == "begin":  # the loss is inside of the stage's module
            moment = moment._replace(event="backward")
        return super()._gathering(moment, place)

    def _reducing(self, moment: Moment, place: int) -> int:
        if moment.event != "reduce" or not moment.last:
            return 0
        r = self._sizes.reduce
        return r * self._padded[place] + self._new_shard(place, r)

    def _unreduced(self, moment: Moment, place: int) -> int:
        c, r, trained = self._sizes.compute, self._sizes.reduce, self._trained
        backward, through = moment.event in IN_BACKWARD, moment.event == "reduce"
        if moment.last:
            return r * trained.between(place, len(self._model.blocks) + 1) if through else 0
        if moment.event == "weights":  # those of one dtype are added one by one
            return (c if moment.first else r if r == c else c + r) * trained.all
        waits = (trained.after(place) if backward else 0) if moment.first else trained.all
        own = trained[place] if through and moment.first else 0
        head = backward and moment.unit != "head"
        return r * waits + c * (own + self._head * head)

    def _reduced(self, moment: Moment) -> int:
        if moment.event == "step" or (moment.event == "rest" and moment.last):
            return self._own.all
        if moment.event == "reduce" and moment.last:
            return self._own.between(ROOT, self._place(moment))
        return 0
