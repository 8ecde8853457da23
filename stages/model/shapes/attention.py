"""Attention parts of blocks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from pipeline.forecast.layers import (
    by_head,
    copied,
    dropping_attention,
    eager_attention,
    repeated,
    sliced,
    split,
    turned,
    wide_rotary,
)
from pipeline.forecast.net import WIDE, Net
from pipeline.forecast.tape import Value
from stages.model.shapes.linear import Linear
from stages.model.shapes.norms import Norm
from stages.model.shapes.part import Part


@dataclass(frozen=True, kw_only=True, eq=False)
class Projections(Part):
    """Queries, keys and values of tokens."""

    @abstractmethod
    def forward(self, net: Net, x: Value) -> list[Value]:
        """The three, of `x`, whose reference stays the caller's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Apart(Projections):
    """A layer each."""

    q: Linear
    k: Linear
    v: Linear

    def forward(self, net: Net, x: Value) -> list[Value]:
        return [layer.forward(net, x) for layer in (self.q, self.k, self.v)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Fused(Projections):
    """One layer, of whose results they are parts."""

    qkv: Linear
    widths: tuple[int, int, int]
    """Numbers of a token in each."""
    joined: bool
    """Whether backward joins their gradients, or fills up each."""

    def forward(self, net: Net, x: Value) -> list[Value]:
        whole = self.qkv.forward(net, x)
        sizes = [whole.bytes // sum(self.widths) * width for width in self.widths]
        parts = split(net, whole, sizes) if self.joined else sliced(net, whole, sizes)
        net.tape.drop(whole)
        return parts


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Positions as angles (Su et al. 2021)."""

    size: int
    """Sines and cosines of a position, each."""
    share: float | None = None
    """Of a head that is turned and joined with the rest; None: all, which are not joined."""
    wide: bool = False
    """In fp32, unless the strategy casts what a block is given."""

    def copied(self, net: Net) -> bool:
        """Whether each block has its own copy of the angles, in the compute dtype."""
        return self.wide and net.placement.casts_inputs and net.c != WIDE

    def forward(self, net: Net, x: Value) -> Value:
        """Of `x`, whose reference stays the caller's."""
        if self.wide and not self.copied(net):
            return wide_rotary(net, x)
        return net.rotary(x) if self.share is None else turned(net, x, self.share)


@dataclass(frozen=True, kw_only=True)
class Eager:
    """Attention that holds its matrix."""

    capped: bool = False
    """Whether products are bounded."""
    wide: bool = True
    """Whether weights are computed in fp32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention(Part):
    """What a block computes of each token and those before it."""

    projections: Projections
    out: Linear
    norms: tuple[Norm, Norm] | None = None
    """Of queries and keys."""
    heads: int
    rotary: Rotary | None
    eager: Eager | None = None
    """None: in one operation, without the matrix."""
    window: int | None = None
    """How many tokens a token sees at most."""
    dropout: bool = False
    """Whether weights are dropped."""

    def forward(self, net: Net, x: Value) -> Value:
        """Of `x`, whose reference stays the caller's."""
        with net.module(*self.own):
            q, k, v = self.projections.forward(net, x)
            if self.norms is not None:
                q = net.replaced(q, self.norms[0].forward(net, q))
                k = net.replaced(k, self.norms[1].forward(net, k))
            if self.rotary is not None:
                q, k = self._turned(net, q, k)
            mixed = self._mixed(net, q, k, v)
            net.tape.drop(q, k, v)
            return net.replaced(mixed, self.out.forward(net, mixed))

    def _turned(self, net: Net, q: Value, k: Value) -> tuple[Value, Value]:
        assert self.rotary is not None
        turned = self.rotary.forward(net, q), self.rotary.forward(net, k)
        narrow = net.cast(turned[0], net.c), net.cast(turned[1], net.c)
        net.tape.drop(q, k, *turned)
        return narrow

    def masked(self, net: Net) -> bool:
        """Whether it needs a mask: for a matrix, for documents that do not see each other, or a
        window."""
        windowed = self.window is not None and net.batch.length >= self.window
        return self.eager is not None or net.batch.packed or windowed

    def _mixed(self, net: Net, q: Value, k: Value, v: Value) -> Value:
        masked = self.masked(net)
        times = q.bytes // k.bytes if masked else 1  # with one, heads do not share them
        k, v = (repeated(net, x, times, self.heads // times) for x in (k, v))
        if self.eager is not None:
            mixed = self._by_matrix(net, q, k, v, copied_already=times > 1)
        elif self.dropout and net.batch.mask is None:
            mixed = dropping_attention(net, q, k, v, self.heads)
            mixed = net.replaced(mixed, copied(net, mixed))
        else:
            mixed = net.attention(q, k, v, self.heads, masked=masked)
            if self.rotary is not None and self.rotary.share is not None:
                # What is joined lies head by head, and so does the result; a layer wants tokens.
                mixed = net.replaced(mixed, copied(net, mixed))
        net.tape.drop(k, v)
        return mixed

    def _by_matrix(self, net: Net, q: Value, k: Value, v: Value, *, copied_already: bool) -> Value:
        assert self.eager is not None
        turned = self.rotary is not None
        ready = (turned, turned or copied_already, copied_already)
        q, k, v = (
            net.tape.hold(x) if lies_by_head else by_head(net, x)
            for x, lies_by_head in zip((q, k, v), ready, strict=True)
        )
        how = self.eager
        mixed = eager_attention(
            net, q, k, v, self.heads, cap=how.capped, dropout=self.dropout, wide=how.wide
        )
        net.tape.drop(q, k, v)
        return mixed
