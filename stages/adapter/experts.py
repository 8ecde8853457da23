"""Updates of experts whose weights are stacked in one tensor.

Each expert has a pair of factors, A (rank, inputs) and B (outputs, rank). All experts' factors are
two tensors, `lora_A.NAME` and `lora_B.NAME` of the experts' module. Tokens are sorted by expert, as
transformers' own fast implementation does, and multiplied group by group: W x + s B A x.

peft adds s B A to the weights instead. The numbers are the same, but it keeps a changed copy of all
experts of each layer until backward, and makes a gradient as large. Here a layer keeps, for each
token and expert that it is sent to, the inputs of both projections and `rank` numbers for each.

The experts of a layer are one module of transformers with tensors of all experts. Whether they are
gated, transposed or biased is written into it by the decorator that lets implementations be chosen;
contract tests guard these undocumented names.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.adapter.compat import Layer

ALIGNED = 8
"""Rows that grouped products read are multiples of 16 bytes: 8 numbers of 16 bits."""


class Factors(nn.Module):
    """One factor of each updated weight of an experts' module, by its name there."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        """Shapes of the factors, also while they are partitioned."""
        for name, shape in shapes.items():
            empty = torch.empty(shape, dtype=torch.float32, device=device)
            self.register_parameter(name, nn.Parameter(empty))


class LowRank(NamedTuple):
    """Settings of the updates of a module."""

    rank: int
    scaling: float
    dropout: float


def first_projection(experts: Any) -> str:
    """Return the name of the tensor that the inputs are multiplied by."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def stacked_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield experts' weights that can have updates: name, their module, name in it."""
    said = ("is_transposed", "is_concatenated", "has_gate", "has_bias", "has_post_expert_norm")
    for owner, module in model.named_modules():
        if all(hasattr(module, name) for name in (*said, "num_experts")):
            multiplied = {first_projection(module), "down_proj"}
            for leaf, _ in module.named_parameters(recurse=False):
                if leaf in multiplied:
                    yield f"{owner}.{leaf}", module, leaf


def add_updates(model: nn.Module, names: Collection[str], settings: LowRank) -> None:
    """Give the stacked weights of these names updates."""
    chosen: dict[nn.Module, list[str]] = {}
    for name, module, leaf in stacked_weights(model):
        if name in names:
            chosen.setdefault(module, []).append(leaf)
    experts: Any
    for experts, leaves in chosen.items():
        downs, ups = {}, {}
        for leaf in leaves:
            weight = getattr(experts, leaf)
            # ZeRO keeps the whole shape of what it has partitioned.
            count, inputs, outputs = getattr(weight, "ds_shape", weight.shape)
            if not experts.is_transposed:
                inputs, outputs = outputs, inputs
            downs[leaf] = (count, settings.rank, inputs)
            ups[leaf] = (count, outputs, settings.rank)
        device = getattr(experts, leaves[0]).device
        experts.lora_A, experts.lora_B = Factors(downs, device), Factors(ups, device)
        experts.low_rank = settings
        experts.forward = functools.partial(forward, experts)


def updated_modules(model: nn.Module) -> list[nn.Module]:
    """The experts' modules of `model` that have updates."""
    return [one for one in model.modules() if isinstance(getattr(one, "low_rank", None), LowRank)]


def updated_experts(model: nn.Module) -> Iterator[Layer]:
    """The stacked weights of `model` that have an update."""
    updated = set(updated_modules(model))
    for name, module, leaf in stacked_weights(model):
        experts: Any = module
        if experts not in updated or leaf not in experts.lora_A.shapes:
            continue
        order = list(experts.lora_A.shapes)
        count, rank, inputs = experts.lora_A.shapes[leaf]
        yield Layer(
            name=name,
            rank=rank,
            scaling=experts.low_rank.scaling,
            transposed=bool(experts.is_transposed),
            inputs=inputs,
            outputs=experts.lora_B.shapes[leaf][1],
            experts=count,
            nested=len(order) - 1 - order.index(leaf),
        )


def forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Outputs of the experts, shape (tokens, width), as transformers' implementations compute them,
    with updates. `chosen` and `weights` have shape (tokens, experts for each token)."""
    picks = chosen.shape[1]
    # One row for each expert that a token is sent to, sorted by expert.
    expert, order = torch.sort(chosen.reshape(-1), stable=True)
    numbers = torch.arange(1, experts.num_experts + 1, device=expert.device)
    ends = torch.searchsorted(expert, numbers).to(torch.int32)

    def product(rows: Tensor, stacked: Tensor) -> Tensor:
        """Each expert's rows times its matrix, of shape (experts, inputs, outputs)."""
        if experts.config._experts_implementation == "eager":
            last = ends.tolist()
            spans = enumerate(zip([0, *last], last, strict=False))
            return torch.cat([rows[start:end] @ stacked[number] for number, (start, end) in spans])
        from transformers.integrations.moe import _grouped_mm

        grouped: Tensor = _grouped_mm(rows, stacked, ends)
        return grouped

    def project(leaf: str, rows: Tensor) -> Tensor:
        """Rows times a stacked weight and its update, with its bias."""
        weight = getattr(experts, leaf)
        found = product(rows, weight if experts.is_transposed else weight.mT)
        if leaf in experts.lora_A.shapes:
            rank, scaling, dropout = experts.low_rank
            down, up = getattr(experts.lora_A, leaf), getattr(experts.lora_B, leaf)
            if missing := -rank % ALIGNED:  # zeros, up to a size that grouped products can read
                down, up = F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))
            inputs = F.dropout(rows, dropout, training=experts.training)
            found = found + product(scaling * product(inputs, down.mT), up.mT)
        return found + getattr(experts, f"{leaf}_bias")[expert] if experts.has_bias else found

    rows = project(first_projection(experts), hidden[order // picks])
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = project("down_proj", rows)
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    rows = rows * weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    summed: Tensor = rows[back].view(len(hidden), picks, -1).sum(dim=1)
    return summed.to(hidden.dtype)
