"""Tensors of a model's files that its module does not read, and what becomes of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from pipeline import StageError, TensorReader
from pipeline.utils import human
from stages.model.declared import listed

if TYPE_CHECKING:
    from logging import Logger

    from stages.model.hf import Fate

COMPUTED = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\b(cross)?att(n|ention)\.(masked_)?bias$"
    r"|^rope_(freqs|factors_(long|short))\.weight$"
)
"""Rotary tables, position indices and causal masks, which old releases stored: they are computed,
so nothing is lost with them."""


@dataclass(frozen=True, kw_only=True)
class Unread:
    """Names, in the module's spelling, of the tensors that are not read."""

    passed: list[str] = field(default_factory=list)
    """Exported as they are."""
    dropped: list[str] = field(default_factory=list)
    undeclared: list[str] = field(default_factory=list)
    """Those of which nothing says what becomes of them."""

    def log(self, log: Logger, where: str, held: TensorReader) -> None:
        """Say what is not read, with number and bytes."""
        for names, fate in (
            (self.passed, "frozen, not in memory, and passed through to the export"),
            (self.dropped, "dropped"),
        ):
            if names:
                log.warning("not read from %s, %s: %s", where, fate, sized(names, held))


def sized(names: Collection[str], held: TensorReader) -> str:
    """Number, bytes and names, as in `2 tensors, 1.5 MB (a, b)`."""
    size = human(sum(held.spec(name).nbytes for name in names))
    return listed(names).replace(" (", f", {size} (", 1)


def sort_out(
    names: Collection[str],
    wanted: Collection[str],
    towers: Collection[str],
    stated: Mapping[str, Fate],
) -> Unread:
    """Divide the tensors that a module with the names `wanted` does not read, by the fates that the
    recipe has `stated` for patterns. `towers` are of the parts that text does not use. Raises
    StageError for a fate that cannot be."""
    found = Unread()
    lists = {"pass_through": found.passed, "drop": found.dropped, None: found.undeclared}
    for name in names:
        fate = next((fate for one, fate in stated.items() if fnmatchcase(name, one)), None)
        if name in towers and fate == "drop":
            raise StageError(
                f"unused_weights: {name} cannot be dropped, as the exported model would lack it",
                hint="leave it out of unused_weights, and it is passed through",
            )
        if name in wanted:
            if fate == "pass_through":
                raise StageError(f"unused_weights: {name} is used, and so cannot be passed through")
            if fate is None:
                continue
        elif fate is None and name in towers:
            fate = "pass_through"
        elif fate is None and COMPUTED.search(name):
            fate = "drop"
        lists[fate].append(name)
    return found
