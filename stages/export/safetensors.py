"""The stage `export.safetensors`: the trained weights as a folder that transformers loads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource
from pipeline.contracts.stage import Context, PlanView, ResourceNeed
from pipeline.contracts.tensors import Weights
from pipeline.contracts.training import TrainedRun
from pipeline.errors import Problem


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
        yield from problems(self.folder, self.prompt)

    def run(
        self,
        ctx: Context,
        weights: Weights,
        model: ModelSource,
        trained: TrainedRun | None = None,
    ) -> ExportedModel:
        from stages.export.contents import ModelContents
        from stages.export.run import export
        from stages.export.target import target_of

        contents = ModelContents(
            model,
            weights,
            dtype=self.dtype,
            max_shard_size=parse_size(self.max_shard_size),
            prompt=self.prompt,
        )
        return export(target_of(self.folder, ctx), ctx, contents, trained)

    def resource_needs(self, ctx: Context, model: ModelSource) -> Iterator[ResourceNeed]:
        from stages.export.plan import room

        yield room(self, ctx, model)

    def run_dry(
        self, ctx: Context, weights: Weights, model: ModelSource, trained: TrainedRun
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
        from stages.export.verify import verify

        verify(folder, tell, trust_remote_code=trust_remote_code)


UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `512MiB`, `1.5 GB`. Raises ValueError with a sentence for the user."""
    match = SIZE.fullmatch(text)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size: a number with a unit such as 5GB or 512MiB")
    size = int(float(match[1]) * unit)
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return size


def problems(folder: str | None, prompt: str) -> Iterator[Problem]:
    """Of the fields `folder` and `prompt`."""
    if not prompt.strip():
        yield Problem(message="must not be empty", key="prompt")
    if folder is not None:
        yield from _folder(Path(folder).expanduser())


def _folder(folder: Path) -> Iterator[Problem]:
    from stages.export.target import PARTIAL, foreign

    if folder.name.endswith(PARTIAL):
        yield Problem(
            message=f"`{folder.name}` is what an unfinished export is called",
            key="folder", hint=f"choose a name that does not end in `{PARTIAL}`",
        )  # fmt: skip
    reason = foreign(folder)
    if reason:
        yield Problem(message=reason, key="folder", hint="name a new folder")
