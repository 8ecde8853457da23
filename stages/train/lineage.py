"""What a position in a training means something for, and whether a recipe may go on from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.contracts.data import Data
from pipeline.contracts.model import ModelSource
from pipeline.contracts.training import Progress
from pipeline.errors import ResumeRefused

if TYPE_CHECKING:
    from pipeline.contracts.stage import Context
    from stages.train.causal_lm import TrainCausalLm

SHOWN = 12
"""Characters of a digest that a message shows."""


def lineage(config: TrainCausalLm, ctx: Context, data: Data, model: ModelSource) -> dict[str, Any]:
    """Part -> what it is, JSON (collective). The parts are what `pipe resume --accept` can name."""
    identity = dict(data.identity)
    lends = bool(model.frozen_base)  # otherwise checkpoints have all that was read from the model
    # of each machine one process reads, and ranks of a machine follow one another
    read = ctx.dist.gather(model.contents if lends and ctx.dist.local_rank == 0 else None)
    return {
        "model": model.fingerprint,
        "weights": read[ctx.dist.rank - ctx.dist.local_rank],
        "tokenizer": identity.pop("tokenizer", None),
        "data": identity,
        "seed": ctx.seed,
        "shuffle": config.shuffle,
        "global_batch_size": config.global_batch_size,
    }


def require_same_lineage(
    now: Mapping[str, Any], accept: Collection[str], progress: Progress
) -> None:
    """Raises ResumeRefused that tells what is another than when the checkpoint was saved, unless
    every difference is in an accepted part. Checkpoints of a foreign format have no origin, and
    those of earlier versions not all parts of one."""
    changed = [
        part for part in now if part in progress.lineage and progress.lineage[part] != now[part]
    ]
    # The contents of tokenised data follow from the tokenizer.
    if "tokenizer" in changed and "tokenizer" in accept and _only_contents(progress.lineage, now):
        changed = [part for part in changed if part != "data"]
    refused = [part for part in changed if part not in accept]
    if not refused:
        return
    told = [text for part in refused for text in _differences(part, progress.lineage, now)]
    raise ResumeRefused(
        f"the checkpoint at step {progress.step} belongs to another training: " + "; ".join(told),
        hint="start a new run, or if that is intended: pipe resume RUN "
        + " ".join(f"--accept {part}" for part in refused),
    )


def _only_contents(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    before, after = dict(then.get("data") or {}), dict(now["data"])
    before.pop("contents", None)
    after.pop("contents", None)
    return before == after


def _differences(part: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    before, after = then.get(part), now[part]
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                yield f"{part}.{key} was {_shown(before.get(key))}, is {_shown(after.get(key))}"
    else:
        yield f"{part} was {_shown(before)}, is {_shown(after)}"


def _shown(value: Any) -> str:
    text = str(value)
    digest = len(text) >= 32 and set(text) <= set("0123456789abcdef")
    return text[:SHOWN] if digest else text
