"""Each way to tokenise a file: the project's, `datasets`, and the tokenizer in one call.

A way is given a file and an empty folder, and returns the number of tokens without those that
`data.text` puts behind documents, and the seconds of the call at its heart.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers

from pipeline import Context, Data, ModelSource
from pipeline.contracts.metrics import Metrics
from pipeline.distributed.process_group import DistContext
from stages.data.stages import ChatData, TextData

LONG = 1 << 20
"""A `sequence_length` that cuts nothing."""

Found = tuple[int, float]
Way = Callable[[Any, Path, Path], Found]


class TokenizerSource(ModelSource):
    """The part of a model source that a data stage uses."""

    name = "the tokenizer's model"
    fingerprint = "none"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    build = weights = tie = blocks = scorer = save_assets = None  # type: ignore[assignment]


def _run(stage: TextData | ChatData, tokenizer: Any, folder: Path) -> Data:
    """Run a data stage on an empty cache, which also forgets the digests of files."""
    os.environ["XDG_CACHE_HOME"] = str(folder)
    ctx = Context(
        run_dir=folder,
        seed=0,
        dist=DistContext(device=torch.device("cpu")),
        log=logging.getLogger("benchmark"),
        metrics=Metrics(None),
    )
    return stage.run(ctx, TokenizerSource(tokenizer))


def our_text(tokenizer: Any, file: Path, folder: Path) -> Found:
    """Run `data.text`, a .txt file being one document; a token of each is its end."""
    began = time.perf_counter()
    data = _run(TextData(files=str(file), append_eos=False), tokenizer, folder)
    samples = len(data.train)
    last = len(data.train[samples - 1].input_ids)
    return (samples - 1) * 1024 + last + 1, time.perf_counter() - began


def our_chat(tokenizer: Any, file: Path, folder: Path) -> Found:
    """Run `data.chat`, which also finds which tokens are trained on."""
    began = time.perf_counter()
    data = _run(ChatData(files=str(file), sequence_length=LONG), tokenizer, folder)
    tokens = sum(len(data.train[index].input_ids) + 1 for index in range(len(data.train)))
    return tokens, time.perf_counter() - began


def _mapped(file: Path, folder: Path, function: Callable[[Any], Any]) -> Found:
    """Map the rows of a file in batches in two processes; lines of a .txt file are rows."""
    datasets.disable_progress_bars()
    kind = "text" if file.suffix == ".txt" else "json"
    more = {"keep_linebreaks": True} if kind == "text" else {}
    table: Any = datasets.load_dataset(
        kind, data_files=str(file), split="train", cache_dir=str(folder), **more
    )
    began = time.perf_counter()
    mapped = table.map(function, batched=True, num_proc=2, remove_columns=table.column_names)
    seconds = time.perf_counter() - began
    ids = mapped.data.column("input_ids")
    return sum(len(chunk.flatten()) for chunk in ids.chunks), seconds


def mapped_text(tokenizer: Any, file: Path, folder: Path) -> Found:
    """Call the tokenizer by `datasets.map`."""

    def function(batch: Any) -> Any:
        return {"input_ids": tokenizer(batch["text"], verbose=False)["input_ids"]}

    return _mapped(file, folder, function)


def mapped_chat(tokenizer: Any, file: Path, folder: Path) -> Found:
    """Call `apply_chat_template` by `datasets.map`, without a mask."""

    def function(batch: Any) -> Any:
        given = tokenizer.apply_chat_template(
            batch["messages"], tokenizer_kwargs={"verbose": False}
        )
        return {"input_ids": given["input_ids"]}

    return _mapped(file, folder, function)


def _at_once(tokenizer: Any, texts: list[str]) -> Found:
    """Tokenise all texts in one call, in threads, and put their ids into one array."""
    began = time.perf_counter()
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    seconds = time.perf_counter() - began
    return len(np.concatenate([np.array(each.ids, "<u2") for each in encoded])), seconds


def text_at_once(tokenizer: Any, file: Path, folder: Path) -> Found:
    """Tokenise documents, or the lines of a .txt file, by `encode_batch_fast`."""
    lines = file.read_text("utf-8").splitlines(keepends=True)
    if file.suffix != ".txt":
        lines = [json.loads(line)["text"] for line in lines]
    return _at_once(tokenizer, lines)


def chat_at_once(tokenizer: Any, file: Path, folder: Path) -> Found:
    """Render all conversations in this process and tokenise them by `encode_batch_fast`, without
    a mask."""
    rows = [json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines()]
    return _at_once(tokenizer, tokenizer.apply_chat_template(rows, tokenize=False))


OURS, MAPPED, AT_ONCE = "ours", "datasets.map, 2 processes", "encode_batch_fast"
_TEXT: Mapping[str, Way] = {OURS: our_text, MAPPED: mapped_text, AT_ONCE: text_at_once}
_CHAT: Mapping[str, Way] = {OURS: our_chat, MAPPED: mapped_chat, AT_ONCE: chat_at_once}
WAYS: Mapping[str, Mapping[str, Way]] = {"documents": _TEXT, "one file": _TEXT, "chat": _CHAT}
"""Ways by the case's name and their own."""


def load(folder: Path) -> Any:
    """Return the tokenizer in a folder."""
    return transformers.AutoTokenizer.from_pretrained(folder)
