"""The stage `evaluate.lm`: how well the exported model predicts text."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import Field
from xxhash import xxh3_64_hexdigest

from pipeline.contracts.export import ExportedModel
from pipeline.contracts.model import ModelSource
from pipeline.contracts.stage import Context, Durable, PlanView
from pipeline.errors import Problem, StageError
from pipeline.utils.files import replace_text
from stages.data.sources import file_problems

Count = Annotated[int, Gt(0)]
WINDOW = 1024
"""Tokens, if the recipe does not say."""


@dataclass(frozen=True, kw_only=True)
class EvaluateLm:
    """Measure the exported model: its perplexity on text files, and tasks of lm-eval.

    Perplexity is exp(-sum of log p(token | tokens before it) / number of tokens), over the tokens
    of all documents together, each document by itself, so that long ones count for more. A document
    longer than `window` is read in windows that overlap, and each token is scored once, in the
    first window that has it. A document's first token is not scored, unless `prepend_bos` puts one
    before it. `bits_per_byte` is the same sum in bits over the bytes of the text in UTF-8, which
    compares models of different tokenizers; it is left out without scoring first tokens.

    Results go to the screen and to `evaluation.json` in the run's folder. The model is loaded in
    the dtype of the export by rank 0 alone, while other ranks wait: on a machine with GPUs spread
    over those that it sees and, where they are too small, host memory; else in host memory. It
    takes the size of the export, and the logits of `batch_size` windows in fp32: `batch_size` x
    `window` x vocabulary x 4 bytes, up to three times.
    """

    files: str | tuple[str, ...] = ()
    """Paths or glob patterns of .txt, .jsonl, .json (one object a line) or .parquet files whose
    perplexity to measure; all but the last also with .gz."""

    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Key or column of the text in JSON and Parquet rows."""

    documents: Literal["file", "line"] = "file"
    """What one document of a .txt file is: the whole file, or every line that is not blank."""

    prepend_bos: bool = False
    """Put the tokenizer's start token before every document."""

    window: Annotated[int, Ge(2)] | None = None
    """Tokens that the model reads at once, at most what its positions allow; null: 1024, or those
    if they are fewer."""

    stride: Count | None = None
    """Tokens from the start of one window to that of the next. The fewer, the more context a token
    has, and the more is computed. null: half of `window`."""

    batch_size: Count = 1
    """Windows, or examples of a task, of one forward pass."""

    tasks: tuple[str, ...] = ()
    """Names of lm-eval tasks (EleutherAI's lm-evaluation-harness), which fetches their data."""

    task_folder: str | None = None
    """Folder with definitions of further tasks, in lm-eval's YAML."""

    num_fewshot: Annotated[int, Ge(0)] | None = None
    """Examples in the prompt of a task; null takes what each task says."""

    limit: Count | None = None
    """Examples of each task; null takes all."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if not self.files and not self.tasks:
            yield Problem(key="files", message="nothing to measure", hint="give files or tasks")
        if self.files:
            yield from file_problems("files", self.files)
        window = self.window or WINDOW
        if self.stride is not None and self.stride > window:
            yield Problem(
                key="stride",
                message=f"{self.stride} leaves out tokens between windows of {window}",
                hint="at most as many as window",
            )
        if self.tasks and importlib.util.find_spec("lm_eval") is None:
            yield Problem(
                key="tasks",
                message="needs the package lm_eval, which is not installed",
                hint="pip install 'pipetrain[evaluate]'",
            )
        if self.task_folder is not None and not Path(self.task_folder).expanduser().is_dir():
            yield Problem(key="task_folder", message=f"no such folder: {self.task_folder}")
        if not self.tasks:
            for key in ("task_folder", "num_fewshot", "limit"):
                if getattr(self, key) is not None:
                    yield Problem(key=key, message="only means something with tasks")

    def run(self, ctx: Context, exported: ExportedModel, model: ModelSource) -> EvaluatedModel:
        from stages.evaluate.run import evaluate

        return evaluate(self, ctx, exported, model)

    def run_dry(self, ctx: Context, exported: ExportedModel, model: ModelSource) -> EvaluatedModel:
        from stages.evaluate.run import evaluate

        return evaluate(self, ctx, exported, model, briefly=True)


FILE = "evaluation.json"
"""In the run's folder: slot -> what its stage has measured."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel(Durable):
    """What was measured of an exported model."""

    file: Path
    """Where it is written down, under the slot's name."""
    slot: str
    results: Mapping[str, Any]
    """JSON."""

    def save(self) -> None:
        """Write the results beside those of other slots (rank 0)."""
        known = _read(self.file) | {self.slot: dict(self.results)}
        replace_text(self.file, json.dumps(known, indent=1, allow_nan=False) + "\n")

    def record(self) -> dict[str, Any]:
        return {"file": str(self.file), "slot": self.slot, "sum": _sum(self.results)}

    @classmethod
    def restore(cls, record: Mapping[str, Any]) -> EvaluatedModel:
        file, slot = Path(record["file"]), record["slot"]
        known = _read(file)
        if slot not in known:
            raise StageError(f"the evaluation is gone: {file} has nothing of slot `{slot}`")
        if record.get("sum") not in (None, _sum(known[slot])):  # earlier versions recorded none
            raise StageError(f"{file}: slot `{slot}` has other results than were measured")
        return cls(file=file, slot=slot, results=known[slot])


def _sum(results: Mapping[str, Any]) -> str:
    return xxh3_64_hexdigest(json.dumps(results, sort_keys=True).encode())


def _read(file: Path) -> dict[str, Any]:
    """Empty where there is none, or none that can be read."""
    try:
        known = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
