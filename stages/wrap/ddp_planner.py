"""Memory and traffic of wrap.ddp: a replica on every rank (torch's DistributedDataParallel)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeline import Precision
from pipeline.planning import (
    BUFFERS,
    GATHERED,
    IN_BACKWARD,
    Division,
    Gradients,
    Item,
    Moment,
    OptimizerShape,
    Planner,
    Preset,
    Presets,
    Profile,
    Sizes,
    Tier,
    Topology,
    Traffic,
    Weight,
)
from stages.wrap.axes import caveats
from stages.wrap.ddp import Ddp
from stages.wrap.model_parts import model_parts
from stages.wrap.torch_planner import ROOT, TorchMemory, UnitAmounts


class Replicated(TorchMemory):
    """A replica of everything on every rank.

    n: elements; m, c: bytes of a number in the master and compute dtype. A rank holds

    - always m n of weights, their optimizer state, and m n of gradients in buckets. Unless DDP
      `keeps` them there, gradients are tensors beside the buckets, from one backward to the next;
      as `views`, until the buckets are reduced;
    - if the dtypes differ, c n of each block from its forward to the end of its backward (of a
      recomputed one only while it runs), of the head, and in forward of the embeddings until the
      last block has run.
    """

    def __init__(
        self, ranks: int, profile: Profile, optimizer: OptimizerShape, sizes: Sizes, *,
        views: bool, keeps: bool,
    ) -> None:  # fmt: skip
        model = profile.model
        super().__init__(ranks, model, optimizer, sizes)
        self._views = views
        self._keeps = keeps
        self._is_cast = sizes.master != sizes.compute

        def cast(weight: Weight) -> int:
            same = weight.frozen_base or weight.packed or not self._is_cast
            return 0 if same else weight.bytes(sizes.compute)

        self._cast = UnitAmounts(model, cast)
        """Bytes of the casts of weights that are held in another dtype than the compute dtype."""
        kept = zip(model.kinds, profile.recomputed, strict=True)
        kinds = tuple(() if again else weights for weights, again in kept)
        self._kept = UnitAmounts(replace(model, kinds=kinds), cast)
        """Bytes of the casts in blocks that are not recomputed."""
        table = cast(model.embedding)
        self._behind = self._cast[ROOT] - (0 if model.tied else table)
        self._around = self._behind + table
        """Bytes of those that the model casts for as long as its blocks run forward."""

    def _running(self, moment: Moment, place: int) -> Iterator[Item]:
        backward = moment.event in IN_BACKWARD
        copies = self._kept.between(0, place + 1)
        if moment.unit == "head":
            copies += self._behind
        else:
            copies += self._around * (not backward)
            copies += self._cast[place] - self._kept[place] if moment.unit != "embeddings" else 0
        yield Item(GATHERED, "device", copies)
        if backward and moment.last and self._sizes.reduce != self._sizes.master:
            sent = 0 if self._model.tied else self._sizes.reduce * self._head
            yield Item(BUFFERS, "device", sent)

    def _reduced(self, moment: Moment) -> int:
        """Elements in buckets, and beside them the computed gradients except those of the unit in
        backward. The first gradient of a tied weight waits for the second."""
        trained, table = self._own.all, self._model.embedding
        if moment.event == "load":  # gradients are laid into buckets, whole or one by one
            return trained + (self._own.largest if self._views else trained)
        if moment.event == "between":
            return trained
        backward = moment.event in IN_BACKWARD and moment.unit != "head"
        waits = table.elements * (backward and self._model.tied and table.trained)
        if self._in_buckets(moment) or (self._views and moment.event == "step"):
            return trained + waits
        if moment.event == "step" or not moment.first:
            return 2 * trained + waits
        come = self._head + self._own.after(self._place(moment)) if backward else 0
        return trained + come

    def _in_buckets(self, moment: Moment) -> bool:
        """Whether a backward leaves gradients in buckets: always, or in a step's only one."""
        return self._keeps or (self._views and moment.first and moment.last)

    def gradients(self, moment: Moment) -> Gradients:
        m, c = self._sizes.master, self._sizes.compute
        kept = 0 if self._in_buckets(moment) or not moment.first else m
        if self._model.tied and moment.unit == "embeddings":
            # Both gradients of a tied weight, the earlier of which has waited, and their sum.
            return Gradients(kept, 2 * m - c - kept)
        return Gradients(kept, m if m != c else 0)

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        if self.ranks > 1:
            size = self._own.all * self._sizes.reduce
            yield Traffic(collective="all-reduce", bytes=size, ranks=self.ranks, what="gradients")


class DdpPlanner(Planner[Ddp]):
    """Planner of `wrap.ddp`."""

    @classmethod
    def presets(cls) -> Presets:
        return {"ddp": Preset(order=Tier.REPLICATED, what="every rank holds everything")}

    def division(self, topology: Topology) -> Division | None:
        return model_parts(self.stage, topology)

    def forecast(
        self, topology: Topology, profile: Profile, precision: Precision, optimizer: OptimizerShape
    ) -> Replicated:
        views, keeps = self.stage.gradient_as_bucket_view, self.stage.sums_in_buckets
        sizes = Sizes.by(precision)
        share = Replicated(topology.ranks, profile, optimizer, sizes, views=views, keeps=keeps)
        share.caveats = caveats(self.stage)
        return share
