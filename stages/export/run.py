"""Run an export: plan, write, prove, put in place. All ranks write and read back; rank 0 decides.

An interrupted export continues with the files that it has not finished."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from pipeline import (
    ENGINE_FILE,
    Context,
    ExportedModel,
    ExportError,
    StageError,
    TrainedRun,
    in_words,
)
from pipeline.utils import BYTES, activity, human, plural, replace_text
from stages.export import target
from stages.export.contents import Contents, ExportPlan
from stages.export.target import CARD, Manifest, WeightFile
from stages.export.weight_files import check, data_size, prove_files, write
from stages.model.as_exported import needs_source, require_same_base

INDEX = "model.safetensors.index.json"
_CARD = """---
library_name: {library}
pipeline_tag: text-generation
---

# {name}

{facts}

```python
{usage}
```

`pipe verify` checks again that the files are intact and that the model computes the same outputs.
"""
"""The model card: a line for each fact, and the Python that loads the folder."""


def export(
    folder: Path, ctx: Context, contents: Contents, trained: TrainedRun | None
) -> ExportedModel:
    """Write and prove (collective); every rank returns the same record. Raises StageError."""
    if ctx.dist.is_main and trained is not None:
        require_same_base(ctx, contents.source, trained)
    others = None
    if ctx.dist.is_main:
        # The files next to the weights, and what is proven.
        with tempfile.TemporaryDirectory() as scratch:
            contents.save_others(Path(scratch), dtype="fp32")
            sums = Manifest(plan="").sums_of_others(Path(scratch))
        own = [contents.source.contents] if needs_source(contents.source) else []
        others = json.dumps([contents.writer, contents.prompt, sums, *own], sort_keys=True)
    plan = contents.plan(ctx.dist.broadcast_str(others))
    try:
        found = _from_main(ctx, lambda: target.finished(folder, plan.digest))
        if found is None or _unwritten(ctx, folder, plan, found):
            found = _exported(ctx, contents, plan, folder, trained)
        else:
            ctx.log.info("%s holds this export already", folder)
    except OSError as error:
        raise StageError(f"cannot write the export in {folder}: {in_words(error)}") from error
    return ExportedModel(folder=folder, files=found.files, total_bytes=plan.total)


def _from_main(ctx: Context, make: Callable[[], Manifest | None]) -> Manifest | None:
    """The manifest that rank 0 makes, on every rank (collective)."""
    made = make() if ctx.dist.is_main else None
    text = ctx.dist.broadcast_str(made.model_dump_json() if made else "")
    return Manifest.model_validate_json(text) if text else None


def _begun(plan: ExportPlan, written: Manifest) -> dict[str, WeightFile]:
    """The files of the plan that have been written, with their checksums."""
    return {
        name: part.model_copy(update={"sums": written.weights[name].sums})
        for name, part in plan.parts.items()
        if name in written.weights
    }


def _unwritten(ctx: Context, folder: Path, plan: ExportPlan, written: Manifest) -> list[str]:
    """The weight files that are not in `folder` as they were `written` (collective)."""
    begun = _begun(plan, written)
    return [
        name
        for name in plan.parts
        if name not in begun or check(folder / name, begun[name], ctx.dist)
    ]


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
        # Files of an interrupted export are read back, and those that are missing are written.
        written, ranks = begun, ctx.dist.world_size
        missing = _unwritten(ctx, partial, plan, begun)
        if len(missing) < len(plan.parts):
            kept = plural(len(plan.parts) - len(missing), "file")
            ctx.log.info("written already: %s", kept)
        with activity("writing weights", plan.total // ranks, BYTES) as writing:
            for first in range(0, len(missing), ranks):
                parts = {name: plan.parts[name] for name in missing[first : first + ranks]}
                new = write(partial, parts, plan.files, ctx.dist, writing.advance)
                written = written.model_copy(update={"weights": {**written.weights, **new}})
                if ctx.dist.is_main:
                    written.save(partial)
        ctx.log.info("weights written: this process %s", writing.summary())
        try:
            with activity("reading the export back"):
                prove_files(partial, _begun(plan, written), ctx.dist)
            done = _from_main(ctx, lambda: _finish(ctx, contents, plan, folder, written, trained))
        except ExportError as error:
            if ctx.dist.is_main:
                Manifest(plan="").save(partial)  # a later export starts again
            raise ExportError(str(error), hint=f"left for inspection: {partial}") from error
    assert done is not None
    return done


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
        total = sum(map(data_size, plan.parts.values()))
        files = {name: file for file, part in plan.parts.items() for name in part.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        replace_text(partial / INDEX, json.dumps(index, indent=2) + "\n")
    contents.save_others(partial, dtype=plan.dtype)
    facts = _facts(ctx, contents, plan, trained)
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items() if name != "name")
    usage, library = contents.usage(partial), contents.library
    card = _CARD.format(library=library, name=facts["name"], facts=lines, usage=usage)
    (partial / CARD).write_text(card, encoding="utf-8")
    with activity("proving that the export loads and computes the same"):
        proof = contents.prove(partial, plan)
    ctx.log.info(
        "the export loads and computes the same (largest difference %.2g)", proof.difference
    )
    update = {
        "others": written.sums_of_others(partial), "facts": facts, "proof": proof,
        "writer": contents.writer, "passed": list(plan.passed),
    }  # fmt: skip
    done = written.model_copy(update=update)
    target.put_in_place(folder, done)
    return done


def _facts(
    ctx: Context, contents: Contents, plan: ExportPlan, trained: TrainedRun | None
) -> dict[str, str]:
    """Facts about the model and the run that trained it, one line each."""
    count = sum(len(part.tensors) for part in plan.parts.values())
    size = human(sum(map(data_size, plan.parts.values())))
    # The run that trained the model: this one, or the checkpoint's.
    folders = [ctx.run_dir] + ([Path(trained.checkpoint).parent.parent] if trained else [])
    run = next((folder for folder in folders if (folder / ENGINE_FILE).is_file()), None)
    origin = Path(contents.source.name).name
    facts = {
        "name": run.name if run else origin,
        "architecture": type(plan.outline).__name__,
        "trained from": origin,
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
