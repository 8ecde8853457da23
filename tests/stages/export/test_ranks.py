"""One export by two processes: both write, both return the same, from the same weights."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from pipeline.distributed.process_group import DistContext
from stages.export.safetensors import ExportSafetensors
from stages.model.hf import HfModel
from tests.support.models import FAMILIES, context, random_source
from tests.support.processes import run_ranks
from tests.support.weights import trained


def digest(weights: Any) -> str:
    """Return the hex digest of every tensor by name."""
    found = hashlib.sha256()
    for name in sorted(weights.names()):
        found.update(name.encode() + weights.read(name).numpy().tobytes())
    return found.hexdigest()


def export_on_rank(dist: DistContext, folder: str) -> dict[str, Any]:
    ctx = dataclasses.replace(context(Path(folder)), dist=dist)
    source = HfModel(config=FAMILIES["llama"]).run(ctx)
    weights = trained(source)
    done = ExportSafetensors(dtype="fp32").run(ctx, weights, source)
    return done.record() | {"digest": digest(source.weights()), "reads": len(weights.reads)}


def test_both_write_and_return_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(export_on_rank, 2, str(tmp_path))
    assert first["reads"] > second["reads"] > 0
    for key in ("folder", "files", "total_bytes"):
        assert first[key] == second[key]
    assert (Path(first["folder"]) / "model.safetensors").stat().st_size == first["total_bytes"]
    here = digest(random_source(FAMILIES["llama"], tmp_path).weights())
    assert first["digest"] == second["digest"] == here
