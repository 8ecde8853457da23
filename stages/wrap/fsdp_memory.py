"""Memory of a rank under wrap.fsdp, by the source of torch's FSDP2 (2.13)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline import Precision, planning
from pipeline.planning import IN_BACKWARD, Gradients, ModelShape, Moment, Topology, Weight
from stages.wrap.axes import required
from stages.wrap.fsdp import Fsdp
from stages.wrap.torch_planner import EMBEDDINGS, ROOT, TorchMemory, UnitAmounts


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

    def __init__(
        self, stage: Fsdp, topology: Topology, model: ModelShape,
        optimizer: planning.OptimizerShape, precision: Precision,
    ) -> None:  # fmt: skip
        self._axes = axes = required(stage, topology.ranks)
        super().__init__(
            stage, axes.data * axes.context, model, optimizer, precision,
            shards=stage.shards(axes, topology.local_ranks),
            home="host" if stage.cpu_offload else "device", ends=stage.units == "block",
        )  # fmt: skip
        self._whole = self._amounts(lambda w: w.bytes(self._sizes.compute))
        """Bytes of whole units in the compute dtype."""
        self._stays = stage.sharding not in ("full_shard", "hybrid_shard")
        """Whether units that forward has gathered stay until backward."""
        self._late = not stage.reduce_every_microbatch
        self._kept = len(model.blocks) - (stage.units == "block")
        """Place of the first unit that stays until backward anyhow: the last block, and the head
        after it."""

    def _place(self, moment: Moment) -> int:
        place, trained = super()._place(moment), self._trained
        # Backward ends with the root and the embeddings; the larger one is the fuller moment.
        at_root = place == EMBEDDINGS and trained[ROOT] >= trained[EMBEDDINGS]
        return ROOT if at_root and moment.event == "reduce" else place

    def _running(self, moment: Moment, place: int) -> tuple[int, int, int]:
        buffers = self._gathering(moment, place) + self._reducing(moment, place)
        return self._gathered(moment, place), buffers, self._unreduced(moment, place)

    def _gathered(self, moment: Moment, place: int) -> int:
        """Bytes of whole units: the root, and the unit that runs, or those up to it."""
        whole, through = self._whole, moment.event == "reduce"
        if moment.event in IN_BACKWARD and place < 0:  # a table is not gathered for that
            stays = whole[EMBEDDINGS] * (self._stays and place == ROOT)
            return whole[ROOT] * (not through) + stays
        first = EMBEDDINGS if self._stays else min(place, self._kept)
        return whole[ROOT] + whole.between(first, place + (not through))

    def _gathering(self, moment: Moment, place: int) -> int:
        """Bytes of the buffers that units are gathered into: of the one that runs, and those
        ahead."""
        whole, stage, event = self._whole, self._stage, moment.event
        if self._shards == 1 or event in ("loss", "begin"):
            return 0
        if event in ("gather", "forward"):
            # While a unit is gathered, the buffer of the one before it is still there.
            before = (1 if place or whole[EMBEDDINGS] else 2) * (event == "gather")
            return whole.between(place - before, place + 1 + bool(stage.forward_prefetch))
        if self._stays:
            return 0
        return whole.between(max(place - stage.backward_prefetch, 0), min(place, self._kept))

    def _reducing(self, moment: Moment, place: int) -> int:
        """Bytes of the gradients that were reduced last. If master gradients are other tensors, the
        shards that replicas have averaged stay as well."""
        m, r = self._sizes.master, self._sizes.reduce
        if moment.event not in IN_BACKWARD or (self._late and not moment.last):
            return 0
        others = m != r or self._home == "host" or not moment.first
        replicas = others and self._stage.sharding in ("no_shard", "hybrid_shard")
        stays = r * self._own.after(place) * replicas
        if moment.event != "reduce":
            return stays + r * self._trained[place + 1]
        return stays + r * self._trained[place] + self._new_shard(place, self._sizes.compute)

    def _new_shard(self, place: int, size: int) -> int:
        """Bytes that a unit's shard takes beyond its whole gradients, in numbers of `size` bytes.
        torch's loop keeps the last whole gradient, of an embedding or a head."""
        m, r = self._sizes.master, self._sizes.reduce
        freed = self._shards == 1 or place not in (EMBEDDINGS, len(self._model.blocks))
        shard = (r if r == m else r + m) * self._own[place]
        return max(shard - size * self._trained[place] * freed, 0)

    def _unreduced(self, moment: Moment, place: int) -> int:
        """Bytes of whole gradients outside of the unit in backward: of the head, and of units that
        wait for the last micro-batch."""
        c, r, trained = self._sizes.compute, self._sizes.reduce, self._trained
        backward, through = moment.event in IN_BACKWARD, moment.event == "reduce"
        waits, done = 0, trained.after(place) if backward else 0
        if self._late and not (moment.first and moment.last):
            waits = done if moment.first else trained.all - done
        own = trained[place] * (through and (moment.first or not self._late))
        own += trained[EMBEDDINGS] * (through and place == ROOT)
        head = backward and moment.unit != "head" and not (through and place < 0)
        return r * waits + c * (own + self._head * head)

    def _reduced(self, moment: Moment, place: int) -> int:
        if moment.event == "step" or not (moment.first or self._late):
            return self._own.all
        done = moment.event in IN_BACKWARD and (moment.last or not self._late)
        return self._own.after(place) if done else 0

    def gradients(self, moment: Moment) -> Gradients:
        c = self._sizes.compute
        # Autograd adds to those that wait, unless they wait in another dtype.
        added = self._late and not moment.first and self._sizes.reduce == c
        # The second gradient of a tied weight is added to the first, which gives a third tensor.
        sums = self._model.tied and moment.unit == "embeddings"
        return Gradients(0 if added else c, c if sums else 0)

    def traffic(self, microbatches: int) -> Iterator[planning.Traffic]:
        shards, tensor, sizes = self._shards, self._axes.tensor, self._sizes
        reductions = 1 if self._late else microbatches

        def traffic(collective: Any, size: int, what: str, ranks: int, apart: int) -> Any:
            found = planning.Traffic(
                collective=collective, bytes=size, ranks=ranks, apart=apart * tensor, what=what
            )
            return [found] if ranks > 1 else []

        for among in sorted({weight.experts for weight, _ in self._model.counted()}):
            holders, of = max(shards // among, 1), "experts' " if among > 1 else ""

            def whole(weight: Weight, size: int, among: int = among) -> int:
                own = weight.experts == among
                return weight.shard(shards, size) * weight.holders(shards) * own

            gathered = self._twice(self._amounts(lambda w: whole(w, sizes.compute)))
            reduced = self._amounts(lambda w: whole(w, sizes.reduce) * w.trained).all * reductions
            size = gathered * microbatches
            yield from traffic("all-gather", size, f"{of}parameters", holders, among)
            yield from traffic("reduce-scatter", reduced, f"{of}gradients", holders, among)
        size = sizes.reduce * self._own.all * reductions
        yield from traffic("all-reduce", size, "gradients' shards", self.ranks // shards, shards)

    def copies(self, microbatches: int) -> planning.Copies:
        if self._home == "device":
            return planning.Copies()
        # Shards are cast when they are there, gradients before.
        down = self._sizes.master * self._own.all * (1 if self._late else microbatches)
        return planning.Copies(up=self._twice(self._held) * microbatches, down=down)

    def _twice(self, units: UnitAmounts) -> int:
        """An amount of all units, and again of those that are gathered again in backward."""
        return units.all + (0 if self._stays else units.between(0, self._kept))
