"""The stage `export.safetensors`: the trained weights as a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipeline.artifacts import ExportedModel, ModelSource, TrainedRun, Weights
from pipeline.errors import Problem
from pipeline.stage import Context, PlanView, Room
from stages.export import fields
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
        yield from fields.problems(self.folder, self.prompt)

    def run(
        self,
        ctx: Context,
        weights: Weights,
        model: ModelSource,
        trained: TrainedRun | None = None,
    ) -> ExportedModel:
        from stages.export.contents import ModelContents
        from stages.export.steps import export
        from stages.export.target import target_of

        contents = ModelContents(
            model,
            weights,
            dtype=self.dtype,
            max_shard_size=parse_size(self.max_shard_size),
            prompt=self.prompt,
        )
        return export(target_of(self.folder, ctx), ctx, contents, trained)

    def foresee(self, ctx: Context, model: ModelSource) -> Iterator[Room]:
        from stages.export.foresight import room

        yield room(self, ctx, model)

    def rehearse(
        self, ctx: Context, weights: Weights, model: ModelSource, trained: TrainedRun
    ) -> ExportedModel:
        from stages.export.target import rehearsed

        elsewhere = rehearsed(self.folder, ctx)
        return replace(self, folder=elsewhere).run(ctx, weights, model, trained)

    def prove(self, exported: ExportedModel) -> None:
        """Every file has the checksum that it was written with. Raises ExportError."""
        from stages.export.verify import prove_whole

        prove_whole(exported.folder, lambda proven: None, alone=False)

    @classmethod
    def verify(
        cls, folder: Path, tell: Callable[[str], object], *, trust_remote_code: bool
    ) -> None:
        """What `pipe verify` does with a folder that this stage has written. Raises ExportError."""
        from stages.export.verify import verify

        verify(folder, tell, trust_remote_code=trust_remote_code)
