"""Tokenising in several processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.contracts.stage import Context
from pipeline.errors import DataError, StageError
from stages.data import documents, tokenize
from stages.data.chat import ChatData
from stages.data.text import TextData
from tests.stages.data.fakes import FakeSource


def test_results_come_in_order_from_other_processes() -> None:
    def square(number: int) -> tuple[int, int]:
        return number * number, os.getpid()

    found = list(tokenize.map_batches(square, range(50), 3))
    assert [(batch, result[0]) for batch, result in found] == [(n, n * n) for n in range(50)]
    pids = [result[1] for _, result in found]
    assert pids[0] == os.getpid()
    assert os.getpid() not in pids[1:]
    assert len(set(pids[1:])) <= 3


def test_workers_are_as_many_as_cores_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.hardware.host.usable_cores", lambda: 1.5)
    found = list(tokenize.map_batches(lambda batch: os.getpid(), [7, 8, 9], None))
    assert {pid for _, pid in found} == {os.getpid()}


def test_one_batch_or_one_worker_needs_no_process() -> None:
    for batches, workers in (([7], 4), ([7, 8, 9], 1), ([], 4)):
        found = list(tokenize.map_batches(lambda batch: os.getpid(), batches, workers))
        assert [result for _, result in found] == [os.getpid()] * len(batches)


def failing_at(*bad: int) -> Any:
    def work(number: int) -> int:
        if number in bad:
            raise DataError("broken", file="f", row=number, hint="mend it")
        return number

    return work


def test_an_error_keeps_its_class_and_its_words() -> None:
    with pytest.raises(DataError) as caught:
        list(tokenize.map_batches(failing_at(9, 5), range(20), 2))
    assert str(caught.value) == "f:5: broken (mend it)"


def test_a_killed_process_is_no_hang() -> None:
    def die(number: int) -> int:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(StageError, match=r"was killed \(if memory was short, set fewer `workers`"):
        list(tokenize.map_batches(die, range(20), 2))


def test_a_process_that_ends_while_a_slow_source_is_read() -> None:
    """The pool must know that it is broken before it gets the next batch."""

    def slow() -> Iterator[int]:
        yield from range(3)
        time.sleep(0.5)
        yield 3

    def leave(number: int) -> int:
        if number == 2:
            os._exit(1)
        return number

    with pytest.raises(StageError, match="a process that tokenises was killed"):
        list(tokenize.map_batches(leave, slow(), 2))


def files_of(cache: Path) -> dict[str, bytes]:
    (entry,) = cache.iterdir()
    return {path.name: path.read_bytes() for path in entry.iterdir()}


def test_the_bytes_are_those_of_one_process(
    ctx: Context, source: FakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "x" * (i % 17)},
                      {"role": "assistant", "content": f"{i}", "train": i % 5 != 0}]}
        for i in range(500)
    ]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{i} and {i + 1}"}) + "\n" for i in range(500)))
    monkeypatch.setattr(documents, "_BATCH", 7)
    for stage in (ChatData(files=str(file)), TextData(files=str(texts))):
        found, prints = [], []
        for workers in (1, 3):
            cache = tmp_path / f"{type(stage).__name__}-{workers}"
            made = dataclasses.replace(stage, cache=str(cache), workers=workers)
            prints.append(made.run(ctx, source).fingerprint)
            found.append(files_of(cache))
        assert found[0] == found[1]
        assert prints[0] == prints[1]
