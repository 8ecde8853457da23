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
    """Some tensors that together become others: renamed, stacked, split, permuted, computed.

    `convert` takes all of `sources` and returns the results by name. It looks at shapes and dtypes,
    never at values, to decide what to do; so it also takes tensors on the meta device.
    """

    sources: Sequence[str]
    convert: Convert
    renames: bool = False
    """Whether that is all it does: one tensor becomes one."""


def renamed(old: str, new: str) -> Change:
    """One tensor under another name."""
    return Change(sources=(old,), convert=lambda tensors: {new: tensors[old]}, renames=True)
