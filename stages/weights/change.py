"""Tensors that are stored in another form than they are used in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Convert = Callable[[Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """Tensors that together become others: renamed, stacked, split, permuted, computed. `convert`
    takes all `sources` and returns the results by name. It depends on shapes and dtypes alone,
    never on values, and also takes tensors on the meta device."""

    sources: Sequence[str]
    convert: Convert
    renames: bool = False
    """Whether it does nothing but rename one tensor."""


def renamed(old: str, new: str) -> Change:
    """One tensor under another name."""
    return Change(sources=(old,), convert=lambda tensors: {new: tensors[old]}, renames=True)
