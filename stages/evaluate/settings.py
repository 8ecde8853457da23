"""Fields of evaluate.lm, and its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import Field
from xxhash import xxh3_64_hexdigest

from pipeline import Durable, StageError
from pipeline.utils import parse_json, read_whole, replace_text

Count = Annotated[int, Gt(0)]
WINDOW = 1024
"""Tokens of a window without a setting."""
FILE = "evaluation.json"
"""In the run's folder: slot -> results of its stage."""


@dataclass(frozen=True, kw_only=True)
class EvaluationFields:
    """The texts and tasks to measure, and how."""

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
