"""Checks of a checkpoint that training continues from: it belongs to this model, data, seed and
global batch, and leaves steps to take."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline import (
    Checkpoints,
    Context,
    Data,
    ModelSource,
    Progress,
    ResumeRefused,
    StageError,
)
from pipeline.utils import in_short
from stages.batches.settings import BatchPlan


def lineage(config: BatchPlan, ctx: Context, data: Data, model: ModelSource) -> dict[str, Any]:
    """Identity of the training, JSON by part (collective). `pipe resume --accept` names parts."""
    identity = dict(data.identity)
    # Checkpoints lack only a frozen base. One process of each machine reads it, and the ranks of a
    # machine are consecutive.
    reads = bool(model.frozen_base) and ctx.dist.local_rank == 0
    read = ctx.dist.gather(model.contents if reads else None)
    weights = read[ctx.dist.rank - ctx.dist.local_rank]
    ctx.dist.require_same("model", {"weights that are not trained": weights})
    return {
        "model": model.fingerprint,
        "weights": weights,
        "tokenizer": identity.pop("tokenizer", None),
        "data": identity,
        "seed": ctx.seed,
        "shuffle": config.shuffle,
        "global_batch_size": config.global_batch_size,
    }


def again(ctx: Context) -> str:
    """Hint for a further training whose predecessor has trained on; empty for the first one."""
    file = ctx.run_dir / "checkpoints.at"
    over = f"to train `{ctx.slot}` again, delete its checkpoints and their line in {file}; else "
    return over if ctx.training else ""


def require_same_lineage(
    now: Mapping[str, Any], accept: Collection[str], progress: Progress, again: str = ""
) -> None:
    """Raise ResumeRefused if a part differs from the checkpoint's and is not accepted; its hint
    begins with `again`. Checkpoints of other tools have no lineage, and checkpoints of earlier
    versions may lack parts. Where only one of both has frozen weights, restoring says their
    names."""
    changed = [
        part for part in now if part in progress.lineage and progress.lineage[part] != now[part]
    ]
    if None in (progress.lineage.get("weights"), now.get("weights")):
        changed = [part for part in changed if part != "weights"]
    refused = [part for part in changed if part not in accept]
    if not refused:
        return
    found = [text for part in refused for text in _differences(part, progress.lineage, now)]
    raise ResumeRefused(
        f"the checkpoint at step {progress.step} belongs to another training: " + "; ".join(found),
        hint=f"{again}start a new run, or if that is intended, the same command with "
        + " ".join(f"--accept {part}" for part in refused),
    )


def _differences(part: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    before, after = then.get(part), now[part]
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                yield f"{part}.{key} was {in_short(before.get(key))}, is {in_short(after.get(key))}"
    else:
        yield f"{part} was {in_short(before)}, is {in_short(after)}"


@dataclass(frozen=True, kw_only=True)
class Length:
    """The length of a training by its recipe, and how much of it is done."""

    name: str
    """The field: `steps` or `epochs`."""
    given: float
    done: float
    """In the field's unit."""
    over: bool
    """Whether more is done than the recipe asks for."""

    @classmethod
    def of(cls, config: BatchPlan, data: Data, progress: Progress) -> Length:
        """Return the length by the one of both fields that is set."""
        if config.epochs is None:
            steps = config.steps or 0
            over = progress.step > steps
            return cls(name="steps", given=steps, done=progress.step, over=over)
        size = len(data.train)
        over = progress.samples > round(config.epochs * size)
        return cls(name="epochs", given=config.epochs, done=progress.samples / size, over=over)

    def shortfall(self, slot: str) -> str:
        """Say that the recipe asks for less than is done; empty if it does not."""
        if not self.over:
            return ""
        done = f"{self.done:.10g}" if self.name == "steps" else f"{self.done:.3g}"
        return (
            f"{slot}.{self.name}={self.given:.10g} is below the {done} {self.name} that are done: "
            "the weights are unchanged"
        )


def require_steps_left(
    ctx: Context, checkpoints: Checkpoints, length: Length, progress: Progress, total: int
) -> None:
    """Raise StageError if a run that starts from another's checkpoint has no step to take."""
    own = "loss" in progress.metrics or not getattr(checkpoints, "start_from", None)
    if not own and progress.step >= total:
        name, more = length.name, f"{length.done + length.given:.10g}"
        counts = f"step count ({progress.step})"
        if name == "epochs":
            counts = f"position in the data ({length.done:.3g} epochs)"
        raise StageError(
            f"`start_from` continues its {counts}, and `{ctx.slot}.{name}` is "
            f"{length.given:.10g}: nothing would be trained",
            hint=f"to continue: {ctx.slot}.{name}={more}; to train its weights again: its export "
            "as the model slot's path, without start_from",
        )
