"""Weights that a module gets: a source's, reconciled with what it needs, and random ones.

Random weights are a pure function of seed and module name. A tensor has the same value on every
rank and in every world size, and whatever is read before it: each transformer block, and each
module outside the blocks, is initialised from its own seed by the architecture's own rule, which
keeps its depth-dependent scaling.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from pipeline import StageError, TensorReader, TensorSpec
from pipeline.utils import human
from stages.model.declared import listed, matches, misfit, refuse_differences, refuse_idle
from stages.model.settings import Fate
from stages.weights.views import ExtendedReader, MemoryReader, Origin, named, pieces

if TYPE_CHECKING:
    from logging import Logger

    from torch import Tensor, nn

COMPUTED = re.compile(
    r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\b(cross)?att(n|ention)\.(masked_)?bias$"
    r"|^rope_(freqs|factors_(long|short))\.weight$"
)
"""Rotary tables, position indices and causal masks, which old releases stored: they are computed,
so nothing is lost with them."""
SAMPLE = 1 << 18
"""Elements of a sample of a tensor."""


@dataclass(frozen=True, kw_only=True)
class Unread:
    """Names, in the module's spelling, of the tensors that are not read."""

    passed: list[str] = field(default_factory=list)
    """Exported as they are."""
    dropped: list[str] = field(default_factory=list)
    undeclared: list[str] = field(default_factory=list)
    """Neither passed nor dropped by the recipe."""


def sized(names: Collection[str], held: TensorReader) -> str:
    """Return number, bytes and names, as in `2 tensors, 1.5 MB (a, b)`."""
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
        if name in wanted and fate == "pass_through":
            raise StageError(f"unused_weights: {name} is used, and so cannot be passed through")
        if name in wanted and fate is None:
            continue
        if fate is None and name in towers:
            fate = "pass_through"
        elif fate is None and COMPUTED.search(name):
            fate = "drop"
        lists[fate].append(name)
    return found


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Differences between source and module that the recipe intends."""

    new: Sequence[str] = ()
    """Patterns of names that are initialised, also where the source has them."""
    unused: Mapping[str, Fate] = field(default_factory=dict)
    """Patterns of names in the source that the module does not read -> their fate."""
    vocabulary: Collection[str] = ()
    """Names of the tensors with a row per token, which may have more or fewer rows."""
    towers: Collection[str] = ()
    """Names of the tensors that text does not use: the source has to have them, but no module."""


def fit(
    where: str,
    held: TensorReader,
    model: nn.Module,
    tied: Mapping[str, str],
    allowed: Allowed,
    fresh: Callable[[], TensorReader],
    log: Logger,
) -> tuple[TensorReader, Unread]:
    """Return a reader of `held` with exactly the names and shapes of `model`, and what it does not
    read.

    `fresh` initialises the tensors that the recipe wants new, and those that the architecture
    tolerates to be missing, which are logged. `held` may have a tied tensor under any of its names.
    Raises StageError that lists every other difference.
    """
    wanted = {n: TensorSpec(tuple(t.shape), t.dtype) for n, t in model.state_dict().items()}
    unread = sort_out(held.names(), wanted, allowed.towers, allowed.unused)
    given = set(held.names()) - {*unread.passed, *unread.dropped}
    refuse_idle("new_weights", allowed.new, wanted, "tensor of the model")
    refuse_idle("unused_weights", allowed.unused, held.names(), f"tensor of {where}")
    origins: dict[str, Origin] = {}
    misshapen: dict[str, str] = {}
    for name, declared in wanted.items():
        if matches(name, allowed.new):
            origins[name] = Origin(name, 0, declared)
            continue
        kept = tied.get(name, name)
        alike = (name, kept, *(alias for alias, other in tied.items() if other == kept))
        source = next((one for one in alike if one in given), None)
        if source is None:
            continue
        spec, shape = held.spec(source), declared.shape
        if spec.shape == shape:
            origins[name] = Origin(source, spec.numel, spec)
        elif name in allowed.vocabulary and spec.shape[1:] == shape[1:]:
            resized = TensorSpec(shape, spec.dtype)
            origins[name] = Origin(source, min(spec.numel, resized.numel), resized)
        else:
            misshapen[name] = misfit(name, spec.shape, shape)
    missing = wanted.keys() - origins.keys() - misshapen.keys()
    extra = sized(unread.undeclared, held) if unread.undeclared else ""
    lost = set(allowed.towers) - set(unread.passed)
    refuse_differences(where, model, missing | lost, extra, misshapen.values())
    if missing:
        log.info("not in %s, so initialised: %s", where, listed(missing))
    origins |= {name: Origin(name, 0, wanted[name]) for name in missing}
    for alias, kept in tied.items():
        if not _agree(held, origins[alias], origins[kept]):
            raise StageError(
                f"the model shares one tensor between {alias} and {kept}, but {where} or "
                "new_weights sets them to different values",
                hint="name both in new_weights, or set tie_word_embeddings to false in its "
                "config.json",
            )
    needs_fresh = any(origin.kept < origin.spec.numel for origin in origins.values())
    return ExtendedReader(held, fresh() if needs_fresh else None, origins), unread


def _agree(held: TensorReader, one: Origin, other: Origin) -> bool:
    """Whether two tensors are both new, or agree in three samples. Every process compares, so
    samples have to do: a head that was trained apart from the embedding differs everywhere."""
    if not (one.kept and other.kept):
        return one.kept == other.kept
    if one.source == other.source:
        return True
    first, second = held.spec(one.source), held.spec(other.source)
    length = min(SAMPLE, first.numel)
    samples = [torch.empty(length, dtype=torch.float32) for _ in range(2)]
    if first.shape != second.shape:
        return False
    for start in (0, (first.numel - length) // 2, first.numel - length):
        held.read_into(one.source, start, samples[0])
        held.read_into(other.source, start, samples[1])
        if not torch.equal(*samples):
            return False
    return True


def unit_seed(seed: int, unit: str) -> int:
    """Return 8 bytes of sha256 over the run's seed and a module's name, as a seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{unit}".encode()).digest()[:8], "big")


class RandomReader(MemoryReader):
    """Tensors of a `model` with meta parameters and real buffers; holds one block at a time."""

    def __init__(
        self, model: nn.Module, blocks: Collection[nn.Module], tied: Mapping[str, str], *, seed: int
    ) -> None:
        super().__init__(model.state_dict())
        self._model, self._blocks, self._tied, self._seed = model, set(blocks), tied, seed
        names = [name for name, module in model.named_modules() if module in self._blocks]
        self._unit_of: dict[str, str] = {}
        """Parameter -> name of the block, or module outside blocks, that draws it."""
        for name, _ in model.named_parameters(remove_duplicate=False):
            inside = (block for block in names if name.startswith(f"{block}."))
            self._unit_of[name] = next(inside, name.rpartition(".")[0])
        self._unit = ""
        self._drawn: dict[str, Tensor] = {}

    def chunks(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        name = self._tied.get(name, name)
        unit = self._unit_of.get(name)
        if unit is not None and (unit != self._unit or not self._drawn):
            self._drawn = {}  # frees the old block before the new one is made
            self._drawn = self._initialised(unit)
            self._unit = unit
        yield from pieces(named(self._tensors if unit is None else self._drawn, name), start, stop)

    def close(self) -> None:
        self._drawn = {}

    def _initialised(self, unit: str) -> dict[str, Tensor]:
        from transformers import PreTrainedModel

        original: Any = self._model.get_submodule(unit)
        whole = original in self._blocks
        module = copy.deepcopy(original)
        for child in module.modules() if whole else [module]:
            for name, one in child.named_parameters(recurse=False):
                # NaN, so that a parameter that is not initialised shows.
                values = torch.full(one.shape, math.nan, dtype=torch.float32)
                setattr(child, name, torch.nn.Parameter(values))
        outer, owner = unit, original  # the innermost transformers model that the unit lies in
        while outer:
            outer = outer.rpartition(".")[0]
            owner = self._model.get_submodule(outer)
            if isinstance(owner, PreTrainedModel):
                break
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(unit_seed(self._seed, unit))
            if whole:
                module.apply(owner._init_weights)
            else:
                owner._init_weights(module)
        prefix = f"{unit}." if unit else ""
        found = {prefix + name: p.detach() for name, p in module.named_parameters(recurse=whole)}
        for name, values in found.items():
            if values.isnan().any():
                raise StageError(
                    f"{type(self._model).__name__} does not say how to initialise {name}",
                    hint="start from pretrained weights",
                )
        return found
