"""What wrap.fsdp holds, and when, by the source of torch.distributed.fsdp.fully_shard (2.13)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from pipeline.artifacts import ModelSource, OptimizerPlan, Precision
from pipeline.engine import Engine
from pipeline.planning.planner import REDUCE, Planner, Saving, Tier
from pipeline.planning.profile import Profile
from pipeline.planning.shapes import ModelShape, OptimizerShape, Sizes, Weight
from pipeline.planning.strategy import (
    BUFFERS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    UPDATE_TEMPORARIES,
    WHOLE_GRADIENTS,
    Copies,
    Gradients,
    Item,
    Moment,
    StrategyMemory,
    Traffic,
)
from pipeline.planning.timeline import Place
from pipeline.planning.topology import Topology
from pipeline.stage import Context, Preset, Presets
from stages.wrap.fsdp import Fsdp

WHOLE = {"reduce_every_microbatch": False}
"""Gradients stay whole until a step's last micro-batch, and are sent once."""
REDUCING = ("backward", "regather", "reduce")


class Sharded(StrategyMemory):
    """Shards of everything; units gathered for as long as they run.

    A unit is a block, or the root. A gathered unit is copied out of the buffer that the all-gather
    fills, so both are there for a moment: in forward until the next unit is gathered, in backward
    no longer. Backward gathers a unit ahead. Gradients stay whole, in the compute dtype, until
    their unit's backward is through; the buffer that is reduced, in the reduce dtype, lives until
    the next unit's is needed.
    """

    def __init__(
        self,
        model: ModelShape,
        optimizer: OptimizerShape,
        sizes: Sizes,
        config: Fsdp,
        topology: Topology,
    ) -> None:
        groups = {"no_shard": 1, "hybrid_shard": config.shard_size or topology.local_ranks}
        self.ranks = topology.ranks
        self._shards = groups.get(config.sharding, topology.ranks)
        self._replicated = config.sharding in groups
        """Whether shards are reduced over replicas too, be it one."""
        self._keeps = config.sharding not in ("full_shard", "hybrid_shard")
        """Whether what forward has gathered stays until backward."""
        self._model, self._optimizer, self._sizes, self._config = model, optimizer, sizes, config
        self._home: Place = "host" if config.cpu_offload else "device"
        count, shards = len(model.blocks), self._shards
        self._last = count - 1
        self._whole = _Units(model, lambda w: w.shard(shards, sizes.compute) * shards)
        """Bytes of gathered units."""
        self._own = _Units(model, lambda w: w.shard(shards, 1) if w.trained else 0)
        """Trained elements of this rank, with padding."""
        self._trained = _Units(model, lambda w: w.elements if w.trained else 0)
        self._late = sum(w.elements for w in model.root if w.name in model.late)
        self._cast = _Units(model, self._as_sent)

    def _as_sent(self, weight: Weight) -> int:
        """Bytes of a shard that is cast, or copied from the host, to be sent."""
        copied = self._home == "host" or self._sizes.of(weight) != self._sizes.compute
        return weight.shard(self._shards, self._sizes.compute) if copied and self._shards > 1 else 0

    def held(self, moment: Moment) -> Iterator[Item]:
        sizes, optimizer = self._sizes, self._optimizer
        shard = sum(w.shard(self._shards, sizes.of(w)) * n for w, n in self._model.counted())
        formula = f"{sizes.master} bytes x parameters / {self._shards} shards"
        yield Item(PARAMETERS, self._home, shard, formula)
        if moment.event == "load":
            return
        state = optimizer.state(self._own.all)
        formula = f"{optimizer.bits / 8:.4g} bytes x trained / {self._shards} shards"
        yield Item(OPTIMIZER, self._home, state, formula)
        if moment.event == "between":
            return
        if moment.event == "step":
            counts = [w.shard(self._shards, 1) for w, _ in self._model.counted() if w.trained]
            every = (
                [w.shard(self._shards, 1) for w in self._model.weights() if w.trained]
                if optimizer.taken == "all"
                else counts
            )
            taken = optimizer.update(every, sizes.master)
            yield Item(GRADIENTS, self._home, sizes.master * self._own.all)
            yield Item(UPDATE_TEMPORARIES, self._home, taken, "what the optimizer's kernel takes")
            return
        yield Item(GATHERED, "device", self._gathered(moment), "the root, blocks in use")
        yield Item(BUFFERS, "device", self._buffers(moment), "what is gathered next and reduced")
        yield Item(WHOLE_GRADIENTS, "device", self._unreduced(moment), "of a unit in backward")
        formula = f"{sizes.master} bytes x trained / {self._shards} shards"
        yield Item(GRADIENTS, self._home, sizes.master * self._reduced(moment), formula)

    def _gathered(self, moment: Moment) -> int:
        """Bytes of whole units: the root, and the block that runs, or those up to it."""
        event, unit, whole = moment.event, moment.unit, self._whole
        if (event, unit) == ("reduce", "embeddings"):
            return 0
        if not isinstance(unit, int):
            blocks = whole.all - whole.root if unit == "head" and self._keeps else 0
        elif self._keeps:
            blocks = whole.before(unit) + (whole[unit] if event != "reduce" else 0)
        else:
            blocks = whole[unit] if event != "reduce" else 0
        return whole.root + blocks

    def _buffers(self, moment: Moment) -> int:
        event, unit = moment.event, moment.unit
        reducing = self._reducing(moment) if event in REDUCING else 0
        if self._shards == 1:
            return reducing
        if event in ("gather", "forward"):
            return self._forward_buffers(moment)
        if event in ("loss", "begin") or self._keeps:
            return reducing
        if unit == "head":
            return self._whole[self._last]
        if unit == "embeddings":
            return reducing
        ahead = self._config.backward_prefetch
        begin = int(unit) - ahead
        if event == "regather":
            here = self._whole.between(
                max(begin + 1, 0) if unit != self._last else int(unit), int(unit)
            )
            return reducing + here + max(self._whole[int(unit)], self._cast[int(unit)])
        return reducing + self._whole.between(max(begin, 0), int(unit))

    def _forward_buffers(self, moment: Moment) -> int:
        """The unit's that runs, or is about to, the one's before it, and those gathered ahead."""
        unit, ahead = moment.unit, self._config.forward_prefetch
        if unit == "embeddings":
            return self._whole.root
        if unit == "head":
            return self._whole[self._last]
        place = int(unit)
        if moment.event == "forward":
            return self._whole.between(place, min(place + 1 + ahead, self._last + 1))
        before = self._whole[place - 1] if place else self._whole.root
        return before + self._whole.between(place, min(place + max(ahead, 1), self._last + 1))

    def _reducing(self, moment: Moment) -> int:
        """The buffer that is reduced, and with replicas what comes of all so far."""
        if not self._reduces(moment):
            return 0
        r, own = self._sizes.reduce, self._own
        unit = moment.unit
        moved = self._sizes.master != r or self._home == "host"
        if unit == "head":
            return 0
        after = self._last + 1 if unit == "embeddings" else int(unit)
        done = (
            own.all - own.root
            if unit == "embeddings"
            else own.all - own.root - own.before(after + 1)
        )
        stays = r * done if self._replicated and (moved or not moment.first) else 0
        if moment.event == "reduce":
            mine = own.root if unit == "embeddings" else own[int(unit)]
            whole = self._sizes.compute * self._whole_trained(moment)
            then = r * mine + (self._sizes.master * mine if moved or not moment.first else 0)
            return stays + r * mine * self._shards + max(then - whole, 0)
        if unit == "embeddings":
            return stays + r * self._shards * own[0]
        following = own[int(unit) + 1] if int(unit) < self._last else 0
        return stays + r * self._shards * following

    def _whole_trained(self, moment: Moment) -> int:
        unit = moment.unit
        return self._trained.root if unit == "embeddings" else self._trained[int(unit)]

    def _reduces(self, moment: Moment) -> bool:
        return moment.last or self._config.reduce_every_microbatch

    def _unreduced(self, moment: Moment) -> int:
        """Bytes of whole gradients but those of the unit in backward: the root's so far; all that
        came before, where they are sent once a step."""
        c, r, trained, unit = self._sizes.compute, self._sizes.reduce, self._trained, moment.unit
        late = self._config.reduce_every_microbatch is False
        backward = moment.event in REDUCING
        if late and not moment.first:
            if not backward:
                return r * trained.all
            if moment.last:  # units are reduced and given up, from the last on
                left = trained.root + trained.before(self._place(moment) + 1)
                return r * left + (0 if r == c else self._root_so_far(moment))
            return r * trained.all + (0 if r == c else self._root_so_far(moment))
        if not backward:
            return 0
        own = 0
        if moment.event == "reduce" and unit != "head":
            own = c * (trained[unit] if isinstance(unit, int) else trained.root - self._late)
        held = 0
        if late and not moment.last:
            after = self._place(moment) + 1
            held = r * (trained.all - trained.root - trained.before(after))
        return self._root_so_far(moment) + own + held

    def _root_so_far(self, moment: Moment) -> int:
        inside = moment.unit == "head" and moment.event == "backward"
        return 0 if inside else self._sizes.compute * self._late

    def _place(self, moment: Moment) -> int:
        """Number of the block that backward is in."""
        if moment.unit == "head":
            return self._last
        return -1 if moment.unit == "embeddings" else int(moment.unit)

    def _reduced(self, moment: Moment) -> int:
        """Elements of gradients' shards that are there."""
        if not moment.first:
            return self._own.all if self._config.reduce_every_microbatch else self._done(moment)
        return self._done(moment) if self._reduces(moment) else 0

    def _done(self, moment: Moment) -> int:
        if moment.event not in REDUCING:
            return 0
        own = self._own
        return own.all - own.root - own.before(self._place(moment) + 1)

    def gradients(self, moment: Moment) -> Gradients:
        late = not self._config.reduce_every_microbatch and not moment.first
        added_at_once = late and self._sizes.reduce == self._sizes.compute
        # The second gradient of a tied weight is added to the first, which gives a third tensor.
        sums = self._model.tied and moment.unit == "embeddings"
        size = self._sizes.compute
        return Gradients(0 if added_at_once else size, size if sums else 0)

    @property
    def masters(self) -> tuple[int, Place]:
        return self._own.all, self._home

    @property
    def updated(self) -> int:
        on_device = self._home == "device"
        return self._optimizer.touched(self._own.all, self._sizes.master) if on_device else 0

    @property
    def reach(self) -> int:
        return max(1, self._config.forward_prefetch, self._config.backward_prefetch)

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        reductions = microbatches if self._config.reduce_every_microbatch else 1
        sent = self._sizes.reduce * self._own.all * self._shards * reductions
        if self._shards > 1:
            # What is not given up after forward is not gathered again.
            again = 0 if self._keeps else self._whole.all - self._whole.root
            yield Traffic(
                collective="all-gather",
                bytes=(self._whole.all + again) * microbatches,
                ranks=self._shards,
                what="parameters",
            )
            yield Traffic(
                collective="reduce-scatter", bytes=sent, ranks=self._shards, what="gradients"
            )
        if self.ranks > self._shards:
            yield Traffic(
                collective="all-reduce",
                bytes=sent // self._shards,
                ranks=self.ranks // self._shards,
                apart=self._shards,
                what="gradients' shards",
            )

    def copies(self, microbatches: int) -> Copies:
        if self._home == "device":
            return Copies()
        held = _Units(self._model, lambda w: w.shard(self._shards, self._sizes.of(w)))
        again = 0 if self._keeps else held.all - held.root
        reductions = microbatches if self._config.reduce_every_microbatch else 1
        return Copies(
            # Shards are cast when they are there, gradients before.
            up=(held.all + again) * microbatches,
            down=self._sizes.master * self._own.all * reductions,
        )


class _Units:
    """An amount of every unit, by the number of a block."""

    def __init__(self, model: ModelShape, amount: Callable[[Weight], int]) -> None:
        kinds = [sum(map(amount, weights)) for weights in model.kinds]
        self.root = sum(map(amount, model.root))
        self._blocks: Sequence[int] = [kinds[kind] for kind in model.blocks]
        self._sums = [0, *itertools.accumulate(self._blocks)]
        self.all = self.root + self._sums[-1]

    def __getitem__(self, place: int) -> int:
        return self._blocks[place] if self._blocks else 0

    def before(self, place: int) -> int:
        """The amount of all blocks before this one."""
        return self._sums[place]

    def between(self, first: int, end: int) -> int:
        """The amount of the blocks from the first on, without the end."""
        return self._sums[max(end, first)] - self._sums[first]


class FsdpPlanner(Planner[Fsdp]):
    """Of `wrap.fsdp`."""

    @classmethod
    def presets(cls) -> Presets:
        return {
            "fsdp-shard-grad-op": Preset(
                order=Tier.PARTLY_SHARDED,
                what="shards, gathered once for forward and backward",
                fields={"sharding": "shard_grad_op"},
                at_first=WHOLE,
            ),
            "fsdp": Preset(
                order=Tier.SHARDED,
                what="shards over all ranks, gathered block by block",
                fields={"sharding": "full_shard"},
                at_first=WHOLE,
            ),
            "fsdp-hybrid": Preset(
                order=Tier.SHARDED_WITHIN_NODES,
                what="shards within each node, gradients averaged across nodes",
                fields={"sharding": "hybrid_shard"},
                at_first=WHOLE,
            ),
        }

    def savings(self, ranks: int) -> Iterator[Saving]:
        if not self.stage.reduce_every_microbatch:
            yield Saving(
                order=REDUCE,
                what="gradients are reduced after every micro-batch",
                fields={"reduce_every_microbatch": True},
            )

    def forecast(
        self, topology: Topology, profile: Profile, precision: Precision, optimizer: OptimizerShape
    ) -> StrategyMemory:
        return Sharded(profile.model, optimizer, Sizes.by(precision), self.stage, topology)

    def trace(
        self,
        ctx: Context,
        topology: Topology,
        model: ModelSource,
        precision: Precision,
        optimizer: OptimizerPlan,
    ) -> Engine | None:
        # A trace has no second place to offload to.
        if self.stage.cpu_offload and topology.device != "cpu":
            return None
        return self.stage.run(ctx, model, precision, optimizer)
