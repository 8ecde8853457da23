"""Run an export: plan, write, prove, put in place. Rank 0 works, the others wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifacts import ExportedModel, ModelSource, Weights, torch_dtype
from pipeline.errors import ExportError
from stages.export.card import write_card
from stages.export.conversion import Conversion
from stages.export.layout import Shard, shards
from stages.export.proof import prove_files, prove_model
from stages.export.sizes import human, parse_size
from stages.export.target import claim, require_space, seal, swap
from stages.export.writer import write

if TYPE_CHECKING:
    from torch import nn

    from pipeline.stage import Context
    from stages.export.safetensors import ExportSafetensors


def export(
    stage: ExportSafetensors, ctx: Context, weights: Weights, source: ModelSource
) -> ExportedModel:
    """Write and prove on rank 0; every rank returns the same record."""
    record = None
    if ctx.dist.is_main:
        record = json.dumps(_export(stage, ctx, weights, source).record())
    return _restored(ctx.dist.share(record))


def _restored(record: str) -> ExportedModel:
    content = json.loads(record)
    return ExportedModel(
        folder=Path(content["folder"]), files=content["files"], total_bytes=content["total_bytes"]
    )


def _export(
    stage: ExportSafetensors, ctx: Context, weights: Weights, source: ModelSource
) -> ExportedModel:
    folder = Path(stage.folder).expanduser() if stage.folder else ctx.run_dir / "export"
    folder = folder.absolute()
    outline = _outline(source)
    conversion = Conversion(outline, weights, torch_dtype(stage.dtype))
    parts = shards(conversion.specs, parse_size(stage.max_shard_size))
    total = sum(part.size + len(part.header()) for part in parts)
    partial = claim(folder)
    require_space(partial, total)
    ctx.log.info("writing %s in %d file(s) to %s", human(total), len(parts), folder)
    digests = write(partial, parts, conversion.tensors())
    source.save_assets(partial, dtype=stage.dtype)
    _card(partial, ctx, source, outline, stage.dtype, parts)
    try:
        prove_files(partial, parts, digests)
        difference = prove_model(partial, source, conversion, outline, stage.prompt)
    except ExportError as error:
        raise ExportError(str(error), hint=f"left for inspection: {partial}") from error
    ctx.log.info("the export loads and computes the same (largest difference %.2g)", difference)
    files = seal(partial, {"run": ctx.run_dir.name, "dtype": stage.dtype, "bytes": total})
    swap(partial, folder)
    return ExportedModel(folder=folder, files=files, total_bytes=total)


def _outline(source: ModelSource) -> nn.Module:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = source.build()
    source.tie(model)
    return model


def _card(
    folder: Path,
    ctx: Context,
    source: ModelSource,
    outline: nn.Module,
    dtype: str,
    parts: list[Shard],
) -> None:
    specs = [spec for part in parts for spec in part.specs]
    facts = {
        "architecture": type(outline).__name__,
        "trained from": Path(source.name).name,
        "run": ctx.run_dir.name,
        "seed": str(ctx.seed),
        "weights": f"{len(specs)} tensors, {human(sum(spec.size for spec in specs))}, {dtype}",
    }
    write_card(folder, ctx.run_dir.name, facts)
