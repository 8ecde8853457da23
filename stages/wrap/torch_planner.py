"""The part of a model that one rank computes with, memory of engines of plain torch by unit, and
the planner of wrap.ddp."""

from __future__ import annotations

import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline import Precision, planning
from pipeline.planning import IN_BACKWARD, Division, Item, ModelShape, Moment, Topology, Weight
from stages.wrap.axes import caveats, parameter_mesh, required

if TYPE_CHECKING:
    from pipeline import MicroBatch
    from stages.wrap.ddp import Ddp

ROOT, EMBEDDINGS = -2, -1
"""Places of the root, which has the weights outside of other units, and of the embeddings."""


class WrapPlanner(planning.Planner[Any]):
    """Planner of a stage that may have axes."""

    def division(self, topology: Topology) -> Division | None:
        parts = ModelParts(self.stage, topology)
        return parts if parts.axes.data < parts.axes.ranks or parts.experts > 1 else None


class ModelParts(Division):
    """Divides layers, sequences and experts as a wrap stage asks for it and the engines do it."""

    def __init__(self, stage: Any, topology: Topology) -> None:
        self.axes, of = required(stage, topology.ranks), getattr(stage, "shards", None)
        self.shards = 1 if of is None else of(self.axes, topology.local_ranks)
        self.tensor = getattr(stage, "tensor_parallel", None) if self.axes.tensor > 1 else None
        block = getattr(stage, "expert_parallel", None)
        self.experts, self.stages = 1 if block is None else int(block.size), self.axes.pipeline

    @property
    def key(self) -> Mapping[str, Any]:
        tensor = self.tensor and dataclasses.asdict(self.tensor)
        return {"tensor": tensor, "context": self.axes.context, "experts": self.experts}

    def divide(
        self, model: Any, blocks: Sequence[Any]
    ) -> tuple[Mapping[str, str], Mapping[str, int]]:
        from stages.wrap.context_compat import divide_sequence
        from stages.wrap.experts_compat import divide_experts
        from stages.wrap.tensor_divide import divide_layers

        axes, groups, experts = self.axes, dict[str, str](), dict[str, int]()
        if self.tensor is not None:
            mesh = parameter_mesh(axes, "cpu", self.shards)["tensor"]
            divide_layers(self.tensor, model, blocks, mesh)
            groups[mesh.get_group().group_name] = "activations of divided layers"
        if self.experts > 1:
            meshes = parameter_mesh(axes, "cpu", self.shards, self.experts)
            dispatched = divide_experts(model, meshes["expert"], meshes["tensor"])
            own = {parameter for module in dispatched for parameter in module.parameters()}
            experts = {name: self.experts for name, one in model.named_parameters() if one in own}
            groups[meshes["expert"].get_group().group_name] = "tokens of experts"
        if (group := divide_sequence(model, axes, "cpu")) is not None:
            groups[group.group_name] = "states of attention"
        return groups, experts

    def own(self, batch: MicroBatch) -> MicroBatch:
        from stages.batches.layout import padded, sequence_slice

        whole = padded(batch, self.axes.context * self.axes.tensor)
        return whole if self.axes.context == 1 else sequence_slice(whole, 0, self.axes.context)


class UnitAmounts:
    """An amount, such as bytes, of each unit by place: ROOT, EMBEDDINGS, a block's number, or the
    number of blocks for the head. Unless `ends` are units, their weights count to the root."""

    def __init__(
        self, model: ModelShape, amount: Callable[[Weight], int], *, ends: bool = False
    ) -> None:
        place = dict.fromkeys(model.ends[0], 1) | dict.fromkeys(model.ends[1], 2) if ends else {}
        root = [[w for w in model.root if place.get(w.name, 0) == n] for n in range(3)]
        kinds = [[*map(amount, weights)] for weights in (*root, *model.kinds)]
        self.largest = max(itertools.chain(*kinds), default=0)
        """The largest amount of one weight."""
        sums = [*map(sum, kinds)]
        units = [*sums[:2], *(sums[kind + 3] for kind in model.blocks), sums[2]]
        self._before = [0, *itertools.accumulate(units)]
        self.all = self._before[-1]

    def __getitem__(self, place: int) -> int:
        return self.between(place, place + 1)

    def between(self, first: int, end: int) -> int:
        """The amount of the units in [first, end); places outside of the model count 0."""
        most = len(self._before) - 1
        low, high = (min(max(place - ROOT, 0), most) for place in (first, end))
        return self._before[max(low, high)] - self._before[low]

    def after(self, place: int) -> int:
        """The amount of the blocks after this one, and of the head."""
        return self.between(max(place, EMBEDDINGS) + 1, len(self._before))


class TorchMemory(planning.StrategyMemory):
    """Weights, optimizer state and gradients on every rank, sharded or whole. In formulas, n are
    elements; m, c, r: bytes of a number in the master, compute and reduce dtype."""

    def __init__(
        self, stage: Any, ranks: int, model: ModelShape, optimizer: planning.OptimizerShape,
        precision: Precision, *, shards: int = 1, home: planning.Place = "device",
        ends: bool = False,
    ) -> None:  # fmt: skip
        self._sizes = sizes = planning.Sizes.by(precision)
        self.ranks, self._stage, self.caveats = ranks, stage, caveats(stage)
        self._model, self._optimizer, self._shards, self._home = model, optimizer, shards, home
        self._ends = ends and {*model.ends[0]}.isdisjoint(model.ends[1])
        self._held = self._amounts(lambda w: w.shard(shards, sizes.of(w)))
        """Bytes of this rank's shards, which are padded."""
        self._own = self._amounts(lambda w: w.shard(shards, 1) if w.trained else 0)
        """Elements that this rank updates."""
        self._trained = self._amounts(lambda w: w.elements if w.trained else 0)
        self.masters = self._own.all, home
        self.updated = optimizer.touched(self._own.all, sizes.master) * (home == "device")
        units = {*model.ends[0], *model.ends[1]} if self._ends else ()
        late = [w for w in model.root if w.trained and w.name in model.late]
        self._head = sum(w.elements for w in late if w.name not in units)
        """Elements of the root's weights whose gradients come before the blocks' gradients."""

    def _amounts(self, amount: Callable[[Weight], int]) -> UnitAmounts:
        return UnitAmounts(self._model, amount, ends=self._ends)

    @abstractmethod
    def _reduced(self, moment: Moment, place: int) -> int:
        """Elements that have a gradient in the master dtype."""

    @abstractmethod
    def _running(self, moment: Moment, place: int) -> tuple[int, int, int]:
        """Bytes of whole parameters in use, of buffers, and of gradients that are not reduced."""

    def held(self, moment: Moment) -> Iterator[Item]:
        home, place = self._home, self._place(moment)
        yield Item(planning.PARAMETERS, home, self._held.all)
        yield Item(planning.GRADIENTS, home, self._sizes.master * self._reduced(moment, place))
        if moment.event == "load":
            return
        yield Item(planning.OPTIMIZER, home, self._optimizer.state(self._own.all))
        if moment.event == "step":
            size = self._optimizer.update(self._own.largest)
            yield Item(planning.UPDATE_TEMPORARIES, home, size)
        elif moment.event != "between":
            names = planning.GATHERED, planning.BUFFERS, planning.WHOLE_GRADIENTS
            for name, size in zip(names, self._running(moment, place), strict=True):
                yield Item(name, "device", size)

    def _place(self, moment: Moment) -> int:
        ends = {"embeddings": EMBEDDINGS, "head": len(self._model.blocks)}
        return moment.unit if isinstance(moment.unit, int) else ends[moment.unit]


class Replicated(TorchMemory):
    """A replica of everything on every rank (torch's DistributedDataParallel), which holds

    - always m n of weights, their optimizer state, and m n of gradients in buckets. Unless DDP
      keeps them there, gradients are tensors next to the buckets, from one backward to the next;
      as views, until the buckets are reduced;
    - if the dtypes differ, c n of each block from its forward to the end of its backward (of a
      recomputed one only while it runs), of the head, and in forward of the embeddings until the
      last block has run.
    """

    def __init__(
        self, stage: Ddp, ranks: int, profile: planning.Profile,
        optimizer: planning.OptimizerShape, precision: Precision,
    ) -> None:  # fmt: skip
        model, sizes = profile.model, planning.Sizes.by(precision)
        super().__init__(stage, ranks, model, optimizer, precision)
        self._views, self._keeps = stage.gradient_as_bucket_view, stage.sums_in_buckets

        def cast(weight: Weight) -> int:
            same = weight.frozen_base or weight.packed or sizes.master == sizes.compute
            return 0 if same else weight.bytes(sizes.compute)

        again = zip(model.kinds, profile.recomputed, strict=True)
        kinds = tuple(() if repeats else weights for weights, repeats in again)
        self._cast, self._table = UnitAmounts(model, cast), cast(model.embedding)
        """Bytes of the casts of weights that are held in another dtype than the compute dtype."""
        self._kept = UnitAmounts(dataclasses.replace(model, kinds=kinds), cast)
        """Bytes of the casts in blocks that are not recomputed."""

    def _running(self, moment: Moment, place: int) -> tuple[int, int, int]:
        backward, sizes, tied = moment.event in IN_BACKWARD, self._sizes, self._model.tied
        behind = self._cast[ROOT] - (0 if tied else self._table)
        copies = self._kept.between(0, place + 1)
        if moment.unit == "head":
            copies += behind
        else:
            copies += (behind + self._table) * (not backward)
            copies += self._cast[place] - self._kept[place] if place >= 0 else 0
        is_sent = backward and moment.last and sizes.reduce != sizes.master and not tied
        return copies, sizes.reduce * self._head * is_sent, 0

    def _reduced(self, moment: Moment, place: int) -> int:
        """Elements in buckets plus gradients computed so far, without the unit in backward. The
        first gradient of a tied weight waits for the second."""
        trained, table, event = self._own.all, self._model.embedding, moment.event
        if event == "load":  # gradients are laid into buckets, whole or one by one
            return trained + (self._own.largest if self._views else trained)
        backward = event in IN_BACKWARD and moment.unit != "head"
        waits = table.elements * (backward and self._model.tied and table.trained)
        inside = self._in_buckets(moment) or (self._views and event == "step")
        if event == "between" or inside:
            return trained + waits
        if event == "step" or not moment.first:
            return 2 * trained + waits
        return trained + (self._head + self._own.after(place) if backward else 0)

    def _in_buckets(self, moment: Moment) -> bool:
        """Whether a backward leaves gradients in buckets: always, or in a step's only one."""
        return self._keeps or (self._views and moment.first and moment.last)

    def gradients(self, moment: Moment) -> tuple[int, int]:
        m, c = self._sizes.master, self._sizes.compute
        kept = 0 if self._in_buckets(moment) or not moment.first else m
        if self._model.tied and moment.unit == "embeddings":
            # Both gradients of a tied weight, the earlier of which has waited, and their sum.
            return kept, 2 * m - c - kept
        return kept, m if m != c else 0

    def traffic(self, microbatches: int) -> Iterator[planning.Traffic]:
        if self.ranks > 1:
            yield planning.Traffic(
                collective="all-reduce", bytes=self._own.all * self._sizes.reduce,
                ranks=self.ranks, what="gradients",
            )  # fmt: skip


class DdpPlanner(WrapPlanner):
    stage: Ddp

    @classmethod
    def presets(cls) -> planning.Presets:
        what = "every rank holds everything"
        return {"ddp": planning.Preset(order=planning.Tier.REPLICATED, what=what)}

    def forecast(
        self, topology: Topology, profile: planning.Profile, precision: Precision,
        optimizer: planning.OptimizerShape,
    ) -> Replicated:  # fmt: skip
        return Replicated(self.stage, topology.ranks, profile, optimizer, precision)
