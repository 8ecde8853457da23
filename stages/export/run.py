"""Run an export: plan, write, prove, put in place. All ranks write and read back; rank 0 decides.

An interrupted export continues with the files that it has not finished."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline import (
    ENGINE_FILE,
    Context,
    ExportedModel,
    ExportError,
    ModelSource,
    StageError,
    TrainedRun,
    in_words,
)
from pipeline.utils import BYTES, activity, human, plural, replace_text
from stages.export import target
from stages.export.contents import Contents
from stages.export.manifest import CARD, Manifest, WeightFile
from stages.export.plan import INDEX, ExportPlan, index
from stages.export.weight_files import Shard, check, prove_files, write
from stages.model.as_exported import needs_source, require_same_base


def export(
    folder: Path, ctx: Context, contents: Contents, trained: TrainedRun | None
) -> ExportedModel:
    """Write and prove (collective); every rank returns the same record. Raises StageError."""
    if ctx.dist.is_main and trained is not None:
        require_same_base(ctx, contents.source, trained)
    plan = contents.plan(_digest_beside(ctx, contents))
    try:
        found = _from_main(ctx, lambda: target.finished(folder, plan.digest))
        if found is None or not all(_is_whole(ctx, folder, part, found) for part in plan.parts):
            found = _exported(ctx, contents, plan, folder, trained)
        else:
            ctx.log.info("%s holds this export already", folder)
    except OSError as error:
        raise StageError(f"cannot write the export in {folder}: {in_words(error)}") from error
    return ExportedModel(folder=folder, files=found.files, total_bytes=plan.total)


def _digest_beside(ctx: Context, contents: Contents) -> str:
    """A digest of the files next to the weights and of what is proven (collective)."""
    text = None
    if ctx.dist.is_main:
        with tempfile.TemporaryDirectory() as scratch:
            contents.save_beside(Path(scratch), dtype="fp32")
            facts: list[Any] = [
                contents.writer,
                contents.prompt,
                Manifest(plan="").beside(Path(scratch)),
            ]
            if needs_source(contents.source):
                facts.append(contents.source.contents)
            text = json.dumps(facts, sort_keys=True)
    return ctx.dist.broadcast_str(text)


def _from_main(ctx: Context, make: Callable[[], Manifest | None]) -> Manifest | None:
    """The manifest that rank 0 makes, on every rank (collective)."""
    made = make() if ctx.dist.is_main else None
    text = ctx.dist.broadcast_str(made.model_dump_json() if made else "")
    return Manifest.model_validate_json(text) if text else None


def _exported(
    ctx: Context, contents: Contents, plan: ExportPlan, folder: Path, trained: TrainedRun | None
) -> Manifest:
    partial = target.partial_of(folder)
    with contextlib.ExitStack() as held:
        begun = _from_main(ctx, lambda: target.claim(folder, plan.digest, held, ctx.log))
        assert begun is not None
        if ctx.dist.is_main:
            files = plural(len(plan.parts), "file")
            ctx.log.info("writing %s in %s to %s", human(plan.total), files, folder)
        written = _write_all(ctx, plan, partial, begun)
        sums = {file: entry.sums for file, entry in written.weights.items()}
        try:
            with activity("reading the export back"):
                prove_files(partial, plan.parts, sums, ctx.dist)
            done = _from_main(ctx, lambda: _finish(ctx, contents, plan, folder, written, trained))
        except ExportError as error:
            if ctx.dist.is_main:
                Manifest(plan="").save(partial)  # a later export starts anew
            raise ExportError(str(error), hint=f"left for inspection: {partial}") from error
    assert done is not None
    return done


def _write_all(ctx: Context, plan: ExportPlan, partial: Path, begun: Manifest) -> Manifest:
    """Write the files that are missing, after reading back the files of an interrupted export."""
    done = begun
    missing = [part for part in plan.parts if not _is_whole(ctx, partial, part, begun)]
    if len(missing) < len(plan.parts):
        done_before = plural(len(plan.parts) - len(missing), "file")
        ctx.log.info("written already: %s", done_before)
    with activity("writing weights", plan.total // ctx.dist.world_size, BYTES) as writing:
        for first in range(0, len(missing), ctx.dist.world_size):
            parts = missing[first : first + ctx.dist.world_size]
            sums = write(partial, parts, plan.files, ctx.dist, writing.advance)
            entries = {
                part.file: WeightFile(size=part.total, tensors=part.entries, sums=sums[part.file])
                for part in parts
            }
            done = done.model_copy(update={"weights": {**done.weights, **entries}})
            if ctx.dist.is_main:
                done.save(partial)
    ctx.log.info("weights written: this process %s", writing.summary())
    return done


def _is_whole(ctx: Context, folder: Path, part: Shard, written: Manifest) -> bool:
    """Whether a file in `folder` is finished and as it was written (collective)."""
    entry = written.weights.get(part.file)
    return entry is not None and not check(folder / part.file, part, entry.sums, ctx.dist)


def _finish(
    ctx: Context,
    contents: Contents,
    plan: ExportPlan,
    folder: Path,
    written: Manifest,
    trained: TrainedRun | None,
) -> Manifest:
    """Write everything next to the weights, prove the export and put it in place (rank 0)."""
    partial = target.partial_of(folder)
    target.clear(partial, keep=written.weights)
    if len(plan.parts) > 1:
        replace_text(partial / INDEX, json.dumps(index(plan.parts), indent=2) + "\n")
    contents.save_beside(partial, dtype=plan.dtype)
    facts = _facts(ctx, contents.source, plan, trained)
    _write_card(partial, facts, contents.library, contents.usage(partial))
    with activity("proving that the export loads and computes the same"):
        proof = contents.prove(partial, plan)
    ctx.log.info(
        "the export loads and computes the same (largest difference %.2g)", proof.difference
    )
    update = {
        "facts": facts, "proof": proof, "writer": contents.writer, "passed": list(plan.passed),
    }  # fmt: skip
    done = written.model_copy(update={"others": written.beside(partial), **update})
    target.put_in_place(folder, done)
    return done


def _facts(
    ctx: Context, source: ModelSource, plan: ExportPlan, trained: TrainedRun | None
) -> dict[str, str]:
    """Facts about the model and the run that trained it, one line each."""
    count = sum(len(part.tensors) for part in plan.parts)
    size = human(sum(part.size for part in plan.parts))
    # The run that trained the model: this one, or the checkpoint's.
    folders = [ctx.run_dir] + ([Path(trained.checkpoint).parent.parent] if trained else [])
    run = next((folder for folder in folders if (folder / ENGINE_FILE).is_file()), None)
    facts = {
        "name": run.name if run else Path(source.name).name,
        "architecture": type(plan.outline).__name__,
        "trained from": Path(source.name).name,
        "weights": f"{count} tensors, {size}, {plan.dtype}",
    }
    if run is not None:
        facts |= {"run": run.name, "seed": str(ctx.seed)}
    if trained is not None:
        done = trained.progress
        counts = {"steps": done.step, "samples": done.samples, "target tokens": done.tokens}
        facts |= {name: f"{count:,}" for name, count in counts.items()}
        facts |= {name: f"{value:.6g}" for name, value in done.metrics.items()}
    return facts


def _write_card(folder: Path, facts: Mapping[str, str], library: str, usage: str) -> None:
    """Write the model card: a line for each fact, and the Python that loads the folder."""
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items() if name != "name")
    text = f"""---
library_name: {library}
pipeline_tag: text-generation
---

# {facts["name"]}

{lines}

```python
{usage}
```

`pipe verify` checks again that the files are intact and that the model computes the same outputs.
"""
    (folder / CARD).write_text(text, encoding="utf-8")
