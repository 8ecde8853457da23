"""Planner of wrap.fsdp, by the source of torch's FSDP2 and torch.distributed.pipelining (2.13):
presets, savings, memory and traffic, and in a pipeline the order of passes and how long ranks wait.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pipeline import Precision, planning
from pipeline.planning import IN_BACKWARD, ModelShape, Moment, Pass, SampleShape, Tier, Topology
from stages.wrap.axes import FOLDED, layer_ranges, least_microbatches, required, stages_of
from stages.wrap.fsdp import Fsdp
from stages.wrap.torch_planner import EMBEDDINGS, ROOT, TorchMemory, UnitAmounts, WrapPlanner

WHOLE = {"reduce_every_microbatch": False}
"""Fields that keep gradients whole until a step's last micro-batch, where they are reduced."""
PRESETS = {
    "fsdp-shard-grad-op": (Tier.PARTLY_SHARDED, "shard_grad_op", "shards, gathered once a pass"),
    "fsdp": (Tier.SHARDED, "full_shard", "shards over all ranks, gathered block by block"),
    "fsdp-hybrid": (Tier.SHARDED_WITHIN_NODES, "hybrid_shard", "shards within each node"),
}
OFFERS: dict[str, tuple[str, str, Sequence[int], str]] = {
    "context": ("cp", "context_parallel", (2, 4, 8, 16, 32), "every sample"),
    "tensor": ("tp", "tensor_parallel", (2, 4, 8), "every layer"),
    "experts": ("ep", "expert_parallel", (2, 4, 8, 16, 32), "experts"),
    "pipeline": ("pp", "pipeline_parallel", (2, 4, 8), "blocks"),
}
"""Axis among the presets -> its short name, its field, sizes to offer, and what its ranks share."""
BOTH = [("context", 2), ("context", 4), ("pipeline", 2), ("pipeline", 4)]
"""Axes to offer together with a tensor-parallel axis of 8 ranks."""
TOKEN = 8
"""Bytes of a token's number."""
TIMES: dict[Any, int] = {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}
"""Time of a pass, in forward passes: backward has twice the products."""
Orders = Sequence[Sequence[tuple[planning.Kind, int, int, int]]]
"""The passes of each rank: kind, number of the stage on its rank and among all, micro-batch."""


class FsdpPlanner(WrapPlanner):
    stage: Fsdp

    @classmethod
    def presets(cls) -> planning.Presets:
        found = {
            name: planning.Preset(
                order=order, what=what, fields={"sharding": sharding}, at_first=WHOLE
            )
            for name, (order, sharding, what) in PRESETS.items()
        }
        single = [{axis: size} for axis, offer in OFFERS.items() for size in offer[2]]
        for axes in [*single, *({"tensor": 8, axis: size} for axis, size in BOTH)]:
            offers = [(*OFFERS[axis], size) for axis, size in axes.items()]
            shared = ", ".join(f"{what} over {size} ranks" for *_, what, size in offers)
            name = "-".join(["fsdp", *(f"{short}{size}" for short, *_, size in offers)])
            found[name] = planning.Preset(
                order=Tier.DIVIDED,
                what=f"shards, {shared}",
                fields={field: {"size": size} for _, field, *_, size in offers},
                # Gradients stay whole in a pipeline anyhow.
                at_first={} if "pipeline" in axes else WHOLE,
                axes=axes,
            )
        return found

    def savings(self, ranks: int) -> Iterator[planning.Saving]:
        if not self.stage.reduce_every_microbatch and self.stage.pipeline_parallel is None:
            fields, what = {"reduce_every_microbatch": True}, "gradients reduced every micro-batch"
            yield planning.Saving(planning.REDUCE, what, fields)

    def forecast(
        self, topology: Topology, profile: planning.Profile, precision: Precision,
        optimizer: planning.OptimizerShape, samples: SampleShape | None = None,
    ) -> planning.StrategyMemory:  # fmt: skip
        how = profile.model, optimizer, precision
        if topology.stages == 1 or samples is None:
            return Sharded(self.stage, topology, *how)
        return PipelinedShards(self.stage, topology, samples, *how)


class Sharded(TorchMemory):
    """Shards of everything; units gathered for as long as they run. A unit is a block, the
    embedding or the head, or the root with the rest. Of W shards, or fewer of an expert's weight, a
    rank holds

    - always m n / W of each unit and its optimizer state, and m n / W of gradients from the end of
      its backward on;
    - c n of the root and of the unit in use, and of the last block and the head from their forward
      to their backward; of all units up to the one in use if they stay after forward;
    - c n of each buffer that a gathered unit is copied from, with those that are gathered ahead;
    - c n of the gradients of the unit in backward. If they are reduced once a step, r n of each
      unit stays until then;
    - r n of the unit whose gradients were reduced last.
    """

    def __init__(self, stage: Fsdp, topology: Topology, *how: Any) -> None:
        self._axes = axes = required(stage, topology.ranks)
        super().__init__(
            stage, axes.data * axes.context, *how, shards=stage.shards(axes, topology.local_ranks),
            home="host" if stage.cpu_offload else "device", ends=stage.units == "block",
        )  # fmt: skip
        self._whole = self._amounts(lambda w: w.bytes(self._sizes.compute))
        """Bytes of whole units in the compute dtype."""
        self._stays = not stage.gathers_again
        """Whether units that forward has gathered stay until backward."""
        self._late = not stage.reduce_every_microbatch
        self._kept = len(self._model.blocks) - (stage.units == "block")
        """Place of the first unit that stays until backward: the last block; the head does too."""

    def _place(self, moment: Moment) -> int:
        place, trained = super()._place(moment), self._trained
        # Backward ends with the root and the embeddings; the larger one is the fuller moment.
        at_root = place == EMBEDDINGS and trained[ROOT] >= trained[EMBEDDINGS]
        return ROOT if at_root and moment.event == "reduce" else place

    def _running(self, moment: Moment, place: int) -> tuple[int, int, int]:
        trained, through = self._trained, moment.event == "reduce"
        backward, done = moment.event in IN_BACKWARD, moment.last or not self._late
        c, r, buffers = self._sizes.compute, self._sizes.reduce, self._buffers(moment.event, place)
        if backward and done:  # the gradients that were reduced last
            # Shards that replicas have averaged stay, if master gradients are other tensors.
            others = self._sizes.master != r or self._home == "host" or not moment.first
            replicas = others and self._stage.sharding in ("no_shard", "hybrid_shard")
            buffers += r * self._own.after(place) * replicas
            buffers += r * trained[place + (not through)]
            buffers += self._new_shard(place, c) * through
        # Whole gradients outside of the unit in backward: of the head, and of units that wait for
        # the last micro-batch.
        after = trained.after(place) if backward else 0
        waits = after if moment.first else trained.all - after
        waits *= self._late and not (moment.first and moment.last)
        own = trained[place] * (through and (moment.first or not self._late))
        own += trained[EMBEDDINGS] * (through and place == ROOT)
        own += self._head * (backward and moment.unit != "head" and not (through and place < 0))
        # The root is whole, and so is the unit that runs, or are those up to it. In backward before
        # the first block a table is not gathered.
        whole, first = self._whole, EMBEDDINGS if self._stays else min(place, self._kept)
        gathered = whole[ROOT] + whole.between(first, place + (not through))
        if backward and place < 0:
            table = whole[EMBEDDINGS] * (self._stays and place == ROOT)
            gathered = whole[ROOT] * (not through) + table
        return gathered, buffers, r * waits + c * own

    def _buffers(self, event: str, place: int) -> int:
        """Bytes of the buffers that units are gathered into: the one that runs, and those ahead."""
        whole, stage = self._whole, self._stage
        if self._shards > 1 and event in ("gather", "forward"):
            # While a unit is gathered, the buffer of the one before it is still there.
            before = (1 if place or whole[EMBEDDINGS] else 2) * (event == "gather")
            return whole.between(place - before, place + 1 + bool(stage.forward_prefetch))
        if self._shards > 1 and event in IN_BACKWARD and not self._stays:
            return whole.between(max(place - stage.backward_prefetch, 0), min(place, self._kept))
        return 0

    def _new_shard(self, place: int, size: int) -> int:
        """Bytes that a unit's shard takes beyond its whole gradients, in numbers of `size` bytes.
        torch's loop keeps the last whole gradient, of an embedding or a head."""
        m, r = self._sizes.master, self._sizes.reduce
        freed = self._shards == 1 or place not in (EMBEDDINGS, len(self._model.blocks))
        shard = (r if r == m else r + m) * self._own[place]
        return max(shard - size * self._trained[place] * freed, 0)

    def _reduced(self, moment: Moment, place: int) -> int:
        if moment.event == "step" or not (moment.first or self._late):
            return self._own.all
        done = moment.event in IN_BACKWARD and (moment.last or not self._late)
        return self._own.after(place) if done else 0

    def gradients(self, moment: Moment) -> tuple[int, int]:
        c = self._sizes.compute
        # Autograd adds to those that wait, unless they wait in another dtype.
        added = self._late and not moment.first and self._sizes.reduce == c
        # The second gradient of a tied weight is added to the first, which gives a third tensor.
        sums = self._model.tied and moment.unit == "embeddings"
        return 0 if added else c, c if sums else 0

    def traffic(self, microbatches: int) -> Iterator[planning.Traffic]:
        shards, tensor, sizes = self._shards, self._axes.tensor, self._sizes
        reductions = 1 if self._late else microbatches
        found: list[tuple[Any, int, str, int, int]] = []
        for among in sorted({weight.experts for weight, _ in self._model.counted()}):
            holders, of = max(shards // among, 1), "experts' " if among > 1 else ""

            def whole(weight: planning.Weight, size: int, among: int = among) -> int:
                own = weight.experts == among
                return weight.shard(shards, size) * weight.holders(shards) * own

            gathered = self._twice(self._amounts(lambda w: whole(w, sizes.compute))) * microbatches
            reduced = self._amounts(lambda w: whole(w, sizes.reduce) * w.trained).all * reductions
            found.append(("all-gather", gathered, f"{of}parameters", holders, among))
            found.append(("reduce-scatter", reduced, f"{of}gradients", holders, among))
        size = sizes.reduce * self._own.all * reductions
        found.append(("all-reduce", size, "gradients' shards", self.ranks // shards, shards))
        for kind, size, what, ranks, apart in found:
            if ranks > 1:
                yield planning.Traffic(
                    collective=kind, bytes=size, ranks=ranks, apart=apart * tensor, what=what
                )

    def copies(self, microbatches: int) -> planning.Copies:
        if self._home == "device":
            return planning.Copies()
        # Shards are cast when they are there, gradients before.
        down = self._sizes.master * self._own.all * (1 if self._late else microbatches)
        return planning.Copies(up=self._twice(self._held) * microbatches, down=down)

    def _twice(self, units: UnitAmounts) -> int:
        """An amount of all units, and again of those that are gathered again in backward."""
        return units.all + (0 if self._stays else units.between(0, self._kept))


class StageShards(Sharded):
    """Memory of one pipeline stage. Its gradients stay whole until the step's last backward, and
    all of its units count as gathered until then: a backward leaves them so."""

    def __init__(self, stage: Fsdp, topology: Topology, *how: Any) -> None:
        super().__init__(stage, topology, *how)
        self._late, self._end = True, len(self._model.blocks) + 1

    def _running(self, moment: Moment, place: int) -> tuple[int, int, int]:
        c, r, trained, whole = self._sizes.compute, self._sizes.reduce, self._trained, self._whole
        backward, through = moment.event in IN_BACKWARD, moment.event == "reduce"
        if moment.last:  # reduced: the root first, then units in order; all of them at rest
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


class PipelinedShards(Sharded):
    """Stages of a model on every rank of a pipeline, each sharded over the data-parallel ranks."""

    def __init__(
        self, stage: Fsdp, topology: Topology, samples: SampleShape, model: ModelShape, *how: Any
    ) -> None:
        super().__init__(stage, topology, model, *how)
        axes, asked = self._axes, stage.pipeline_parallel
        assert asked is not None
        self._asked, multiple, compute = asked, axes.context * axes.tensor, self._sizes.compute
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
            memory = StageShards(stage, topology, shape, *how)
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

    @functools.lru_cache(maxsize=4)  # noqa: B019 it lives as long as a plan is made
    def pipeline(self, microbatches: int) -> Sequence[planning.PipelineRank]:
        axes, asked = self._axes, self._asked
        count, orders = passes_of(asked.schedule, axes.pipeline, asked.per_rank, microbatches)
        idle = idle_shares(orders, axes.pipeline * asked.per_rank)
        return [
            planning.PipelineRank(
                ranks=axes.pipeline,
                apart=axes.ranks // axes.pipeline,
                stages=[replace(own[0], tokens=self._tokens), *own[1:]],
                passes=[Pass(kind, stage, batch) for kind, stage, _, batch in order],
                idle=share,
                microbatches=count,
            )
            for own, order, share in zip(self._ranks, orders, idle, strict=True)
        ]


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


def passes_of(schedule: str, ranks: int, per_rank: int, count: int) -> tuple[int, Orders]:
    """Micro-batches of a step of `count`, which a schedule may round up, and ranks' passes."""
    count = least_microbatches(schedule, ranks, count)
    if schedule not in ("GPipe", "1F1B"):
        from stages.wrap.pipeline_compat import orders

        return count, orders(schedule, ranks, per_rank, count)
    found = []
    for rank in range(ranks):
        # Forward passes ahead; then a backward and a forward in turn.
        ahead = count if schedule == "GPipe" else ranks - rank
        order: list[tuple[planning.Kind, int, int, int]] = []
        for batch in range(-ahead, count):
            order += [("backward", 0, rank, batch)] if batch >= 0 else []
            order += [("forward", 0, rank, batch + ahead)] if batch + ahead < count else []
        found.append([*order, ("reduce", 0, rank, 0)])
    return count, found


def idle_shares(orders: Orders, stages: int) -> list[float]:
    """Share of a step in which each rank waits, if stages take equal time and sending none."""
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
