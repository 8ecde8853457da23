"""The stage `export.adapter`: the trained adapter alone, as peft loads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource
from pipeline.contracts.stage import Context, PlanView
from pipeline.contracts.tensors import Weights
from pipeline.contracts.training import TrainedRun
from pipeline.errors import Problem
from stages.adapter.lora import AdaptedModel
from stages.export import safetensors


@dataclass(frozen=True, kw_only=True)
class ExportAdapter:
    """Write the trained adapter without the model, in peft's layout, then prove that peft loads it
    onto the model and computes the same.

    The model with the adapter merged into it is what `export.safetensors` writes.
    """

    folder: str | None = None
    """Where the adapter goes; the run's folder `export` when not set. An earlier export there is
    replaced once the new one is proven; anything else there is refused."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of the weights in the file. An adapter is small, so it can keep what was trained."""
    prompt: str = "The quick brown fox jumps over the lazy dog."
    """Text on which the logits of the loaded and the trained model are compared. Without a
    tokenizer, fixed token ids are used."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        yield from safetensors.problems(self.folder, self.prompt)
        for model in plan.giving(ModelSource):
            for name in ("vocab_size", "new_weights"):
                if getattr(model, name, None):
                    yield Problem(
                        message=f"the model slot's {name} makes another model, which others do not "
                        "have to put the adapter on",
                        hint="use export.safetensors",
                    )

    def run(
        self,
        ctx: Context,
        weights: Weights,
        model: AdaptedModel,
        trained: TrainedRun | None = None,
    ) -> ExportedModel:
        from stages.export.adapter_contents import AdapterContents
        from stages.export.run import export
        from stages.export.target import target_of

        contents = AdapterContents(model, weights, dtype=self.dtype, prompt=self.prompt)
        return export(target_of(self.folder, ctx), ctx, contents, trained)

    def run_dry(
        self, ctx: Context, weights: Weights, model: AdaptedModel, trained: TrainedRun
    ) -> ExportedModel:
        from stages.export.target import dry_run_folder

        elsewhere = dry_run_folder(self.folder, ctx)
        return replace(self, folder=elsewhere).run(ctx, weights, model, trained)

    def verify_result(self, exported: ExportedModel) -> None:
        """Every file has the checksum that it was written with. Raises ExportError."""
        from stages.export.verify import prove_whole

        prove_whole(exported.folder, lambda proven: None, alone=False)

    @classmethod
    def verify(
        cls, folder: Path, tell: Callable[[str], object], *, trust_remote_code: bool
    ) -> None:
        """What `pipe verify` does with a folder that this stage has written. Raises ExportError."""
        from stages.export.adapter_contents import verify

        verify(folder, tell, trust_remote_code=trust_remote_code)
