"""A model of any architecture as the shapes of its weights, for what is told of weights alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from pipeline.artifacts import ModelSource
from pipeline.forecast.net import Net
from pipeline.forecast.shapes import BlockShape, ModelShape, Weight
from pipeline.forecast.tape import Value
from pipeline.tracing.structure import Structure, structure


@dataclass(frozen=True, kw_only=True, eq=False)
class OutlinedBlock(BlockShape):
    """Weights without a story: what they compute is metered."""

    weights: Sequence[Weight]
    left: Sequence[Weight]

    @property
    def own(self) -> Sequence[Weight]:
        return self.left

    def changed(self, change: Callable[[Weight], Weight]) -> Self:
        return replace(self, weights=[change(weight) for weight in self.weights])

    def forward(self, net: Net, x: Value) -> Value:
        return net.tape.hold(x)


@dataclass(frozen=True, kw_only=True)
class OutlinedModel(ModelShape):
    """The same of a whole model."""

    head: Weight

    def changed(self, change: Callable[[Weight], Weight]) -> Self:
        new = {weight: change(weight) for weight in self.root}
        blocks = [block.changed(change) for block in self.blocks]
        return replace(self, root=tuple(new.values()), blocks=blocks, head=new[self.head])

    @property
    def output(self) -> Weight:
        return self.head

    def forward(
        self, net: Net, through: Callable[[Value], Value], loss: Callable[[Value], Value]
    ) -> Value:
        with net.module(self.head):
            return loss(through(net.tensor(net.batch.tokens * self.hidden)))


def outlined(source: ModelSource, built: Structure) -> OutlinedModel:
    """The shapes of a source's model, `built` before."""
    left = structure(source.exported).blocks
    tables = [weight for weight in built.root if weight.shape[:1] == (source.vocab_size,)]
    head = (tables or built.root)[-1]
    return OutlinedModel(
        kind=source.name,
        hidden=head.shape[-1],
        vocabulary=source.vocab_size,
        root=built.root,
        blocks=[
            OutlinedBlock(weights=own, left=other)
            for own, other in zip(built.blocks, left, strict=True)
        ],
        attention=head.shape[-1],
        head=head,
        caveats=("attention is taken to be as wide as the model in the time of a step",),
    )
