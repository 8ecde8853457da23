"""The stage `export.safetensors`: the trained weights as a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts import DtypeName, ExportedModel, ModelSource, Weights
from pipeline.errors import Problem
from pipeline.stage import Context, PlanView
from stages.export.sizes import parse_size


@dataclass(frozen=True, kw_only=True)
class ExportSafetensors:
    """Write the model as safetensors in Hugging Face layout, then prove that it loads and computes
    the same.

    Weights are streamed: memory stays at the largest tensor while writing (for architectures whose
    files differ from their module, such as fused experts, at the converted tensors of one block).
    The proof loads the written model, and then a reference, on the CPU of rank 0.
    """

    folder: str | None = None
    """Where the model goes; the run's folder `export` when not set. An earlier export there is
    replaced once the new one is proven; anything else there is refused."""
    dtype: DtypeName = "bf16"
    """Dtype of the floating point weights in the files."""
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
        from stages.export.target import foreign

        reason = foreign(folder)
        if reason:
            yield Problem(message=reason, key="folder", hint="name a new folder")

    def run(self, ctx: Context, weights: Weights, model: ModelSource) -> ExportedModel:
        from stages.export.steps import export

        return export(self, ctx, weights, model)
