"""Memory and traffic of wrap.fsdp, by the source of torch.distributed.fsdp.fully_shard (2.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pipeline.planning import (
    BUFFERS,
    GATHERED,
    IN_BACKWARD,
    WHOLE_GRADIENTS,
    Copies,
    Gradients,
    Item,
    ModelShape,
    Moment,
    OptimizerShape,
    Place,
    Sizes,
    Topology,
    Traffic,
    Weight,
)
from stages.wrap.axes import required
from stages.wrap.fsdp import Fsdp
from stages.wrap.torch_planner import EMBEDDINGS, ROOT, TorchMemory, UnitAmounts


class Sharded(TorchMemory):
    """Shards of everything; units gathered for as long as they run.

    A unit is a block, the embedding or the head, or the root with the rest. n: its elements; m, c,
    r: bytes of a number in the master, compute and reduce dtype; W: number of shards of a weight;
    of an expert's weight, the number of ranks that hold the same experts. Elements are those of
    this rank's part, where layers are divided. A rank holds

    - always m n / W of each unit and its optimizer state, and m n / W of gradients from the end of
      its backward on;
    - c n of the root and of the unit in use, and of the last block and the head from their forward
      to their backward; of all units up to the one in use if they stay after forward;
    - c n of each buffer that a gathered unit is copied from; one ahead, or as many as configured;
    - c n of the gradients of the unit in backward. If they are reduced once a step, r n of each
      unit stays until then;
    - r n of the unit whose gradients were reduced last.
    """

    def __init__(
        self, topology: Topology, model: ModelShape, optimizer: OptimizerShape, sizes: Sizes, *,
        config: Fsdp,
    ) -> None:  # fmt: skip
        self._axes = axes = required(config, topology.ranks)
        shards = config.shards(axes, topology.local_ranks)
        home: Place = "host" if config.cpu_offload else "device"
        ranks = axes.data * axes.context
        blocks = config.units == "block"
        ends = model.ends if blocks and {*model.ends[0]}.isdisjoint(model.ends[1]) else ((), ())
        super().__init__(ranks, model, optimizer, sizes, shards=shards, home=home, ends=ends)
        self._config, self._ends = config, ends
        self.stays = config.sharding not in ("full_shard", "hybrid_shard")
        """Whether units that forward has gathered stay until backward."""
        self._kept = len(model.blocks) - blocks
        """Place of the first unit that stays until backward anyhow: the last block, and the head
        behind it."""
        self._late = not config.reduce_every_microbatch
        self._whole = self._amounts(self._gathers)
        """Bytes of gathered units."""
        self._padded = self._amounts(self._reduces)
        """Elements of the gradients that are reduced."""
        self._trained = self._amounts(lambda w: w.elements if w.trained else 0)
        self._gathered_experts = self._of_experts(self._gathers, experts=True)
        """Bytes of gathered experts, which are units of their own inside of blocks."""
        self._reduced_experts = self._of_experts(self._reduces, experts=True)
        """Elements of the experts' gradients that are reduced."""
        own = self._amounts(lambda w: w.shard(shards, 1) * (w.trained and w.experts > 1))
        self._own_experts = own
        places = dict.fromkeys(ends[0], EMBEDDINGS) | dict.fromkeys(ends[1], len(model.blocks))
        self._last = {places.get(w.name, ROOT): w.elements for w in model.root if w.trained}
        """Elements of the last weight of each unit that is no block: torch's loop over gradients
        keeps it, if there are several shards."""

    def _amounts(self, amount: Callable[[Weight], int]) -> UnitAmounts:
        return UnitAmounts(self._model, amount, self._ends)

    def _gathers(self, weight: Weight) -> int:
        """Bytes of a gathered weight."""
        return weight.shard(self._shards, self._sizes.compute) * weight.holders(self._shards)

    def _reduces(self, weight: Weight) -> int:
        """Elements of a weight's gradient that is reduced."""
        shards = self._shards
        return weight.shard(shards, 1) * weight.holders(shards) if weight.trained else 0

    def _place(self, moment: Moment) -> int:
        place = super()._place(moment)
        if (moment.event, place) == ("reduce", EMBEDDINGS):
            # Backward ends with both, the root first; the larger one is the fuller moment.
            return EMBEDDINGS if self._trained[EMBEDDINGS] > self._trained[ROOT] else ROOT
        return place

    def _running(self, moment: Moment, place: int) -> Iterator[Item]:
        buffers = self._gathering(moment, place) + self._reducing(moment, place)
        yield Item(GATHERED, "device", self._gathered(moment, place))
        yield Item(BUFFERS, "device", buffers)
        yield Item(WHOLE_GRADIENTS, "device", self._unreduced(moment, place))

    def _gathered(self, moment: Moment, place: int) -> int:
        """Bytes of whole units: the root, and the unit that runs, or those up to it."""
        through, whole = moment.event == "reduce", self._whole
        if through and place < 0:
            return whole[EMBEDDINGS] * (self.stays and place == ROOT)
        if self.stays:
            return whole[ROOT] + whole.between(EMBEDDINGS, place if through else place + 1)
        if moment.event in IN_BACKWARD and place == EMBEDDINGS:  # a table is not gathered for that
            return whole[ROOT]
        between = whole.between(min(place, self._kept), place if through else place + 1)
        return whole[ROOT] + between - self._gathered_experts.between(self._kept, place)

    def _gathering(self, moment: Moment, place: int) -> int:
        """Bytes of the buffers that units are gathered into: of the unit before and those ahead."""
        whole = self._whole
        if self._shards == 1 or moment.event in ("loss", "begin"):
            return 0
        experts = self._gathered_experts
        if moment.event not in IN_BACKWARD:
            ahead = self._config.forward_prefetch or bool(experts.all)
            if not whole[place]:
                return self._newest(self._unit_before(place))
            if moment.event == "forward":
                return self._newest(place) + whole.between(place + 1, place + 1 + ahead)
            own = whole.between(place, place + max(ahead, 1))
            return self._newest(self._unit_before(place)) + own
        if self.stays:
            return 0
        end = place + 1 if moment.event == "regather" else place
        # The root, which has the head otherwise, leaves it to torch what is gathered ahead.
        alone = moment.unit == "head" and not whole[place]
        ahead = 1 if alone else self._config.backward_prefetch
        if moment.event == "regather" and experts[place]:  # those of the block come after it
            return experts[place] + whole.between(max(place - ahead, 0), min(place, self._kept))
        return whole.between(max(end - ahead, 0), min(end, self._kept))

    def _newest(self, place: int) -> int:
        """Bytes of the buffer that stays when a unit has been gathered: its experts' come last."""
        return self._gathered_experts[place] or self._whole[place]

    def _unit_before(self, place: int) -> int:
        """Place of the unit that is gathered before the one at a place, which need not be one."""
        before = place - 1
        while before > ROOT and not self._whole[before]:
            before -= 1
        return before

    def _reducing(self, moment: Moment, place: int) -> int:
        """Bytes of the gradients that were reduced last. If master gradients are other tensors, the
        shards that replicas have averaged stay as well."""
        if moment.event not in IN_BACKWARD or (self._late and not moment.last):
            return 0
        m, c, r = self._sizes.master, self._sizes.compute, self._sizes.reduce
        others = m != r or self._home == "host" or not moment.first
        replicas = self._config.sharding in ("no_shard", "hybrid_shard")
        stays = r * self._own.after(place) if others and replicas else 0
        if moment.event != "reduce":
            return stays + r * (self._padded[place + 1] - self._reduced_experts[place + 1])
        padded = r * (self._padded[place] - self._reduced_experts[place])
        return stays + padded + self._new_shard(place, c)

    def _new_shard(self, place: int, size: int) -> int:
        """Bytes that a unit's shard takes beyond those of its whole gradients, in numbers of `size`
        bytes: all of them but the last are freed before there is a shard."""
        m, r = self._sizes.master, self._sizes.reduce
        last = self._last.get(place, 0) if self._shards > 1 else 0
        freed = size * (self._trained[place] - last)
        return max((r if r == m else r + m) * self._own[place] - freed, 0)

    def _unreduced(self, moment: Moment, place: int) -> int:
        """Bytes of whole gradients outside of the unit in backward: of the head, and of units that
        wait for the last micro-batch."""
        c, r, trained = self._sizes.compute, self._sizes.reduce, self._trained
        backward, through = moment.event in IN_BACKWARD, moment.event == "reduce"
        done = trained.after(place) if backward else 0
        several = self._late and not (moment.first and moment.last)
        waits = (done if moment.first else trained.all - done) if several else 0
        added = self._late and not moment.first
        own = trained[place] if through and not added else 0
        own += trained[EMBEDDINGS] if through and place == ROOT else 0
        head = backward and moment.unit != "head" and not (through and place < 0)
        return r * waits + c * (own + self._head * head)

    def _reduced(self, moment: Moment) -> int:
        if moment.event == "step" or not (moment.first or self._late):
            return self._own.all
        done = moment.event in IN_BACKWARD and (moment.last or not self._late)
        return self._own.after(self._place(moment)) if done else 0

    def gradients(self, moment: Moment) -> Gradients:
        c = self._sizes.compute
        # Autograd adds to those that wait, unless they wait in another dtype.
        added = self._late and not moment.first and self._sizes.reduce == c
        # The second gradient of a tied weight is added to the first, which gives a third tensor.
        sums = self._model.tied and moment.unit == "embeddings"
        kept = 0 if added else c
        return Gradients(kept + self._reducing_experts(moment), c if sums else 0)

    def _reducing_experts(self, moment: Moment) -> float:
        """Bytes for an element of a block's gradients because those of experts are reduced as soon
        as they are there: of the buffer and the shard, without gathered experts and gradients."""
        place = self._place(moment)
        if not self._reduced_experts[place] or (self._late and not moment.last):
            return 0
        c, r = self._sizes.compute, self._sizes.reduce
        whole, own = c * self._reduced_experts[place], r * self._own_experts[place]
        if self._own_experts[place] == self._reduced_experts[place]:
            own += own  # one shard: nothing is sent, but a quotient is copied
        before = r * (self._padded[place + 1] - self._reduced_experts[place + 1])
        more = r * self._reduced_experts[place] + max(whole, own) - 2 * whole - before
        return max(more, 0) / self._trained[place]

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        shards, replicas, apart = self._shards, self.ranks // self._shards, self._axes.tensor
        reductions = 1 if self._late else microbatches
        for among in sorted({weight.experts for weight, _ in self._model.counted()}):
            holders, what = max(shards // among, 1), "experts' " if among > 1 else ""
            groups: dict[str, Any] = {"ranks": holders, "apart": apart * among}
            experts = among > 1
            passed = self._twice(self._of_experts(self._gathers, experts=experts), experts=experts)
            gathered = passed * microbatches
            elements = self._of_experts(self._reduces, experts=experts).all
            reduced = self._sizes.reduce * elements
            if holders > 1:
                names = f"{what}parameters", f"{what}gradients"
                yield Traffic(collective="all-gather", bytes=gathered, what=names[0], **groups)
                sent = reduced * reductions
                yield Traffic(collective="reduce-scatter", bytes=sent, what=names[1], **groups)
        if replicas > 1:
            sent = self._sizes.reduce * self._own.all * reductions
            groups = {"ranks": replicas, "apart": shards * apart}
            yield Traffic(collective="all-reduce", bytes=sent, what="gradients' shards", **groups)

    def _of_experts(self, amount: Callable[[Weight], int], *, experts: bool) -> UnitAmounts:
        """An amount of the weights that ranks divide by experts, or of the others."""
        return self._amounts(lambda w: amount(w) if (w.experts > 1) == experts else 0)

    def copies(self, microbatches: int) -> Copies:
        if self._home == "device":
            return Copies()
        # Shards are cast when they are there, gradients before.
        down = self._sizes.master * self._own.all * (1 if self._late else microbatches)
        return Copies(up=self._twice(self._held) * microbatches, down=down)

    def _twice(self, units: UnitAmounts, *, experts: bool = False) -> int:
        """An amount of all units, or of units of experts, and again of those that are gathered
        again in backward."""
        end = len(self._model.blocks) if experts else self._kept
        return units.all + (0 if self.stays else units.between(0, end))
