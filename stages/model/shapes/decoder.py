"""Decoders as data: blocks of attention and an MLP with norms before, behind, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from pipeline.forecast.layers import capped, shifted
from pipeline.forecast.net import WIDE, Net
from pipeline.forecast.shapes import BlockShape, ModelShape, Weight
from pipeline.forecast.tape import Value
from stages.model.shapes.attention import Attention, Rotary
from stages.model.shapes.gated import mask_bytes
from stages.model.shapes.mlp import Mlp
from stages.model.shapes.norms import Norm
from stages.model.shapes.part import Part


@dataclass(frozen=True, kw_only=True, eq=False)
class Branch(Part):
    """What is added to the residual stream."""

    inner: Attention | Mlp
    before: Norm | None = None
    behind: Norm | None = None
    scaled: bool = False
    """By a constant."""
    dropout: bool = False

    def forward(self, net: Net, x: Value) -> Value:
        """What to add, of the stream `x`, whose reference stays the caller's."""
        given = net.tape.hold(x) if self.before is None else self.before.forward(net, x)
        y = net.replaced(given, self.inner.forward(net, given))
        if self.behind is not None:
            y = net.replaced(y, self.behind.forward(net, y))
        if self.dropout:
            y = net.replaced(y, net.dropped(y))
        return net.replaced(y, net.by_number(y)) if self.scaled else y


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderBlock(Part, BlockShape):
    """Attention, then an MLP, or both of the same stream."""

    attention: Branch
    mlp: Branch
    parallel: bool = False

    @property
    def own(self) -> tuple[Weight, ...]:
        """Norms last, as most models' modules have them."""
        branches = (self.attention, self.mlp)
        inner = [weight for branch in branches for weight in branch.inner.own]
        return (*inner, *self._norms)

    @property
    def window(self) -> int | None:
        inner = self.attention.inner
        return inner.window if isinstance(inner, Attention) else None

    @property
    def _norms(self) -> tuple[Weight, ...]:
        found = [norm for b in (self.attention, self.mlp) for norm in (b.before, b.behind) if norm]
        return tuple(weight for norm in found for weight in norm.own)

    def forward(self, net: Net, x: Value) -> Value:
        with net.module(*self._norms):
            attended = self.attention.forward(net, x)
            if self.parallel:
                return self._both(net, x, attended)
            middle = net.replaced(attended, net.add(x, attended))
            mixed = self.mlp.forward(net, middle)
            out = net.add(middle, mixed)
            net.tape.drop(middle, mixed)
            return out

    def _both(self, net: Net, x: Value, attended: Value) -> Value:
        mixed = self.mlp.forward(net, x)
        together = net.replaced(mixed, net.add(mixed, attended))
        out = net.replaced(together, net.add(together, x))
        net.tape.drop(attended)
        return out


@dataclass(frozen=True, kw_only=True)
class DecoderModel(ModelShape):
    """Embedding, blocks, norm, head."""

    blocks: Sequence[DecoderBlock]
    table: Weight
    positions: Weight | None = None
    """A table of them, where they are learned."""
    norm: Norm
    head: Weight
    """The table itself where they are tied."""
    angles: tuple[Rotary, ...] = ()
    """Sines and cosines that are there for all blocks."""
    scaled: bool = False
    """Whether embeddings are multiplied by a constant."""
    dropout: bool = False
    """Whether embeddings are dropped."""
    logits_scaled: bool = False
    """Whether logits are divided by a constant."""
    logits_capped: bool = False

    def changed(self, change: Callable[[Weight], Weight]) -> Self:
        new = {weight: change(weight) for weight in self.root}
        return replace(
            self,
            root=tuple(new.values()),
            blocks=[block.changed(change) for block in self.blocks],
            table=new[self.table],
            positions=None if self.positions is None else new[self.positions],
            norm=self.norm.changed(new.__getitem__),
            head=new[self.head],
        )

    @property
    def output(self) -> Weight:
        return self.head

    @property
    def changes_logits(self) -> bool:
        return self.logits_scaled or self.logits_capped

    def finished(self, net: Net, logits: Value) -> Value:
        if self.logits_scaled:
            logits = net.replaced(logits, net.by_number(logits))
        return capped(net, logits) if self.logits_capped else logits

    def forward(
        self, net: Net, through: Callable[[Value], Value], loss: Callable[[Value], Value]
    ) -> Value:
        with net.module(self.head):
            with net.module(self.table, self.positions, *self.norm.own):
                x, embedded = self._embedded(net)
                shared = [*self._angles(net), *self._masks(net)]
                x = through(x)
                x = net.replaced(x, self.norm.forward(net, x))
                net.tape.drop(*embedded, *shared)
            return loss(x)

    def _embedded(self, net: Net) -> tuple[Value, Sequence[Value]]:
        """What the first block is given, and what stays until the last one has run."""
        x = net.embedding(self.table)
        if self.scaled:
            x = net.replaced(x, net.by_number(x))
        stays = [net.tape.hold(x)]
        if self.positions is not None:
            stays.append(net.embedding(self.positions, net.batch.positions))
            x = net.replaced(x, shifted(net, x, stays[-1]))
        return (net.replaced(x, net.dropped(x)) if self.dropout else x), stays

    def _masks(self, net: Net) -> list[Value]:
        """Which tokens see which, one for all blocks with the same window: as bytes, or as numbers
        where a matrix is there to be added to."""
        attentions = [block.attention.inner for block in self.blocks]
        kinds = {a.window: a for a in attentions if isinstance(a, Attention) and a.masked(net)}
        sizes = [mask_bytes(net, eager=one.eager is not None) for one in kinds.values()]
        return [self._shared(net, net.tape.make(size)) for size in sizes]

    def _shared(self, net: Net, mask: Value) -> Value:
        """Blocks that are computed again keep it for backward."""
        return mask if self.recomputed is None else _kept(net, mask)

    def _angles(self, net: Net) -> list[Value]:
        """Sines and cosines of all positions, which all blocks keep for backward, together or
        each."""
        made = []
        for one in self.angles:
            numbers = 2 * net.batch.positions * one.size
            net.tape.pulse(numbers * WIDE)
            angles = net.tensor(numbers, WIDE if one.wide else None, graded=False)
            if one.copied(net):
                made.append(_kept(net, net.tensor(numbers * len(self.blocks), graded=False)))
            made.append(angles if one.copied(net) else _kept(net, angles))
        return made


def _kept(net: Net, value: Value) -> Value:
    """Until backward is through."""
    kept = net.tape.hold(value)
    net.tape.then(lambda: net.tape.drop(kept))
    return value
