"""The project's own export: `consolidate.stream` and `export.safetensors`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from apart.child import Job, Place, Work

from exporters.finish import flushed
from exporters.trained import STEP


def write(job: Job, place: Place) -> Work:
    """Run the stage until all weights are written; interrupt it before it reads them back."""
    import stages.export.run as steps

    export = _export(job, place)

    def stop(*args: object) -> None:
        raise _Written

    def call() -> None:
        with mock.patch.object(steps, "prove_files", stop):
            try:
                export()
            except _Written:
                return
            raise AssertionError("the stage did not read its files back")

    return flushed(call, Path(job["out"]), place)


def prove(job: Job, place: Place) -> Work:
    """Run the whole stage: write, read back and compare, load the model and compare logits with the
    checkpoint's, flush."""
    return flushed(_export(job, place), Path(job["out"]), place)


class _Written(Exception):
    """All weights are written."""


def _export(job: Job, place: Place) -> Callable[[], None]:
    """Prepare an export from a checkpoint to a model folder as a run makes it."""
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import stages.export.run
    import stages.model.source  # noqa: F401
    from pipeline import testing
    from pipeline.contracts.training import Progress, TrainedRun
    from stages.consolidate.stream import ConsolidateStream
    from stages.export.safetensors import ExportSafetensors
    from stages.model.hf import HfModel

    trained = TrainedRun(checkpoint=job["input"], progress=Progress(step=STEP))
    stage = ExportSafetensors(folder=f"{job['out']}/model", dtype="fp32")

    def call() -> None:
        ctx = testing.context(place.folder / "run", seed=1, dist=place.dist())
        ctx.log = logging.getLogger("benchmark")
        source = HfModel(config=job["config"], init="random").run(ctx)
        with contextlib.closing(ConsolidateStream().run(ctx, trained)) as weights:
            stage.run(ctx, weights, source, trained)

    return call
