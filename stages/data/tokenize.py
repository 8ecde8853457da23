"""Texts as ids: what a tokenizer puts around them, the characters of each token, and batches that
several processes tokenise in order."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import multiprocessing
import os
import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline import ModelSource, StageError
from pipeline.hardware import cores_each
from pipeline.utils import die_with
from stages.data.tokenizer_compat import backend, token_sizes
from stages.digests import digest

T = TypeVar("T")
R = TypeVar("R")
Span = tuple[int, int]
"""Start and end of a range of characters."""
TOKENISING = "tokenising"
"""Name of the activity."""
FORMATTED = "with their own begin or end token, which got no second one"
"""A note on rows or documents."""


def tokenizer_identity(tokenizer: Any) -> str:
    """Return the hex digest of everything that decides which ids a text becomes."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        state: Any = sorted(tokenizer.get_vocab().items())
    else:
        state = json.loads(fast.to_str())
        for left_by_the_last_call in ("truncation", "padding"):
            state.pop(left_by_the_last_call, None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return digest([type(tokenizer).__name__, state, special])


def id_dtype(tokenizer: Any, vocab_size: int = 0) -> str:
    """Return the little-endian dtype of a tokenizer's ids and those below `vocab_size`."""
    largest = max(max(tokenizer.get_vocab().values()), vocab_size - 1)
    return "<u2" if largest < 1 << 16 else "<u4"


def pad_id(tokenizer: Any) -> int:
    """Return the padding token's id, else the end token's, else 0."""
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in known if token is not None)


def required_id(tokenizer: Any, name: str, field: str) -> int:
    """Return the id of `bos_token` or `eos_token`. Raises StageError, which names the field."""
    token = getattr(tokenizer, f"{name}_id")
    if token is None:
        raise StageError(f"the tokenizer has no {name}", hint=f"set `{field}: false`")
    return int(token)


def start_ids(tokenizer: Any, prepend_bos: bool | None) -> list[int]:
    """Return the ids to put before a text: the start token if `prepend_bos`; if it is None, the ids
    that the tokenizer's own call puts there. Raises StageError if there is no start token, or if
    the call does not show them."""
    if prepend_bos is not None:
        return [required_id(tokenizer, "bos_token", "prepend_bos")] if prepend_bos else []
    for text in ("a", "A", "1", "."):  # a tokenizer may lack ids for some of them
        called = list(tokenizer(text)["input_ids"])
        plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        places = range(len(called) - len(plain) + 1)
        start = next((k for k in places if called[k : k + len(plain)] == plain), None)
        if start is not None and (plain or not called):
            return called[:start]
    message = "the ids that the tokenizer puts before a text cannot be found"
    raise StageError(message, hint="set `prepend_bos`")


def check_ids(model: ModelSource, largest: int) -> None:
    """Raise StageError if the data holds an id beyond the model's embedding."""
    if largest >= model.vocab_size:
        size = len(model.tokenizer())
        raise StageError(
            f"the tokenizer made id {largest}, but {model.name} embeds {model.vocab_size} tokens",
            hint=f"this tokenizer belongs to another model; a new one needs `vocab_size: {size}` "
            "in its `config`",
        )


def plain_ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, without special tokens that it does not spell."""
    fast = backend(tokenizer)
    if fast is not None:  # which need not find the characters of the tokens
        return [each.ids for each in fast.encode_batch_fast(texts, add_special_tokens=False)]
    encoded = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # no warning that a text is longer than the model's context
    )
    return list(encoded["input_ids"])


@dataclass(frozen=True)
class TextTokens:
    """A text's ids (int64, shape (length,)), and the start and end of the characters of each token
    (int64, shape (length, 2))."""

    ids: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def inside(self, spans: list[Span]) -> NDArray[np.bool_]:
        """Return which tokens share a character with one of the spans; shape (length,)."""
        inside = np.zeros(len(self.bounds), dtype=bool)
        for start, end in spans:
            inside |= (self.bounds[:, 0] < end) & (self.bounds[:, 1] > start)
        return inside


class TextTokenizer:
    """A fast tokenizer that reports the characters of each token."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._sizes = tokenizer, token_sizes(tokenizer)
        known = tokenizer.added_tokens_decoder
        special = {index: str(token) for index, token in known.items() if token.special}
        self.special_ids = list(special)
        texts = sorted(special.values(), key=len, reverse=True)
        self.spelled = re.compile("|".join(map(re.escape, texts)) or "(?!)")  # never matches
        """Matches the text of any special token."""

    def __call__(self, texts: list[str]) -> list[TextTokens]:
        """Tokenise texts that contain their special tokens already."""
        found: list[TextTokens | None] = [None] * len(texts)
        if self._sizes is not None:
            found = list(map(self._counted, texts, plain_ids(self.tokenizer, texts)))
        rest = iter(self._reported([t for t, one in zip(texts, found, strict=True) if not one]))
        return [one or next(rest) for one in found]

    def _counted(self, text: str, given: list[int]) -> TextTokens | None:
        """Return a text's tokens by their sizes, as the tokenizer reports them but in less time;
        None if it changes this text, leaves out a part of it, or makes a token of unknown size."""
        assert self._sizes is not None
        known, form = self._sizes
        if form and not unicodedata.is_normalized(form, text):  # type: ignore[arg-type]
            return None
        ids, raw = np.array(given, np.int64), text.encode()
        sizes = known[ids]
        ends = np.cumsum(sizes)
        starts = ends - sizes
        if (ends[-1] if len(ids) else 0) != len(raw):
            return None
        if len(raw) == len(text):
            return TextTokens(ids, np.stack([starts, ends], axis=1))
        begins = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80  # the other bytes continue one
        character = np.cumsum(begins) - 1
        return TextTokens(ids, np.stack([character[starts], character[ends - 1] + 1], axis=1))

    def _reported(self, texts: list[str]) -> Iterator[TextTokens]:
        """Yield the tokens of each text with the characters that the tokenizer reports."""
        fast = backend(self.tokenizer)
        call = functools.partial(
            self.tokenizer, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        found: Iterable[tuple[list[int], list[Span]]]
        if fast is None:
            found = ((each["input_ids"], each["offset_mapping"]) for each in map(call, texts))
        else:
            encoded = fast.encode_batch(texts, add_special_tokens=False)
            found = ((each.ids, each.offsets) for each in encoded)
        for ids, reported in found:
            flat = np.fromiter(itertools.chain.from_iterable(reported), np.int64, 2 * len(reported))
            starts, ends = flat[::2], flat[1::2]
            # Some tokenizers leave white space out of the offsets; it belongs to the next token.
            reached = np.concatenate([[0], np.maximum.accumulate(ends)])[: len(ends)]
            bounds = np.stack([np.minimum(starts, reached), ends], axis=1)
            yield TextTokens(np.array(ids, dtype=np.int64), bounds)

    def spelled_in(self, value: Any) -> str | None:
        """Return the first special token that a text within `value` spells out, if any does."""
        left = [value]
        while left:
            value = left.pop()
            if isinstance(value, str) and (match := self.spelled.search(value)):
                return match.group()
            if isinstance(value, dict | list):
                left += reversed(value.values() if isinstance(value, dict) else value)
        return None


_AHEAD = 3
"""Batches under way for each process."""
_function: Callable[[Any], Any]
"""Function of this worker process."""
_thread: ThreadPoolExecutor
"""Thread of this worker process that calls it."""


def map_batches(
    function: Callable[[T], R], batches: Iterable[T], workers: int | None
) -> Iterator[tuple[T, R]]:
    """Yield each batch with its result, in order. `workers` processes (None: one a core) are forked
    when there is a second batch; `function` need not be picklable, its arguments and results must
    be. Raises the error of `function` for the first batch that it fails on, and StageError when a
    process is killed."""
    rest, count = iter(batches), workers or cores_each(1)
    # The first here, because most mistakes show at once, and little data needs no help.
    for batch in itertools.islice(rest, 1 if count > 1 else None):
        yield batch, function(batch)
    second = list(itertools.islice(rest, 1))
    if not second:
        return
    # Forked, so that a tokenizer's own code needs no import there. The children compute
    # on the CPU and touch neither threads nor devices of this process.
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(count, fork, _begin, (function, os.getpid()))
    under_way: deque[tuple[T, Future[R]]] = deque()
    try:
        for batch in itertools.chain(second, rest):
            under_way.append((batch, pool.submit(_call, batch)))
            if len(under_way) >= count * _AHEAD:
                first, future = under_way.popleft()
                yield first, future.result()
        for first, future in under_way:
            yield first, future.result()
    except BrokenProcessPool as error:
        message = "a process that tokenises was killed"
        raise StageError(message, hint="if memory was short, set fewer `workers`") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(function: Callable[[Any], Any], parent: int) -> None:
    global _function, _thread
    die_with(parent)
    # Its threads did not survive the fork; without this it warns about that.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A thread has its own memory to allocate from, which is not fragmented by all that has been
    # imported; a tokenizer allocates for every word, and takes a fifth less time with it.
    _function, _thread = function, ThreadPoolExecutor(1)
    gc.freeze()  # nothing of what was forked is looked at for garbage


def _call(batch: Any) -> Any:
    return _thread.submit(_function, batch).result()
