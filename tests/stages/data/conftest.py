from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from pipeline import NO_TARGET, Context, Data, Sample, StageError
from pipeline.contracts.metrics import Metrics
from pipeline.distributed.process_group import DistContext
from stages.data.stages import ChatData, TextData
from tests.stages.data.fakes import PLAIN, FakeSource


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return Context(
        run_dir=tmp_path,
        seed=0,
        dist=DistContext(device=torch.device("cpu")),
        log=logging.getLogger("test"),
        metrics=Metrics(None),
    )


class Chats:
    """Runs `data.chat` on rows (objects, or lines as they are) in a folder."""

    def __init__(self, folder: Path, ctx: Context) -> None:
        self.folder, self.ctx = folder, ctx

    def stage(self, *rows: Any, name: str = "a.jsonl", **fields: Any) -> ChatData:
        file = self.folder / name
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
        elif name.endswith(".json"):
            file.write_text(json.dumps(rows))
        elif rows:
            lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
            file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        given = {"files": str(file), "cache": str(self.folder / "cache"), **fields}
        return ChatData(**given)

    def run(
        self,
        *rows: Any,
        source: FakeSource | None = None,
        chat_template: Any = PLAIN,
        **fields: Any,
    ) -> Data:
        source = source or FakeSource(chat_template)
        return self.stage(*rows, **fields).run(self.ctx, source)

    def text(self, *documents: str, source: FakeSource | None = None, **fields: Any) -> Data:
        rows = ({"text": document} for document in documents)
        stage = self.stage(*rows, name="d.jsonl")
        given = {"files": stage.files, "cache": stage.cache, **fields}
        return TextData(**given).run(self.ctx, source or FakeSource())

    def texts(self, *rows: Any, **fields: Any) -> list[str]:
        """Return the input of each sample as text."""
        samples = self.run(*rows, **fields).train
        return [decoded(samples[index].input_ids) for index in range(len(samples))]

    def trained(self, *rows: Any, **fields: Any) -> list[list[str]]:
        """Return the texts that are trained on in each sample."""
        samples = self.run(*rows, **fields).train
        indices = range(len(samples))
        return [[decoded(run) for run in runs(samples[index])] for index in indices]

    def error(self, *rows: Any, **fields: Any) -> str:
        """Return the message without the folder."""
        with pytest.raises(StageError) as caught:
            self.run(*rows, **fields)
        return str(caught.value).replace(f"{self.folder}/", "")


@pytest.fixture
def chats(tmp_path: Path, ctx: Context) -> Chats:
    return Chats(tmp_path, ctx)


fake_source = functools.cache(FakeSource)


def decoded(ids: Any) -> str:
    return str(fake_source().fast.decode(ids))


def runs(sample: Sample) -> Iterator[list[int]]:
    run: list[int] = []
    for label in [*sample.labels.tolist(), NO_TARGET]:
        if label != NO_TARGET:
            run.append(label)
        elif run:
            yield run
            run = []


def trained_ids(sample: Sample) -> list[int]:
    return [int(label) for label in sample.labels if label != NO_TARGET]
