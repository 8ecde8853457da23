"""What a replica of a model on every rank holds, and when (torch's DistributedDataParallel)."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.planning.profile import Profile
from pipeline.planning.shapes import OptimizerShape, Sizes
from pipeline.planning.strategy import (
    BUFFERS,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    UPDATE_TEMPORARIES,
    Gradients,
    Item,
    Moment,
    StrategyMemory,
    Traffic,
)
from pipeline.planning.timeline import Place


class Replicated(StrategyMemory):
    """A replica of everything on every rank.

    m, c, r are bytes of a number in master, compute and reduce dtype; N elements are trained.
    Buckets of all gradients (m N) are there from the start. Without `views`, gradients are tensors
    of their own beside them. Weights that are cast to be used (c n of each) stay until backward has
    used them, but where their block is computed again.
    """

    def __init__(
        self,
        profile: Profile,
        optimizer: OptimizerShape,
        sizes: Sizes,
        *,
        ranks: int,
        views: bool,
        bucket: int,
        buckets: bool = True,
    ) -> None:
        """`bucket` is what one holds, in bytes; without `buckets`, nothing is reduced."""
        self.ranks = ranks
        self._profile = profile
        self._model = profile.model
        self._optimizer = optimizer
        self._sizes = sizes
        self._views = views
        self._bucket = bucket
        self._buckets = buckets
        self._copies = _Copies(profile, sizes)

    def held(self, moment: Moment) -> Iterator[Item]:
        m, trained = self._sizes.master, self._model.trained
        counts = [one.elements for one, _ in self._model.counted() if one.trained]
        yield Item(PARAMETERS, "device", self._model.held(self._sizes), f"{m} bytes a parameter")
        if self._buckets:
            yield Item(GRADIENTS, "device", m * trained, f"{m} bytes x {trained / 1e9:.4g} G")
        if moment.event == "load":
            settled = (max(counts, default=0) if self._views else trained) * self._buckets
            yield Item(BUFFERS, "device", m * settled, "gradients while buckets are laid out")
            return
        state = self._optimizer.state(trained)
        yield Item(OPTIMIZER, "device", state, f"{self._optimizer.bits / 8:.4g} bytes x trained")
        if not self._views:
            yield Item(GRADIENTS, "device", m * self._beside(moment))
        if moment.event == "step":
            taken = self._optimizer.update(counts, m)
            yield Item(UPDATE_TEMPORARIES, "device", taken, "what the optimizer's kernel takes")
        yield Item(GATHERED, "device", self._copies.at(moment), "copies for backward, cast")
        if moment.event in ("backward", "reduce") and moment.last and self._sizes.reduce != m:
            sent = min(self._bucket // m, trained) * self._sizes.reduce
            yield Item(BUFFERS, "device", sent, "a bucket as it is sent")

        if self._waits(moment):
            size = m * self._model.embedding.elements
            yield Item(GRADIENTS, "device", size, "a tied weight's first gradient, which waits")

    def _waits(self, moment: Moment) -> bool:
        backward = moment.event in ("regather", "backward", "reduce") and moment.unit != "head"
        return backward and self._model.tied and self._model.embedding.trained

    def _beside(self, moment: Moment) -> int:
        """Elements whose gradients are tensors of their own, beside the buckets."""
        if moment.event == "between":
            return 0
        if not moment.first or moment.event == "step":
            return self._model.trained
        if moment.event not in ("regather", "backward", "reduce"):
            return 0
        return arrived(self._profile, moment)

    def gradients(self, moment: Moment) -> Gradients:
        m, cast = self._sizes.master, self._sizes.master != self._sizes.compute
        kept = 0 if self._views or not moment.first else m
        return Gradients(kept, m if cast else 0)

    @property
    def masters(self) -> tuple[int, Place]:
        return self._model.trained, "device"

    @property
    def updated(self) -> int:
        return self._optimizer.touched(self._model.trained, self._sizes.master)

    def traffic(self, microbatches: int) -> Iterator[Traffic]:
        if self.ranks > 1:
            size = self._model.trained * self._sizes.reduce
            yield Traffic(collective="all-reduce", bytes=size, ranks=self.ranks, what="gradients")


class _Copies:
    """Cast weights that are there at a moment, in bytes."""

    def __init__(self, profile: Profile, sizes: Sizes) -> None:
        self._cast = sizes.master != sizes.compute
        self._size = sizes.compute
        model = profile.model
        own = [
            sum(w.elements for w in weights if not w.borrowed and not w.packed)
            for weights in model.kinds
        ]
        self._each = [own[kind] for kind in model.blocks]
        self._stays = [not profile.recomputed[kind] for kind in model.blocks]
        head = [w for w in model.root if w is not model.embedding or model.tied]
        self._head = sum(w.elements for w in head if not w.borrowed)

    def at(self, moment: Moment) -> int:
        if not self._cast or moment.event in ("load", "step", "between", "gather"):
            return 0
        place = moment.unit
        if place == "embeddings":
            return 0
        if place == "head":
            return self._size * (self._head + self._before(len(self._each)))
        assert isinstance(place, int)
        own = 0 if moment.event in ("regather", "reduce") else self._each[place]
        more = self._before(place) + own
        return self._size * more

    def _before(self, place: int) -> int:
        return sum(
            size
            for size, stays in zip(self._each[:place], self._stays[:place], strict=True)
            if stays
        )


def arrived(profile: Profile, moment: Moment) -> int:
    """Elements of trained weights whose gradients have come in this backward, without those of the
    unit that is in it."""
    model = profile.model
    late = sum(w.elements for w in model.root if w.trained and w.name in model.late)
    own = [sum(w.elements for w in weights if w.trained) for weights in model.kinds]
    if moment.unit == "head":
        return late if moment.event == "reduce" else 0
    first = -1 if moment.unit == "embeddings" else int(moment.unit)
    begin = first if moment.event == "reduce" else first + 1
    return late + sum(own[kind] for kind in model.blocks[max(begin, 0) :])
