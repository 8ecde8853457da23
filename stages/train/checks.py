"""Checks before the first step: a checkpoint that training continues from belongs to this model,
data, seed and global batch and leaves steps to take, and no packed document sees another one."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from pipeline import (
    NO_TARGET,
    Checkpoints,
    Context,
    Data,
    Engine,
    ModelSource,
    Progress,
    ResumeRefused,
    Sample,
    StageError,
)
from pipeline.utils import in_short
from stages.batches.layout import collate
from stages.fields import BatchPlan
from stages.objectives.cross_entropy import RowLoss


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


def hint_to_retrain(ctx: Context) -> str:
    """Hint for a further training whose predecessor has trained on; empty for the first one."""
    file = ctx.run_dir / "checkpoints.at"
    over = f"to train `{ctx.slot}` again, delete its checkpoints and their line in {file}; else "
    return over if ctx.training else ""


def require_same_lineage(
    now: Mapping[str, Any], accept: Collection[str], progress: Progress, hint: str = ""
) -> None:
    """Raise ResumeRefused if a part differs from the checkpoint's and is not accepted; its hint
    begins with `hint`. Checkpoints of other tools have no lineage, and checkpoints of earlier
    versions may lack parts. Where only one of both has frozen weights, restoring says their
    names."""
    then = progress.lineage
    refused = [part for part in now if then.get(part, now[part]) != now[part]]
    if None in (then.get("weights"), now.get("weights")):
        refused = [part for part in refused if part != "weights"]
    refused = [part for part in refused if part not in accept]
    if not refused:
        return
    found = []
    for part in refused:
        before, after = {part: then[part]}, {part: now[part]}
        if isinstance(then[part], Mapping) and isinstance(now[part], Mapping):
            before = {f"{part}.{key}": value for key, value in then[part].items()}
            after = {f"{part}.{key}": value for key, value in now[part].items()}
        for name in sorted({*before, *after}):
            was, value = before.get(name), after.get(name)
            if was != value:
                found.append(f"{name} was {in_short(was)}, is {in_short(value)}")
    raise ResumeRefused(
        f"the checkpoint at step {progress.step} belongs to another training: " + "; ".join(found),
        hint=f"{hint}start a new run, or if that is intended, the same command with "
        + " ".join(f"--accept {part}" for part in refused),
    )


def has_trained(progress: Progress) -> bool:
    """Whether this run has trained, and not only another one, from whose checkpoint it starts."""
    return "loss" in progress.metrics


class Done(NamedTuple):
    """How much of a training is done, next to its length by the recipe."""

    name: str
    """The field: `steps` or `epochs`."""
    given: float
    amount: float
    """Amount that is done, in the field's unit."""
    over: bool
    """Whether more is done than the recipe asks for."""

    @classmethod
    def of(cls, config: BatchPlan, data: Data, progress: Progress) -> Done:
        """Return what is done by the one of both fields that is set."""
        if config.epochs is None:
            steps = config.steps or 0
            return cls("steps", steps, progress.step, progress.step > steps)
        size = len(data.train)
        over = progress.samples > round(config.epochs * size)
        return cls("epochs", config.epochs, progress.samples / size, over)

    def shortfall(self, slot: str) -> str:
        """Say that the recipe asks for less than is done; empty if it does not."""
        done = f"{self.amount:.10g}" if self.name == "steps" else f"{self.amount:.3g}"
        return self.over * (
            f"{slot}.{self.name}={self.given:.10g} is below the {done} {self.name} that are done: "
            "the weights are unchanged"
        )

    def require_steps_left(
        self, ctx: Context, checkpoints: Checkpoints, progress: Progress, total: int
    ) -> None:
        """Raise StageError if a run that starts from another's checkpoint has no step to take."""
        starts_from_another = getattr(checkpoints, "start_from", None) and not has_trained(progress)
        if not starts_from_another or progress.step < total:
            return
        field, more = f"{ctx.slot}.{self.name}", f"{self.amount + self.given:.10g}"
        counts = f"step count ({progress.step})"
        if self.name == "epochs":
            counts = f"position in the data ({self.amount:.3g} epochs)"
        raise StageError(
            f"`start_from` continues its {counts}, and `{field}` is {self.given:.10g}: nothing "
            "would be trained",
            hint=f"to continue: {field}={more}; to train its weights again: its export as the "
            "model slot's path, without start_from",
        )


SEARCHED = 256
"""Samples that are searched for a usable one."""
LONGEST = 128
"""Tokens of each document that are used."""
LEAK = 1e-5
"""Relative change of a document's loss from rounding, when the document before it changes."""
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Relative difference of losses from other kernels and other lengths, by compute dtype."""
HINT = "set packing: false, or another `attention` in the model slot"


def verify_packing(engine: Engine, data: Data, samples: Iterable[Sample]) -> None:
    """Raise StageError if the loss of a document depends on the one before it (collective).
    Does nothing if none of the first `samples` is packed."""
    documents = _two_documents(samples)
    if documents is None:
        return
    first, second = documents
    other = Sample(input_ids=np.full_like(first.input_ids, data.pad_id), labels=first.labels)
    single, after, after_other = (_loss(engine, data, second, one) for one in (None, first, other))
    what = "a document sees the one before it in the same sample"
    _require_close(what, after_other, after, LEAK)
    what = "a document's loss in a packed sample differs from its loss in its own sample"
    dtypes = engine.describe().get("compute", ["fp32"])
    _require_close(what, after, single, max(TOLERANCE.get(name, 1e-4) for name in dtypes))


def _two_documents(samples: Iterable[Sample]) -> tuple[Sample, Sample] | None:
    """Beginnings of two documents that follow each other; the second has targets."""
    for sample in itertools.islice(samples, SEARCHED):
        if sample.positions is None:
            continue
        starts = [*np.flatnonzero(sample.positions == 0).tolist(), len(sample.input_ids)]
        parts = [slice(a, min(b, a + LONGEST)) for a, b in itertools.pairwise(starts)]
        documents = [Sample(input_ids=sample.input_ids[one], labels=sample.labels[one])
                     for one in parts]  # fmt: skip
        for first, second in itertools.pairwise(documents):
            if (second.labels != NO_TARGET).any():
                return first, second
    return None


def _loss(engine: Engine, data: Data, sample: Sample, before: Sample | None) -> float:
    """Cross-entropy of a document, packed after the one `before` it, without dropout: the mean of
    copies, two in a micro-batch of each data-parallel rank. With one, some attention finds packed
    documents that it misses in more."""
    if before is not None:
        lengths = len(before.input_ids), len(sample.input_ids)
        sample = Sample(
            input_ids=np.concatenate([before.input_ids, sample.input_ids]),
            labels=np.concatenate([np.full(lengths[0], NO_TARGET), sample.labels]),
            positions=np.concatenate([np.arange(length) for length in lengths]),
        )
    batch = collate([sample, sample], data.pad_id, engine.device)
    (rows,) = engine.evaluate([batch], RowLoss())
    part = torch.zeros((), device=engine.device) if rows is None else rows[:, 0].sum()
    return float(engine.total(part)) / (2 * engine.data_axis.count)


def _require_close(what: str, found: float, expected: float, tolerance: float) -> None:
    if not abs(found - expected) <= tolerance * max(abs(expected), 1.0):
        raise StageError(f"packing: {what}: {found:.6g} instead of {expected:.6g}", hint=HINT)
