"""The stages `export.safetensors`, the trained weights as a folder that transformers loads, and
`export.adapter`, only the trained adapter, as peft loads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, TypeAdapter

from pipeline import (
    Context,
    ExportedModel,
    ModelSource,
    PlanView,
    Problem,
    ResourceNeed,
    TextModel,
    TrainedRun,
    Weights,
)
from pipeline.utils import expanded, path_problems
from stages.adapter.lora import AdaptedModel
from stages.fields import made_by_training, result_problems
from stages.model.config_checks import hf_model


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Folder and verification of an export, the same for models and adapters."""

    folder: str | None = None
    """Folder of the export; the run's folder `export` when not set. An earlier export there is
    replaced once the new one is proven; anything else there is refused."""
    prompt: str = "The quick brown fox jumps over the lazy dog."
    """Text on which the logits of the exported and the trained model are compared. Without a
    tokenizer, fixed token ids are used."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        from stages.export.target import PARTIAL, changed, foreign

        yield from path_problems("folder", self.folder)
        yield from result_problems(self, plan)
        if not self.prompt.strip():
            yield Problem(message="must not be empty", key="prompt")
        folder = None if self.folder is None else expanded(self.folder)
        if folder is not None and folder.name.endswith(PARTIAL):
            yield Problem(
                message=f"`{folder.name}` is the name of an unfinished export",
                key="folder", hint=f"choose a name that does not end in `{PARTIAL}`",
            )  # fmt: skip
        if folder is not None and (reason := foreign(folder)):
            yield Problem(message=reason, key="folder", hint="name a new folder")
        elif folder is not None and (damage := changed(folder)):
            hint = "the export in it will be kept aside under another name"
            yield Problem(message=f"{folder}: {damage}", key="folder", hint=hint, warning=True)
        for slot, stage in plan.slots.items():
            if stage is self:
                return
            if isinstance(stage, ExportSettings) and stage.folder == self.folder:
                where = self.folder or "the run's folder `export`"
                message = f"slot `{slot}` exports to {where} too, and would be replaced"
                yield Problem(message=message, key="folder", hint="name another folder")

    def _export(self, ctx: Context, contents: Any, trained: TrainedRun | None) -> ExportedModel:
        from stages.export.run import export
        from stages.export.target import target_of

        return export(target_of(self.folder, ctx), ctx, contents, trained)

    def verify_result(self, exported: ExportedModel) -> None:
        """Raise ExportError unless every file has the checksum that it was written with."""
        from stages.export.proof import prove_bytes

        prove_bytes(exported.folder, strict=False)

    @classmethod
    def verify(
        cls, folder: Path, report: Callable[[str], object], *, trust_remote_code: bool
    ) -> None:
        """Verify a folder that this stage has written, for `pipe verify`. Raises ExportError."""
        from stages.export.proof import verify

        verify(folder, report, trust_remote_code=trust_remote_code)

    @property
    def loads_as(self) -> str:
        """Dtype, as in a recipe or `source`, of a model that is loaded without an export."""
        return "source"

    @classmethod
    def open_folder(
        cls, folder: Path, ctx: Context, model: ModelSource | None, *, trust_remote_code: bool
    ) -> TextModel:
        """Load an export, or any folder in Hugging Face layout, for `pipe chat`."""
        from stages.export.text_model import open_folder

        return open_folder(folder, ctx, model, trust_remote_code=trust_remote_code)

    def open_trained(
        self, ctx: Context, weights: Weights, model: ModelSource, trained: TrainedRun
    ) -> TextModel:
        """Load the model that `run` would export, for `pipe chat`."""
        from stages.export.text_model import open_source
        from stages.model.as_exported import require_same_base

        require_same_base(ctx, model, trained, "name the export")
        return open_source(ctx, model, self.loads_as, weights)

    def open_source(self, ctx: Context, model: ModelSource) -> TextModel:
        """Load the model before training, for `pipe chat --beside`."""
        from stages.export.text_model import open_source

        return open_source(ctx, model, self.loads_as)


@dataclass(frozen=True, kw_only=True)
class ExportSafetensors(ExportSettings):
    """Write the model as safetensors in Hugging Face layout, then prove that it loads and computes
    the same.

    All ranks write, each its share of every file, a few MiB at a time whatever the model's size. An
    interrupted export continues with its unfinished files. The proof loads the written
    model on the CPU of rank 0, block by block when it does not fit into host memory, and compares
    it with the checkpoint's weights in the declared module.
    """

    dtype: Literal["fp32", "bf16", "fp16", "source"] = "bf16"
    """Dtype of the floating point weights in the files; `source` keeps the dtype that each tensor
    has in the model that was trained from."""
    max_shard_size: str = "5GB"
    """Largest size of one weight file (`5GB`, `512MiB`); a larger tensor gets its own file."""

    @property
    def loads_as(self) -> str:
        return self.dtype

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        try:
            parse_size(self.max_shard_size)
        except ValueError:
            yield Problem(key="max_shard_size", message="is not a size", hint="write 5GB or 512MiB")

    def run(
        self, ctx: Context, weights: Weights, model: ModelSource, trained: TrainedRun | None = None
    ) -> ExportedModel:
        from stages.export.contents import ModelContents

        contents = ModelContents(
            source=model, trained=weights, prompt=self.prompt, dtype=self.dtype,
            max_shard_size=parse_size(self.max_shard_size),
        )  # fmt: skip
        ctx.on_exit(contents.close)
        return self._export(ctx, contents, trained)

    def resource_needs(self, ctx: Context, model: ModelSource) -> Iterator[ResourceNeed]:
        from stages.export.contents import resource_need

        yield resource_need(self.dtype, self.folder, ctx, model)

    def run_dry(
        self, ctx: Context, weights: Weights, model: ModelSource, trained: TrainedRun
    ) -> ExportedModel:
        return replace(self, folder=None).run(ctx, weights, model, trained)


@dataclass(frozen=True, kw_only=True)
class ExportAdapter(ExportSettings):
    """Write the trained adapter without the model, in peft's layout, then prove that peft loads it
    onto the model and computes the same.

    `export.safetensors` writes the model with the adapter merged into it.
    """

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of the weights in the file. An adapter is small enough to keep the trained values."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from super().check(plan)
        hint = "use export.safetensors"
        if trained := made_by_training(self, plan):
            message = f"the adapter changes the model of slot `{trained}`, which no folder holds"
            yield Problem(message=message, hint=hint)
        model = hf_model(self, plan)
        sizes = {"vocab_size": model.vocab_size, "new_weights": model.new_weights} if model else {}
        for name in filter(sizes.get, sizes):
            message = (
                f"the model slot's {name} makes another model, which others do not have to put "
                "the adapter on"
            )
            yield Problem(message=message, hint=hint)

    def run(
        self, ctx: Context, weights: Weights, model: AdaptedModel, trained: TrainedRun | None = None
    ) -> ExportedModel:
        from stages.export.contents import AdapterContents

        contents = AdapterContents(
            source=model, trained=weights, prompt=self.prompt, dtype=self.dtype
        )
        return self._export(ctx, contents, trained)

    def run_dry(
        self, ctx: Context, weights: Weights, model: AdaptedModel, trained: TrainedRun
    ) -> ExportedModel:
        return replace(self, folder=None).run(ctx, weights, model, trained)


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `512MiB`, `1.5 GB`. Raises ValueError."""
    if not text.strip().upper().endswith("B"):
        raise ValueError("a size has a unit, as in 5GB")
    return TypeAdapter(ByteSize).validate_python(text.strip())
