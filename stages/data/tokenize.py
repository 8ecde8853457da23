"""A function of batches, computed by several processes, with the result of one."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.contracts.model import ModelSource
from pipeline.errors import StageError
from pipeline.hardware.host import cores_each
from pipeline.utils.process_tree import die_with
from stages.data.cache import digest

if TYPE_CHECKING:
    import logging


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


LOG_SECONDS = 10.0


@dataclass(kw_only=True)
class Reading:
    """How far through its source a reader has come. Sizes are bytes of files, or rows of a hub
    data set."""

    total: int = 0
    """Size of the whole source; 0 when that is not known."""
    _before: int = field(default=0, init=False)
    _size: int = field(default=0, init=False)
    _position: Callable[[], int] = field(default=lambda: 0, init=False)

    def enter(self, size: int, position: Callable[[], int]) -> None:
        """Begin a part of this size, in which `position` tells how far reading has come."""
        self._before += self._size
        self._size, self._position = size, position

    def fraction(self) -> float | None:
        """The part that is read, 0 to 1; None when that is not known."""
        if not self.total:
            return None
        return min(1.0, (self._before + self._position()) / self.total)


@dataclass(kw_only=True)
class Announcer:
    """Says every few seconds how far tokenising has come."""

    log: logging.Logger
    reading: Reading
    unit: str
    """What is counted: `rows`, `documents`."""
    seconds: float = LOG_SECONDS
    _began: float = field(init=False)
    _spoken: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self._spoken = time.monotonic()

    def tell(self, count: int, tokens: int) -> None:
        """Say it if it is time: `count` units with `tokens` tokens are done."""
        now = time.monotonic()
        if now - self._spoken < self.seconds:
            return
        self._spoken = now
        fraction = self.reading.fraction()
        self.log.info(
            "tokenising: %d %s, %d tokens, %.0f %s/s%s",
            count,
            self.unit,
            tokens,
            count / max(now - self._began, 1e-9),
            self.unit,
            "" if fraction is None else f", {fraction:.0%} read",
        )


def identity(tokenizer: Any) -> str:
    """Hex digest of everything that decides which ids a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = sorted(tokenizer.get_vocab().items())
    else:
        state = json.loads(backend.to_str())
        # Left over from the last call, not part of what the tokenizer is.
        state.pop("truncation", None)
        state.pop("padding", None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest([type(tokenizer).__name__, state, special])


def id_dtype(tokenizer: Any, vocab_size: int = 0) -> str:
    """The little-endian dtype that holds every id of the tokenizer, and those below `vocab_size`
    that rows of ids may have."""
    largest = max(max(tokenizer.get_vocab().values()), vocab_size - 1)
    return "<u2" if largest < 1 << 16 else "<u4"


def pad_id(tokenizer: Any) -> int:
    """The padding token's id, else the end token's, else 0."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def required_id(tokenizer: Any, name: str, field: str) -> int:
    """The id of `bos_token` or `eos_token`, which `field` asks for; StageError if there is none."""
    token = getattr(tokenizer, f"{name}_id")
    if token is None:
        raise StageError(f"the tokenizer has no {name}", hint=f"set `{field}: false`")
    return int(token)


def start_ids(tokenizer: Any, prepend_bos: bool | None) -> list[int]:
    """Ids that a text begins with: the start token or none, as the field says; null: those that the
    tokenizer's own call puts before a text. Raises StageError when there is no start token, or when
    it cannot be told from the call."""
    if prepend_bos is not None:
        return [required_id(tokenizer, "bos_token", "prepend_bos")] if prepend_bos else []
    for text in ("a", "A", "1", "."):  # which of them a tokenizer has ids for is not known
        called = list(tokenizer(text)["input_ids"])
        plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        places = range(len(called) - len(plain) + 1)
        start = next((k for k in places if called[k : k + len(plain)] == plain), None)
        if start is not None and (plain or not called):
            return called[:start]
    raise StageError(
        "what the tokenizer puts before a text cannot be told", hint="set `prepend_bos`"
    )


def check_ids(model: ModelSource, largest: int) -> None:
    """Raise StageError when the data holds an id beyond the model's embedding."""
    if largest >= model.vocab_size:
        raise StageError(
            f"the tokenizer made id {largest}, but {model.name} embeds {model.vocab_size} tokens",
            hint="this tokenizer belongs to another model",
        )
