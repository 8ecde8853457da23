"""The stage `evaluate.lm`: how well the exported model predicts text."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import Field
from xxhash import xxh3_64_hexdigest

from pipeline import (
    Context,
    Durable,
    ExportedModel,
    ModelSource,
    PlanView,
    Problem,
    StageError,
    UsageError,
)
from pipeline.utils import (
    expanded,
    parse_json,
    pins_asked,
    read_whole,
    replace_text,
    require_code_trust,
)
from stages.data.sources import file_problems

Count = Annotated[int, Gt(0)]
WINDOW = 1024
"""Tokens of a window without a setting."""
FILE = "evaluation.json"
"""In the run's folder: slot -> results of its stage."""
BRIEF = 2
"""Windows that a dry run scores."""


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel(Durable):
    """The results of evaluating an exported model."""

    file: Path
    """The JSON file that holds them, under the slot's name."""
    slot: str
    results: Mapping[str, Any]
    """JSON."""

    def save(self) -> None:
        """Write the results next to other slots' results (rank 0)."""
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
    """The results in a file by slot; empty if it cannot be read."""
    try:
        known = parse_json(read_whole(file, within=file.parent))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


@dataclass(frozen=True, kw_only=True)
class EvaluateLm:
    """Measure the exported model: its perplexity on text files, and tasks of lm-eval.

    Perplexity is exp(-sum of log p(token | tokens before it) / number of tokens), over the tokens
    of all documents together, so that long documents count for more. A document longer than
    `window` is read in windows that overlap, and each token is scored once, in the first window
    that has it. A document's first token is not scored, unless `prepend_bos` puts one before it;
    then `bits_per_byte` is the same sum in bits over the bytes of the text in UTF-8, which compares
    models of different tokenizers.

    Results go to the screen and to `evaluation.json` in the run's folder. Only rank 0 loads the
    model in the dtype of the export, while other ranks wait: on a machine with GPUs spread over
    all visible ones and, where they are too small, host memory; else in host memory. Memory: the
    size of the export, and up to three times `batch_size` x `window` x vocabulary x 4 bytes.
    """

    files: str | tuple[str, ...] = ()
    """Paths or glob patterns of the files to measure perplexity on: .txt, .jsonl, .json (one object
    a line), also with .gz, or .parquet."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Key or column of the text in JSON and Parquet rows."""
    documents: Literal["file", "line"] = "file"
    """The documents of a .txt file: the whole file, or every line that is not blank."""
    prepend_bos: bool = False
    """Put the tokenizer's start token before every document."""
    window: Annotated[int, Ge(2)] | None = None
    """Tokens that the model reads at once, at most its number of positions; null: 1024, or that
    number if it is smaller."""
    stride: Count | None = None
    """Tokens from the start of one window to the start of the next. A smaller stride adds context
    to each token and takes more time. null: half of `window`."""
    batch_size: Count = 1
    """Windows, or examples of a task, of one forward pass."""
    tasks: tuple[str, ...] = ()
    """Names of lm-eval tasks (EleutherAI's lm-evaluation-harness), which fetches their data,
    at no commit: with `--pinned` only tasks that `task_folder` defines are accepted."""
    task_folder: str | None = None
    """Folder with definitions of further tasks, in lm-eval's YAML. That is code: it imports the
    functions that it names, and its templates are not in a sandbox. So it takes
    --trust-remote-code."""
    num_fewshot: Annotated[int, Ge(0)] | None = None
    """Examples in the prompt of a task; null takes each task's own number."""
    limit: Count | None = None
    """Examples of each task; null takes all."""

    def check(self, plan: PlanView) -> Iterator[Problem]:
        if not self.files and not self.tasks:
            yield Problem(key="files", message="nothing to measure", hint="give files or tasks")
        if self.files:
            yield from file_problems("files", self.files)
        window = self.window or WINDOW
        if self.stride is not None and self.stride > window:
            message = f"{self.stride} leaves out tokens between windows of {window}"
            yield Problem(key="stride", message=message, hint="set a stride of at most window")
        if self.tasks and importlib.util.find_spec("lm_eval") is None:
            message = "needs the package lm_eval, which is not installed"
            yield Problem(key="tasks", message=message, hint="pip install 'pipetrain[evaluate]'")
        folder = None if self.task_folder is None else expanded(self.task_folder)
        if pins_asked():
            files = [] if folder is None else [*folder.rglob("*.yaml")]
            text = "\n".join(file.read_text("utf-8", "replace") for file in files if file.is_file())
            own = re.findall(r"^(?:task|group|tag):\s*[\"']?([^\s\"'#]+)", text, re.MULTILINE)
            if fetched := [task for task in self.tasks if task not in own]:
                message = f"lm-eval names no commit of the data of {', '.join(fetched)}"
                hint = "define it in `task_folder` with a `revision` in its `dataset_kwargs`"
                yield Problem(key="tasks", message=message, hint=hint)
        if folder is not None and not folder.is_dir():
            yield Problem(key="task_folder", message=f"no such folder: {self.task_folder}")
        else:
            try:
                self._require_trust()
            except UsageError as error:
                yield Problem(key="task_folder", message=str(error))
        for key in ("task_folder", "num_fewshot", "limit"):
            if not self.tasks and getattr(self, key) is not None:
                yield Problem(key=key, message="has no effect without tasks")

    def run(self, ctx: Context, exported: ExportedModel, model: ModelSource) -> EvaluatedModel:
        self._require_trust()
        return self._evaluate(ctx, exported, model, briefly=False)

    def run_dry(self, ctx: Context, exported: ExportedModel, model: ModelSource) -> EvaluatedModel:
        return self._evaluate(ctx, exported, model, briefly=True)

    def _evaluate(
        self, ctx: Context, exported: ExportedModel, model: ModelSource, *, briefly: bool
    ) -> EvaluatedModel:
        """Measure on rank 0 (collective). `briefly` takes a few windows and no task."""
        from stages.evaluate import run

        results: dict[str, Any] = {"model": str(exported.folder)}
        if ctx.dist.is_main:
            on_gpu = ctx.dist.device.type == "cuda"
            loaded = run.load(exported.folder, model, on_gpu=on_gpu)
            if self.files:
                results["text"] = run.measure_files(
                    loaded, model, self.files, text_key=self.text_key, unit=self.documents,
                    prepend_bos=self.prepend_bos, window=self.window, usual=WINDOW,
                    stride=self.stride, batch_size=self.batch_size,
                    most=BRIEF if briefly else None,
                )  # fmt: skip
                ctx.log.info("%s", _shown(results["text"]))
            if self.tasks and not briefly:
                results["tasks"] = run.run_tasks(
                    loaded, model.tokenizer(), self.tasks, folder=self.task_folder,
                    batch_size=self.batch_size, num_fewshot=self.num_fewshot, limit=self.limit,
                )  # fmt: skip
                for task, numbers in results["tasks"].items():
                    ctx.log.info("%s: %s", task, _shown(numbers))
        text = json.dumps(results) if ctx.dist.is_main else None
        results = json.loads(ctx.dist.broadcast_str(text))
        found = EvaluatedModel(
            file=ctx.run_dir / FILE, slot=ctx.slot or "evaluate", results=results
        )
        if ctx.dist.is_main:
            found.save()
        return found

    def _require_trust(self) -> None:
        """Raise UsageError unless what the task folder makes lm-eval run may run."""
        if self.task_folder is not None:
            require_code_trust(f"the tasks in {self.task_folder}")


def _shown(numbers: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in numbers.items()
    )
