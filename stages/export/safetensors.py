"""The stage `export.safetensors`: the trained weights as a folder that transformers loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipeline.artifacts import ExportedModel, ModelSource, TrainedRun, Weights
from pipeline.errors import Problem
from pipeline.stage import Context, PlanView, Room
from stages.export.sizes import parse_size


@dataclass(frozen=True, kw_only=True)
class ExportSafetensors:
    """Write the model as safetensors in Hugging Face layout, then prove that it loads and computes
    the same.

    All ranks write, each its share of every file, a few MiB at a time whatever the model's size. An
    interrupted export goes on with the files that it has not finished. The proof loads the written
    model on the CPU of rank 0, block by block when it does not fit into host memory, and compares
    it with the checkpoint's weights in the declared module.
    """

    folder: str | None = None
    """Where the model goes; the run's folder `export` when not set. An earlier export there is
    replaced once the new one is proven; anything else there is refused."""
    dtype: Literal["fp32", "bf16", "fp16", "source"] = "bf16"
    """Dtype of the floating point weights in the files; `source` keeps that of each tensor in the
    model that was trained from."""
    max_shard_size: str = "5GB"
    """Largest size of one weight file (`5GB`, `512MiB`); a larger tensor gets a file of its own."""
    prompt: str = "The quick brown fox jumps over the lazy dog."
    """Text on which the logits of the written and the trained model are compared. Without a
    tokenizer, fixed token ids are used."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        try:
            parse_size(self.max_shard_size)
        except ValueError as error:
            yield Problem(message=str(error), key="max_shard_size")
        if not self.prompt.strip():
            yield Problem(message="must not be empty", key="prompt")
        if self.folder is not None:
            yield from self._check_folder(Path(self.folder).expanduser())

    def _check_folder(self, folder: Path) -> Iterator[Problem]:
        from stages.export.target import PARTIAL, foreign

        if folder.name.endswith(PARTIAL):
            yield Problem(
                message=f"`{folder.name}` is what an unfinished export is called",
                key="folder", hint=f"choose a name that does not end in `{PARTIAL}`",
            )  # fmt: skip
        reason = foreign(folder)
        if reason:
            yield Problem(message=reason, key="folder", hint="name a new folder")

    def run(
        self,
        ctx: Context,
        weights: Weights,
        model: ModelSource,
        trained: TrainedRun | None = None,
    ) -> ExportedModel:
        from stages.export.steps import export

        return export(self, ctx, weights, model, trained)

    def foresee(self, ctx: Context, model: ModelSource) -> Iterator[Room]:
        from stages.export.foresight import room

        yield room(self, ctx, model)

    def rehearse(
        self, ctx: Context, weights: Weights, model: ModelSource, trained: TrainedRun
    ) -> ExportedModel:
        from stages.export.target import target_of

        if self.folder is None:
            return self.run(ctx, weights, model, trained)
        target = target_of(self, ctx)
        elsewhere = target.with_name(f"{target.name}.rehearsal")
        if ctx.dist.is_main:
            shutil.rmtree(elsewhere, ignore_errors=True)
            ctx.on_exit(lambda: shutil.rmtree(elsewhere, ignore_errors=True))
        return replace(self, folder=str(elsewhere)).run(ctx, weights, model, trained)

    @classmethod
    def verify(
        cls, folder: Path, tell: Callable[[str], object], *, trust_remote_code: bool
    ) -> None:
        """What `pipe verify` does with a folder that this stage has written. Raises ExportError."""
        from stages.export.verify import verify

        verify(folder, tell, trust_remote_code=trust_remote_code)
