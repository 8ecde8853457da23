"""A function of batches, computed by several processes, with the result of one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from pipeline.errors import StageError
from pipeline.launch.children import die_with
from pipeline.machine import cores_each

T = TypeVar("T")
R = TypeVar("R")

_AHEAD = 3
"""Batches under way for each process."""
_function: Callable[[Any], Any]
"""What this process, forked for it, computes."""


def each(
    function: Callable[[T], R], batches: Iterable[T], workers: int | None
) -> Iterator[tuple[T, R]]:
    """Each batch with `function` of it, in order, whatever finished first.

    `workers` processes (None: one a core) are forked when there is a second batch; `function` need
    not be picklable, its arguments and results must be. Raises what `function` raises for the first
    batch that it fails on, and StageError when a process is killed.
    """
    rest = iter(batches)
    for first in rest:  # here, because most mistakes show at once, and little data needs no help
        yield first, function(first)
        break
    count = workers or cores_each(1)
    if count == 1:
        yield from ((batch, function(batch)) for batch in rest)
        return
    for second in rest:
        yield from _forked(function, _chain(second, rest), count)


def _chain(first: T, rest: Iterator[T]) -> Iterator[T]:
    yield first
    yield from rest


def _forked(function: Callable[[T], R], batches: Iterator[T], count: int) -> Iterator[tuple[T, R]]:
    # Forked, so that a tokenizer with code of its own needs no import there. The children compute
    # on the CPU and touch neither threads nor devices of this process.
    pool = ProcessPoolExecutor(
        count, multiprocessing.get_context("fork"), _begin, (function, os.getpid())
    )
    under_way: deque[tuple[T, Future[R]]] = deque()
    stopped: list[StageError] = []
    try:
        for batch in _until(stopped, batches):
            with _killed():
                under_way.append((batch, pool.submit(_call, batch)))
            if len(under_way) >= count * _AHEAD:
                yield _finished(*under_way.popleft())
        while under_way:  # what is wrong in an earlier batch comes before what stopped `batches`
            yield _finished(*under_way.popleft())
    finally:
        pool.shutdown(cancel_futures=True)
    if stopped:
        raise stopped[0]


def _until(stopped: list[StageError], batches: Iterator[T]) -> Iterator[T]:
    """The batches up to the error that stops them, which goes into `stopped`."""
    try:
        yield from batches
    except StageError as error:
        stopped.append(error)


def _finished(batch: T, future: Future[R]) -> tuple[T, R]:
    with _killed():
        return batch, future.result()


@contextlib.contextmanager
def _killed() -> Iterator[None]:
    """A pool that lost a process says so wherever it is asked next."""
    try:
        yield
    except BrokenProcessPool as error:
        raise StageError(
            "a process that tokenises was killed",
            hint="if memory was short, set fewer `workers`",
        ) from error


def _begin(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    die_with(parent)
    # Its threads did not survive the fork; without this it would say so.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _function = function


def _call(batch: Any) -> Any:
    return _function(batch)
