"""wrap.fsdp in a pipeline, by the source of torch.distributed.pipelining (2.13): the order in which
ranks take their passes, how long they wait, and the memory of their stages."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline import Precision, planning
from pipeline.planning import IN_BACKWARD, Kind, ModelShape, Moment, Pass, PipelineRank, Topology
from stages.wrap.axes import FOLDED, layer_ranges, least_microbatches, required, stages_of
from stages.wrap.fsdp import Fsdp
from stages.wrap.fsdp_memory import Sharded
from stages.wrap.torch_planner import EMBEDDINGS, ROOT, UnitAmounts

TOKEN = 8
"""Bytes of a token's number."""
TIMES: dict[Any, int] = {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}
"""Time of a pass, in forward passes: backward has twice the products."""
Orders = Sequence[Sequence[tuple[Kind, int, int, int]]]
"""The passes of each rank: kind, number of the stage on its rank and among all, micro-batch."""


class PipelinedShards(Sharded):
    """Stages of a model on every rank of a pipeline, each sharded over the data-parallel ranks."""

    def __init__(
        self, stage: Fsdp, topology: Topology, profile: planning.Profile,
        optimizer: planning.OptimizerShape, precision: Precision, samples: planning.SampleShape,
    ) -> None:  # fmt: skip
        axes, asked, model = required(stage, topology.ranks), stage.pipeline_parallel, profile.model
        assert asked is not None
        super().__init__(stage, topology, model, optimizer, precision)
        self._asked = asked
        multiple, compute = axes.context * axes.tensor, planning.BYTES[precision.compute]
        whole = -(-samples.length // multiple) * multiple
        length, width = whole // axes.context, (model.embedding.whole or model.embedding.shape)[-1]
        positions = whole * TOKEN * (samples.packed or axes.context > 1)
        self._tokens = 2 * length * TOKEN + positions
        count = axes.pipeline * asked.per_rank
        block = sum(one.all_elements for one in model.kinds[model.blocks[0]])
        ranges = layer_ranges(len(model.blocks), count, model.embedding.all_elements, block)
        stages = []
        for number, blocks in enumerate(ranges):
            first, last = number == 0, number == count - 1
            shape = stage_shape(model, blocks, first=first, last=last)
            rows = UnitAmounts(shape, lambda w: w.shape[0] if w.trained and w.shape else 0)
            memory = StageShards(stage, topology, shape, optimizer, precision)
            stages.append(planning.PipelineStage(
                blocks=blocks, first=first, last=last, memory=memory,
                hidden=length * width * compute,
                # A gradient of each layer's output waits for the weights' half (Qi et al. 2023).
                deferred=length * compute * rows.all,
            ))  # fmt: skip
        folded = asked.schedule in FOLDED
        self._ranks = [
            [stages[n] for n in stages_of(rank, axes.pipeline, asked.per_rank, folded=folded)]
            for rank in range(axes.pipeline)
        ]
        fullest = max(self._ranks, key=lambda some: sum(one.memory.masters[0] for one in some))
        self.masters = sum(one.memory.masters[0] for one in fullest), self._home
        self.updated = sum(one.memory.updated for one in fullest)

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
                passes=[Pass(kind, stage, batch) for kind, stage, _, batch in order],
                idle=share,
                microbatches=count,
            )
            for own, order, share in zip(self._ranks, orders, idle, strict=True)
        ]


def passes_of(schedule: str, ranks: int, per_rank: int, count: int) -> tuple[int, Orders]:
    """Number of micro-batches of a step of `count` ones, which a schedule may round up, and the
    passes of each rank."""
    count = least_microbatches(schedule, ranks, count)
    if schedule not in ("GPipe", "1F1B"):
        from stages.wrap.pipeline_compat import orders

        return count, orders(schedule, ranks, per_rank, count)
    found = []
    for rank in range(ranks):
        # Forward passes ahead; then a backward and a forward in turn.
        ahead = count if schedule == "GPipe" else ranks - rank
        order: list[tuple[Kind, int, int, int]] = []
        for batch in range(-ahead, count):
            order += [("backward", 0, rank, batch)] if batch >= 0 else []
            order += [("forward", 0, rank, batch + ahead)] if batch + ahead < count else []
        found.append([*order, ("reduce", 0, rank, 0)])
    return count, found


def idle_shares(orders: Orders, stages: int) -> list[float]:
    """Share of a step in which each rank waits, if all stages take the same time and sending takes
    none."""
    over: dict[tuple[str, int, int], int] = {}
    clocks = [0] * len(orders)
    left = [deque(one for one in order if one[0] in TIMES) for order in orders]
    while any(left):
        for rank, order in enumerate(left):
            while order:
                kind, _, stage, batch = order[0]
                needs = ("forward", stage - (kind == "forward"), batch)
                if kind in ("backward", "inputs") and stage < stages - 1:
                    needs = ("backward", stage + 1, batch)
                if needs[1] >= 0 and kind != "weights" and needs not in over:
                    break  # what it needs has not ended
                order.popleft()
                clocks[rank] = max(clocks[rank], over.get(needs, 0)) + TIMES[kind]
                over["backward" if kind == "inputs" else kind, stage, batch] = clocks[rank]
    busy = [sum(TIMES.get(one[0], 0) for one in order) for order in orders]
    return [1 - one / max(clocks) for one in busy]


def stage_shape(model: ModelShape, blocks: range, *, first: bool, last: bool) -> ModelShape:
    """The weights of a stage. The last has a copy of the embedding that a head is tied to."""
    behind = (*model.behind, *((model.embedding.name,) if model.tied and last else ()))
    embedding, head = model.ends
    return replace(
        model,
        root=tuple(
            one
            for one in model.root
            if (last and one.name in behind) or (first and one.name not in model.behind)
        ),
        ends=(embedding if first else (), head if last and {*embedding}.isdisjoint(head) else ()),
        blocks=tuple(model.blocks[number] for number in blocks),
        late=tuple(name for name in model.late if last and name in behind),
        tied=False,
    )


class StageShards(Sharded):
    """Memory of one pipeline stage. Its gradients stay whole until the step's last backward, and
    all of its units count as gathered until then: a backward leaves them so."""

    def __init__(self, stage: Fsdp, topology: Topology, model: ModelShape, *how: Any) -> None:
        super().__init__(stage, topology, model, *how)
        self._late, self._end = True, len(model.blocks) + 1

    def _running(self, moment: Moment, place: int) -> tuple[int, int, int]:
        c, r, trained, whole = self._sizes.compute, self._sizes.reduce, self._trained, self._whole
        backward, through = moment.event in IN_BACKWARD, moment.event == "reduce"
        if moment.event == "rest" and moment.last:
            return 0, 0, 0
        if moment.last:  # reduced: the root first, then units in order
            gathered = whole.between(max(place + 1, EMBEDDINGS), self._end)
            reducing = r * trained[place] + self._new_shard(place, r)
            return gathered, reducing * through, r * trained.between(place, self._end) * through
        if moment.event == "weights":  # those of one dtype are added one by one
            each = c if moment.first else r if r == c else c + r
            return whole.all, 0, each * trained.all
        waits = (trained.after(place) if backward else 0) if moment.first else trained.all
        own = trained[place] if through and moment.first else 0
        own += self._head * (backward and moment.unit != "head")
        return whole.all, 0, r * waits + c * own

    def _reduced(self, moment: Moment, place: int) -> int:
        if moment.event == "step" or (moment.event == "rest" and moment.last):
            return self._own.all
        reduces = moment.event == "reduce" and moment.last
        return self._own.between(ROOT, place) if reduces else 0
