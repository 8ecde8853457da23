"""Which state-dict names share one tensor, and what may be missing or too much."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from pipeline.errors import StageError
from stages.model import compat

if TYPE_CHECKING:
    from torch import nn

    from pipeline.contracts.model import ModelSource


SHOWN = 10
WAYS_OUT = (
    "what is meant to differ is declared in the model slot: new_weights, unused_weights, vocab_size"
)


def ties(model: nn.Module) -> dict[str, str]:
    """Every name that shares its tensor with another -> the name that files keep.

    `model` has its weights tied. The kept name is the one the architecture declares as the source
    (the input embedding, as a rule), or the first in the state dict.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    sources = set(compat.declared_ties(model).values())
    tied = {}
    for names in groups.values():
        kept = next((name for name in names if name in sources), names[0])
        tied.update({name: kept for name in names if name != kept})
    return tied


def logical_numel(model: nn.Module) -> dict[str, int]:
    """Parameters that hold a weight in another form -> the elements that the weight has. A module
    says it of its own in an attribute of this name."""
    return {
        f"{owner}.{leaf}": elements
        for owner, module in model.named_modules()
        for leaf, elements in getattr(module, "logical_numel", {}).items()
    }


def refuse_differences(
    where: str,
    model: nn.Module,
    missing: Iterable[str],
    unexpected: Iterable[str],
    misshapen: Collection[str] = (),
) -> None:
    """Raise StageError, listing names, except where the architecture calls it harmless.

    `misshapen` are what `misfit` says of tensors.
    """
    may_lack, may_have = compat.ignorable(model)
    lacking = _without(missing, may_lack)
    extra = _without(unexpected, may_have)
    if lacking or extra or misshapen:
        parts = []
        if lacking:
            parts.append(f"missing {listed(lacking)}")
        if extra:
            parts.append(f"unexpected {listed(extra)}")
        if misshapen:
            parts.append(f"of another shape {listed(misshapen)}")
        raise StageError(
            f"the weights in {where} do not fit {type(model).__name__}: {'; '.join(parts)}",
            hint=WAYS_OUT,
        )


def misfit(name: str, found: Sequence[int], needed: Sequence[int]) -> str:
    """`name 4x3 instead of 5x3`."""
    shapes = ("x".join(map(str, shape)) or "scalar" for shape in (found, needed))
    return f"{name} {' instead of '.join(shapes)}"


def listed(names: Collection[str]) -> str:
    """`3 tensors (a, b, c)`, cut after ten."""
    shown = sorted(names)[:SHOWN]
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} tensor{'s' * (len(names) != 1)} ({', '.join(shown)}{more})"


def _without(names: Iterable[str], patterns: Sequence[re.Pattern[str]]) -> list[str]:
    return [name for name in names if not any(pattern.search(name) for pattern in patterns)]


def outline(source: ModelSource) -> nn.Module:
    """The source's module: parameters on the meta device, real buffers, weights tied."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = source.build()
    source.tie(model)
    return model
