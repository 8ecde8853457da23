"""Run an export: plan, write, prove, put in place. All ranks write and read back; rank 0 decides.

What an interrupted export has finished is kept: a second one goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.layout import CODES
from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource
from pipeline.contracts.training import TrainedRun
from pipeline.errors import ExportError, StageError, in_words
from pipeline.utils.files import replace_text
from pipeline.utils.text import Throughput, human
from stages.export.card import facts_of, write_card
from stages.export.layout import INDEX, Shard, index
from stages.export.manifest import Manifest, WeightFile, checksums
from stages.export.proof import prove_files
from stages.export.target import (
    claim,
    clear,
    finished,
    reject,
    require_space,
    seal,
    swap,
)
from stages.export.writer import Sums, check, write

if TYPE_CHECKING:
    from pipeline.contracts.stage import Context
    from stages.export.contents import Contents
    from stages.export.plan import ExportPlan


def export(
    folder: Path, ctx: Context, contents: Contents, trained: TrainedRun | None
) -> ExportedModel:
    """Write and prove (collective); every rank returns the same record. Raises StageError."""
    ctx.on_exit(contents.close)
    if ctx.dist.is_main and trained is not None:
        _require_same_base(ctx, contents.source, trained)
    plan = contents.plan(_digest_beside(ctx, contents))
    try:
        found = _shared(ctx, finished(folder, plan.digest) if ctx.dist.is_main else None)
        if found is None or _wrong(ctx, folder, plan, found):
            facts = facts_of(ctx, contents.source, plan, trained)
            found = _exported(ctx, contents, plan, folder, facts)
        else:
            ctx.log.info("%s holds this export already", folder)
    except OSError as error:
        raise StageError(f"cannot write the export in {folder}: {in_words(error)}") from error
    return ExportedModel(folder=folder, files=found.files, total_bytes=plan.total)


def _require_same_base(ctx: Context, model: ModelSource, trained: TrainedRun) -> None:
    """Raises ExportError when weights that were not trained, which the export takes from the model,
    are not those that were trained on."""
    then = trained.progress.lineage.get("weights")
    if not model.frozen_base or then is None or "weights" in ctx.accept:
        return
    if model.contents != then:
        raise ExportError(
            f"the weights of {model.name} are not those that were trained on: their digest was "
            f"{then[:12]}, is {str(model.contents)[:12]}",
            hint="put back the files, or if that is intended: --accept weights",
        )


def _digest_beside(ctx: Context, contents: Contents) -> str:
    """Equal when the files beside the weights are, and what is proven (collective)."""
    text = None
    if ctx.dist.is_main:
        with tempfile.TemporaryDirectory() as scratch:
            contents.save_beside(Path(scratch), dtype="fp32")
            facts: list[Any] = [contents.writer, contents.prompt, checksums(Path(scratch))]
            if contents.source.frozen_base:
                facts.append(contents.source.contents)
            text = json.dumps(facts, sort_keys=True)
    return ctx.dist.broadcast_str(text)


def _shared(ctx: Context, found: Manifest | None) -> Manifest | None:
    """Rank 0's manifest, on every rank."""
    text = None
    if ctx.dist.is_main:
        text = found.model_dump_json() if found else ""
    told = ctx.dist.broadcast_str(text)
    return Manifest.model_validate_json(told) if told else None


def _wrong(ctx: Context, folder: Path, plan: ExportPlan, found: Manifest) -> bool:
    """Whether any weight file of a finished export is not as it was written (collective)."""
    return any(
        check(folder / part.file, part, found.weights[part.file].sums, ctx.dist)
        for part in plan.parts
    )


def _exported(
    ctx: Context,
    contents: Contents,
    plan: ExportPlan,
    folder: Path,
    facts: Mapping[str, str],
) -> Manifest:
    with contextlib.ExitStack() as held:
        partial, begun = _claimed(ctx, folder, plan, held)
        if ctx.dist.is_main:
            require_space(partial, plan.total - sum(file.size for file in begun.weights.values()))
            ctx.log.info(
                "writing %s in %d file(s) to %s", human(plan.total), len(plan.parts), folder
            )
        written = _write_all(ctx, plan, partial, begun)
        sums = {file: entry.sums for file, entry in written.weights.items()}
        try:
            prove_files(partial, plan.parts, sums, ctx.dist)
            done = None
            if ctx.dist.is_main:
                done = _finish(ctx, contents, plan, partial, written, facts)
                kept = swap(partial, folder)
                if kept is not None:
                    ctx.log.warning("files of the earlier export were changed: kept as %s", kept)
        except ExportError as error:
            if ctx.dist.is_main:
                reject(partial)
            raise ExportError(str(error), hint=f"left for inspection: {partial}") from error
    found = _shared(ctx, done)
    assert found is not None
    return found


def _claimed(
    ctx: Context, folder: Path, plan: ExportPlan, held: contextlib.ExitStack
) -> tuple[Path, Manifest]:
    """Rank 0's finding, on every rank."""
    text = None
    if ctx.dist.is_main:
        partial, begun = claim(folder, plan.digest, held)
        text = json.dumps([str(partial), begun.model_dump_json()])
    place, told = json.loads(ctx.dist.broadcast_str(text))
    return Path(place), Manifest.model_validate_json(told)


def _write_all(ctx: Context, plan: ExportPlan, partial: Path, begun: Manifest) -> Manifest:
    """Write the files that are not there yet; what is there is read back first."""
    watch = Throughput(ctx.log, "writing weights", plan.total // ctx.dist.world_size)
    done = begun
    missing = [part for part in plan.parts if not _is_there(ctx, partial, part, begun)]
    for first in range(0, len(missing), ctx.dist.world_size):
        parts = missing[first : first + ctx.dist.world_size]
        sums = write(partial, parts, plan.files, ctx.dist, watch.advance)
        entries = {part.file: _entry(part, sums[part.file]) for part in parts}
        done = done.model_copy(update={"weights": {**done.weights, **entries}})
        if ctx.dist.is_main:
            done.save(partial)
    ctx.log.info("weights written: this process %s", watch.summary())
    return done


def _is_there(ctx: Context, partial: Path, part: Shard, begun: Manifest) -> bool:
    """Whether an earlier export has finished a file (collective)."""
    if part.file not in begun.weights:
        return False
    if check(partial / part.file, part, begun.weights[part.file].sums, ctx.dist):
        return False
    ctx.log.info("%s is there already", part.file)
    return True


def _entry(part: Shard, sums: Sums) -> WeightFile:
    return WeightFile(
        size=part.size + len(part.header()),
        tensors={t.name: (CODES[t.dtype], t.shape) for t in part.tensors},
        sums=sums,
    )


def _finish(
    ctx: Context,
    contents: Contents,
    plan: ExportPlan,
    partial: Path,
    written: Manifest,
    facts: Mapping[str, str],
) -> Manifest:
    """Everything beside the weights, and the proof that they are read as what they are."""
    clear(partial, keep=written.weights)
    if len(plan.parts) > 1:
        replace_text(partial / INDEX, json.dumps(index(plan.parts), indent=2) + "\n")
    contents.save_beside(partial, dtype=plan.dtype)
    write_card(partial, facts, contents.usage)
    proof = contents.prove(partial, plan)
    ctx.log.info(
        "the export loads and computes the same (largest difference %.2g)", proof.difference
    )
    others = checksums(partial, without=written.weights)
    told = {"others": others, "facts": dict(facts), "proof": proof, "writer": contents.writer}
    done = written.model_copy(update=told)
    seal(partial, done)
    return done
