"""Tokenising in several processes, and what a tokenizer puts before a text."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import DataError, StageError
from stages.data import documents, tokenize
from stages.data.tokenize import start_ids
from tests.stages.data.conftest import Chats


class Spare:
    """A tokenizer with few ids, which puts 1 before a text and 2 after it."""

    def __init__(self, known: str) -> None:
        self.known = known

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        plain = [10 + self.known.index(letter) for letter in text if letter in self.known]
        return {"input_ids": [1, *plain, 2] if add_special_tokens else plain}


def test_what_is_put_after_a_text_is_never_put_before_it() -> None:
    assert start_ids(Spare("01"), None) == [1]
    with pytest.raises(StageError, match="cannot be found"):
        start_ids(Spare("xyz"), None)


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


def test_the_bytes_are_those_of_one_process(
    chats: Chats, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_BATCH", 7)
    chat = [
        {"messages": [{"role": "user", "content": "x" * (i % 17)},
                      {"role": "assistant", "content": f"{i}", "train": i % 5 != 0}]}
        for i in range(500)
    ]  # fmt: skip
    texts = [f"{i} and {i + 1}" for i in range(500)]
    for run, rows in ((chats.run, chat), (chats.text, texts)):
        found, prints = [], []
        for workers in (1, 3):
            cache = tmp_path / f"{run.__name__}-{workers}"
            prints.append(run(*rows, cache=str(cache), workers=workers).fingerprint)
            (entry,) = cache.iterdir()
            found.append({path.name: path.read_bytes() for path in entry.iterdir()})
        assert found[0] == found[1]
        assert prints[0] == prints[1]
