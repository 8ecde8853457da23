"""Stages of a pipeline: which layers each holds, and a model cut down to them.

A stage is the whole model without what other stages hold, so the names of its parameters, and what
the model computes around its layers (rotary embeddings, masks), stay its own.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline import StageError
from pipeline.utils import local_part
from stages.wrap.types_compat import refuse_type

_TUPLES = re.compile(r"hidden_states = \w+\[0\]|hidden_states, attn_weights = ")
"""How a model of transformers takes the first of several values that its block returns."""


class Absent(nn.Module):
    """Stands in for a module that another stage holds: returns its first argument, by itself or
    first of several. For a block, it has what the model reads of it."""

    def __init__(self, block: nn.Module | None = None, *, several: bool = False) -> None:
        super().__init__()
        self._several = several
        # Numbers and words, such as the kind of a block's attention.
        kinds = [kind for kind in type(block).__mro__ if kind not in nn.Module.__mro__]
        for place in (*reversed(kinds), block) if block is not None else ():
            for name, value in vars(place).items():
                if isinstance(value, str | int | float) and not name.startswith("_"):
                    setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = args[0] if args else next(iter(kwargs.values()))
        return (found, None) if self._several else found


class AbsentTable(Absent):
    """Stands in for an embedding that another stage holds, such as of positions: returns zeros,
    shape (..., 1), to be added to hidden states that are discarded."""

    def forward(self, numbers: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return numbers.new_zeros(*numbers.shape, 1)


class StageInput(Absent):
    """Stands in for the layer before a stage's first: returns what that layer returned on the stage
    before. Whatever the model computed before it is discarded."""

    received: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.received is not None
        return super().forward(self.received)


def keep_layers(model: Any, layers: range) -> None:
    """Remove all other layers from a causal language model of transformers. What comes before layer
    0 stays with it, what comes after the last layer with that; a tied head keeps the embedding
    (`TiedEmbedding`). Raises StageError for a model that does not say how it divides."""
    before, name, after = layer_list(model)
    base, head = model.base_model, model.get_output_embeddings()
    every = getattr(base, name)
    try:
        source = inspect.getsource(type(base).forward)
    except (OSError, TypeError):  # as for a class that was typed in
        source = ""
    several = _TUPLES.search(source) is not None
    first, last = layers.start == 0, layers.stop == len(every)
    for number, block in enumerate(every):
        if number == layers.start - 1:
            every[number] = StageInput(block, several=several)
        elif number not in layers:
            every[number] = Absent(block, several=several)
    kept = model.get_input_embeddings() if last and is_tied(model) else None
    for part in before if not first else ():
        if (held := getattr(base, part)) is not kept:
            setattr(base, part, AbsentTable() if isinstance(held, nn.Embedding) else Absent())
    if not last:
        for part in after:
            setattr(base, part, Absent())
        for part in [part for part, child in model.named_children() if child is head]:
            setattr(model, part, Absent())


def is_tied(model: Any) -> bool:
    """Whether the head and the embedding share a weight."""
    head = model.get_output_embeddings()
    return getattr(head, "weight", None) is model.get_input_embeddings().weight


def layer_list(model: Any) -> tuple[list[str], str, list[str]]:
    """Names in the base model of what comes before its layers, of the list of layers, and of what
    comes after them: by the architecture's plan, or else in the order of its parts. Raises
    StageError where there is no one list of layers."""
    base = model.base_model
    refuse_type("pipeline_parallel", model.config)
    weighted = [n for n, one in base.named_children() if any(True for _ in one.parameters())]
    parts = list(model.config.get_text_config().base_model_pp_plan or weighted)
    lists = [part for part in parts if isinstance(getattr(base, part, None), nn.ModuleList)]
    if len(lists) != 1 or base is model or model.get_output_embeddings() is None:
        raise StageError(
            f"pipeline_parallel: {type(model).__name__} does not say how it divides into stages"
        )
    place = parts.index(lists[0])
    return parts[:place], lists[0], parts[place + 1 :]


@dataclass(eq=False)
class TiedEmbedding:
    """An embedding that the first stage looks up and the last multiplies with: each has a copy.
    Both start alike. Their gradients are summed before each step, and optimizers are functions of
    gradient and state, so the copies stay the same to the bit. `first` and `last` are the copies on
    this rank, which has one or none: schedules that put both on one are refused."""

    group: ProcessGroup
    first: nn.Parameter | None
    last: nn.Parameter | None

    def sum_gradients(self) -> None:
        """Give both copies the sum of their gradients (collective among their ranks). A sum of two
        is the same in either order, so both ranks get equal bits."""
        for copy, peer in ((self.first, self.group.size() - 1), (self.last, 0)):
            if copy is None or copy.grad is None:
                continue
            own = local_part(copy.grad)
            other = torch.empty_like(own)
            exchange = [
                dist.P2POp(dist.isend, own, group=self.group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            own.add_(other)
